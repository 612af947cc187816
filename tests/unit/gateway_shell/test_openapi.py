"""The schema the gateway serves: all of its routes, none besides; and what is asked by it never meets a 5xx."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.openapi import ROUTES, schema
from gateway.app import start
from tests.support.cutting_engine import CuttingEngine, until
from tests.unit.gateway_shell.test_status import config

EXAMPLES = 150
PLAIN: Any = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5)
)
ANYTHING: Any = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
)


async def test_every_route_is_in_the_schema_and_none_besides(tmp_path: Path) -> None:
    async with CuttingEngine("e0") as e0:
        found = await start(config(tmp_path, e0))
        async with aiohttp.ClientSession(found.url) as http, http.get("/openapi.json") as answer:
            served = await answer.json()
        routes = {
            (route.method.lower(), route.resource.canonical)
            for route in found._runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        await found.close()
    assert served == json.loads(json.dumps(schema()))
    assert {(method, path) for path, methods in served["paths"].items() for method in methods} == routes


def test_bodies_are_the_structs_that_decode_them() -> None:
    schemas = schema()["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["model", "messages"]
    assert not schemas["ChatRequest"]["additionalProperties"]
    assert set(schemas["Finish"]["properties"]) >= {"reward", "status", "metrics"}


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
    }
    body = {name: value for name, value in usual.items() if name in fields and draw(st.integers(0, 9))} | body
    body.pop("wait_s", None)
    return route.method, path, json.dumps(body).encode()


async def test_nothing_asked_by_the_schema_meets_a_5xx(tmp_path: Path) -> None:
    drawn: list[tuple[str, str, bytes | None]] = []

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests())
    def draw(request: tuple[str, str, bytes | None]) -> None:
        drawn.append(request)

    draw()
    async with CuttingEngine("e0") as e0:
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
