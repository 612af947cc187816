"""The schema the gateway serves: all of its routes, none besides; and what is asked by it never meets a 5xx."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api import openapi
from gateway.api.openapi import schema
from gateway.api.routes import ROUTES
from gateway.app import start
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import config

EXAMPLES = 150
PLAIN: Any = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5)
)
ANYTHING: Any = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
)


async def test_every_route_is_in_the_schema_and_none_besides(tmp_path: Path) -> None:
    openapi._document.cache_clear()  # it may be of a test before this one, which has added a kind of engine
    async with ScriptedEngine("e0") as e0:
        found = await start(config(tmp_path, e0))
        async with aiohttp.ClientSession(found.url) as http, http.get("/openapi.json") as answer:
            served = await answer.json()
        routes = {
            (route.method.lower(), route.resource.canonical)
            for route in found.listener.runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        await found.close()
    made = json.loads(json.dumps(schema()))
    for name, component in made["components"]["schemas"].items():
        assert served["components"]["schemas"].get(name) == component, name
    assert served == made
    assert {(method, path) for path, methods in served["paths"].items() for method in methods} == routes


def test_bodies_are_the_structs_that_decode_them() -> None:
    schemas = schema()["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["model", "messages"]
    assert not schemas["ChatRequest"]["additionalProperties"]
    assert set(schemas["Finish"]["properties"]) >= {"reward", "status", "metrics"}


def test_every_route_says_what_it_answers() -> None:
    document = schema()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            [*told, default] = operation["responses"].values()
            assert told, f"{method} {path}"
            error = "AnthropicError" if "/v1/messages" in path else "Error"
            assert default["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{error}"}
            for one in told:
                typed = one["content"].get("application/json", {}).get("schema")
                assert typed or path in ("/metrics", "/openapi.json") or path.startswith("/ui"), f"{method} {path}"
    events = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert list(events) == ["application/json", "text/event-stream"]
    ended = document["paths"]["/sessions/{sid}/finish"]["post"]["responses"]["200"]["content"]
    refs = [{"$ref": f"#/components/schemas/{name}"} for name in ("Finished", "SessionAnswer")]
    assert ended["application/json"]["schema"] == {"anyOf": refs}
    for path in ("/v1/chat/completions", "/s/{sid}/v1/completions"):
        operation = document["paths"][path]["post"]
        assert {"X-Session-ID", "X-Laminar-History", "X-Request-Id"} <= set(operation["responses"]["200"]["headers"])
        assert {"Idempotency-Key", "X-Session-ID"} <= {p["name"] for p in operation["parameters"]}
    assert list(document["paths"]["/healthz"]["get"]["responses"]) == ["200", "503", "default"]


def test_every_route_says_which_keys_it_takes() -> None:
    document = schema()
    schemes = document["components"]["securitySchemes"]
    assert set(schemes) == {"api_key", "api_key_header", "session_key", "finish_key"}
    for route in ROUTES:
        operation = document["paths"][route.path][route.method]
        refusals = {"401", "403"} & set(operation["responses"])
        if route.operation.public:
            assert (operation["security"], refusals) == ([], set())
            continue
        taken = {name for requirement in operation["security"] for name in requirement}
        assert {"api_key", "api_key_header"} <= taken <= set(schemes)
        assert ("session_key" in taken, "finish_key" in taken) == (
            route.operation.session_key,
            route.operation.finish_key,
        )
        assert refusals == {"401", "403"}
        assert "admin" in operation["x-laminar-roles"]
    finish = document["paths"]["/sessions/{sid}/finish"]["post"]
    assert finish["x-laminar-roles"] == ["admin", "trainer", "agent"]
    assert "WWW-Authenticate" in finish["responses"]["401"]["headers"]


async def test_what_is_answered_is_what_the_schema_says(tmp_path: Path) -> None:
    """As JSON to the struct and back: nothing is lost, and nothing is missing."""
    async with ScriptedEngine("e0") as e0, contextlib.AsyncExitStack() as stack:
        found = await start(config(tmp_path, e0))
        stack.push_async_callback(found.close, drain_timeout_s=0.1)
        http = await stack.enter_async_context(aiohttp.ClientSession(found.url))
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        reader = {"reader": "r", "trainer_version": 0}
        turn = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 3, "return_weight_versions": True}
        asked: list[tuple[str, str, str, Any]] = [
            ("post", "/sessions", "/sessions", {"session_id": "s1"}),
            ("post", "/groups", "/groups", {"group_id": "g1", "size": 2, "resample_max": 1}),
            ("post", "/sessions/{sid}/v1/completions", "/sessions/s1/v1/completions", turn),
            ("get", "/sessions/{sid}", "/sessions/s1", None),
            ("get", "/sessions/{sid}/trajectories", "/sessions/s1/trajectories?tokens=true", None),
            ("get", "/admin/sessions", "/admin/sessions", None),
            ("post", "/admin/sessions/abandon", "/admin/sessions/abandon", {"idle_s": 1000}),
            ("post", "/sessions/{sid}/finish", "/sessions/s1/finish", {}),
            ("post", "/sessions/{sid}/finish", "/sessions/s1/finish", {"reward": 1.0}),
            ("get", "/groups/{gid}", "/groups/g1", None),
            ("post", "/groups/{gid}/abandon", "/groups/g1/abandon", {}),
            ("get", "/experience/rows", "/experience/rows?after=0&limit=1", None),
            ("get", "/experience/rows/{number}", "/experience/rows/1", None),
            ("get", "/experience/statistics", "/experience/statistics", None),
            ("post", "/experience/peek", "/experience/peek", {"trajectories": 1}),
            ("post", "/experience/sample", "/experience/sample", {**reader, "trajectories": 1}),
            ("post", "/experience/release", "/experience/release", ["lease_id"]),  # of the answer before it
            ("post", "/experience/sample", "/experience/sample", {**reader, "trajectories": 1}),
            ("post", "/experience/ack", "/experience/ack", ["lease_id"]),
            ("post", "/experience/reclaim", "/experience/reclaim", {"reader": "me"}),
            ("post", "/experience/evict", "/experience/evict", {"session_ids": ["nobody"]}),
            ("post", "/tasks", "/tasks", {"tasks": [{"task_id": "t", "data": {"q": 1}}, {"data": {"q": 2}}]}),
            ("get", "/tasks", "/tasks?pool=default", None),
            ("post", "/tasks/lease", "/tasks/lease", {"runner": "r", "request": "one"}),
            ("post", "/tasks/finish", "/tasks/finish", lambda before: {**leased(before), "reward": 1.0}),
            ("post", "/tasks/lease", "/tasks/lease", {"runner": "r", "request": "two"}),
            ("post", "/tasks/fail", "/tasks/fail", leased),
            ("post", "/tasks/renew", "/tasks/renew", {"lease_ids": ["unknown"]}),
            ("post", "/tasks/release", "/tasks/release", {"lease_ids": ["unknown"]}),
            ("get", "/tasks/results", "/tasks/results?after=0&limit=10", None),
            ("post", "/tasks/priorities", "/tasks/priorities", {"priorities": {"t": 2.0, "none": 1.0}}),
            ("post", "/tasks/remove", "/tasks/remove", {"drained": True}),
            ("get", "/status", "/status", None),
            ("get", "/healthz", "/healthz", None),
            ("get", "/health", "/health", None),
            ("get", "/sessions/{sid}", "/sessions/s1", None),
            ("get", "/admin/timeline", "/admin/timeline", None),
            ("get", "/admin/repack", "/admin/repack", None),
            ("post", "/admin/repack", "/admin/repack", None),
            ("get", "/admin/receipts", "/admin/receipts", None),
            ("get", "/v1/models", "/v1/models", None),
            ("get", "/v1/models/{model}", "/v1/models/policy", None),
            ("post", "/sessions", "/sessions", {"session_id": "s2"}),
            ("post", "/sessions/{sid}/v1/completions", "/sessions/s2/v1/completions", turn),
            ("post", "/sessions/{sid}/finish", "/sessions/s2/finish", {}),
            ("post", "/sessions/{sid}/reward", "/sessions/s2/reward", {"reward": 1.0}),
            ("post", "/sessions", "/sessions", {"session_id": "s3"}),
            ("post", "/sessions/{sid}/abandon", "/sessions/s3/abandon", None),
            ("delete", "/admin/engines/{name}", "/admin/engines/e0", None),
            ("post", "/admin/engines", "/admin/engines", {"name": "e1", "url": e0.url, "kind": "vllm"}),
        ]
        listed = {(r.method, r.path) for r in ROUTES if r.answers and "/v1/" not in r.path}  # those have clients' tests
        missing = listed - {(method, path) for method, path, _, _ in asked} - {("post", "/finish_session")}
        assert not missing, "add them above"
        raw = b""
        for method, path, url, body in asked:
            [route] = [r for r in ROUTES if (r.method, r.path) == (method, path)]
            if callable(body):
                body = body(json.loads(raw))
            elif isinstance(body, list):
                body = {name: json.loads(raw)[name] for name in body}
            async with http.request(method, url, json=body) as answer:
                raw = await answer.read()
                assert answer.status in (route.status, route.also_status), f"{method} {url}: {answer.status} {raw!r}"
            fitting = [kind for kind in route.answers if fits(kind, raw)]
            assert fitting, f"{method} {url}: {raw!r}"


def leased(answer: Any) -> dict[str, Any]:
    """The body that ends the lease of the answer before it."""
    return {"lease_id": answer["leases"][0]["lease_id"]}


def fits(kind: type[msgspec.Struct], raw: bytes) -> bool:
    with contextlib.suppress(msgspec.ValidationError):
        return bool(json.loads(msgspec.json.encode(msgspec.json.decode(raw, type=kind))) == json.loads(raw))
    return False


@st.composite
def requests(draw: Any) -> tuple[str, str, bytes | None]:
    """A request of the schema, nearly: fields that are known, values of their type or of any."""
    route = draw(st.sampled_from([r for r in ROUTES if "/s/" not in r.path]))
    path = route.path
    for name in ("sid", "gid", "name", "model"):
        path = path.replace("{" + name + "}", draw(st.sampled_from(["s1", "policy", "é", "a%20b", "..", "x" * 300])))
    if route.query:
        values = st.sampled_from(["", "1", "-1", "é", "²", "9" * 30])
        path += "?" + "&".join(f"{name}={draw(values)}" for name in route.query)
    if route.body is None:
        return route.method, path, None
    fields = schema()["components"]["schemas"][route.body.__name__]["properties"]
    body = draw(st.dictionaries(st.sampled_from(sorted(fields)), ANYTHING, max_size=3))
    usual = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hello"}],
        "prompt": draw(st.sampled_from(["hello", [5, 6], [], [[5]], [-1]])),
        "max_tokens": 3,
        "reward": 1.0,
        "reader": "r",
        "trainer_version": draw(st.sampled_from([0, 2**40, 2**70])),
        "trajectories": 1,
        "wait_s": 0.0,
        "name": "e0",
        "url": "http://127.0.0.1:1",
        "lease_id": "l",
        "lease_ids": ["l"],
        "runner": "r",
        "tasks": [{"data": {"q": 1}}],
    }
    body = {name: value for name, value in usual.items() if name in fields and draw(st.integers(0, 9))} | body
    body.pop("wait_s", None)
    return route.method, path, json.dumps(body).encode()


@pytest.mark.slow
async def test_nothing_asked_by_the_schema_meets_a_5xx(tmp_path: Path) -> None:
    drawn: list[tuple[str, str, bytes | None]] = []

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(requests())
    def draw(request: tuple[str, str, bytes | None]) -> None:
        drawn.append(request)

    draw()
    async with ScriptedEngine("e0") as e0:
        found = await start(config(tmp_path, e0))
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        async with aiohttp.ClientSession(found.url, timeout=aiohttp.ClientTimeout(total=20)) as http:
            for method, path, body in drawn:
                if (method, path) == ("delete", "/admin/engines/e0"):
                    continue
                async with http.request(method, path, data=body) as answer:
                    told = f"{method} {path} {body!r}: {answer.status} {(await answer.text())[:300]}"
                    assert answer.status < 500, told
        await found.close(drain_timeout_s=0.1)
