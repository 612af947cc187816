"""A whole gateway on a free port: what /status, /healthz, /metrics and the admin routes tell, and how it closes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from gateway.app import Gateway, start
from gateway.config import EngineSpec, GatewayConfig
from gateway.core.types import EngineName, SessionId
from tests.support.scripted_engine import MODEL, Cut, ScriptedEngine, scripted, until
from tests.support.words import tokenizer

PROMPT = [5, 6, 7]


def config(directory: Path, *engines: ScriptedEngine) -> GatewayConfig:
    specs = tuple(EngineSpec(e.name, "vllm", e.url, None) for e in engines)
    codec = tokenizer(directory / "model")
    return GatewayConfig(model=MODEL, tokenizer=codec, data=directory, port=0, engines=specs, dead_after_polls=1)


@contextlib.asynccontextmanager
async def gateway(
    directory: Path, *engines: ScriptedEngine, **settings: Any
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A running gateway over `engines`, all seen, and a client of it."""
    found = await start(dataclasses.replace(config(directory, *engines), **settings))
    try:
        async with aiohttp.ClientSession(found.url) as http:
            states = found.fleet.state.sorted_engines
            # A look that a busy machine let run out of time (" within 5 s") is made again: nothing was seen yet.
            await until(
                lambda: all(
                    e.status == "serving" or (e.last_error and " within " not in e.last_error) for e in states()
                ),
                "every engine seen",
            )
            yield found, http
    finally:
        await found.close(drain_timeout_s=1.0)


async def get(http: aiohttp.ClientSession, path: str) -> Any:
    async with http.get(path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def metrics(http: aiohttp.ClientSession) -> dict[str, float]:
    """Metrics of ours by name, or by name and engine."""
    async with http.get("/metrics") as answer:
        assert answer.content_type == "text/plain"
        text = await answer.text()
    found = re.findall(r'^laminar_gateway_(\w+){(?:engine="(\w+)",)?.*} (\S+)$', text, re.MULTILINE)
    return {f"{name} {engine}".strip(): float(value) for name, engine, value in found}


async def complete(http: aiohttp.ClientSession, path: str = "/v1/completions", max_tokens: int = 6) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "return_token_ids": True}
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def test_what_status_and_metrics_tell_of_cut_turns(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", cuts=deque([Cut("500"), Cut("eof", 2)]), version="3")
    async with e0, ScriptedEngine("e1", version="3") as e1, gateway(tmp_path, e0, e1) as (_, http):
        for _ in range(3):  # idle engines take turns: the second goes to e1
            code, answer = await complete(http)
            assert (code, answer["choices"][0]["token_ids"]) == (200, scripted(PROMPT, 6)[0])
        status = await get(http, "/status")
        counted = await metrics(http)
    assert (status["model"], status["mode"], status["newest_version"]) == (MODEL, "repack", 0)
    assert status["sessions"] == {"live": 0, "running_turns": 0, "queued": 0, "waiting_for": {}}
    told = {"turns_started": 3, "turns_completed": 3, "turns_cut": 2, "turns_resumed": 2, "turns_lost": 0}
    told |= {"turns_aborted": 0, "tokens_generated": 18, "moves": 0, "version_mismatches": 0, "sessions_abandoned": 0}
    assert {name: status["counters"][name] for name in told} == told
    assert status["counters"]["cuts_by_reason"] == {"server_error": 1, "early_end": 1}
    assert {name: counted[f"{name}_total"] for name in told} == told
    assert status["partial_response_pool"]["in_flight"] == 0
    assert status["partial_response_pool"]["appended_tokens"] == 18
    for engine, url in zip(status["engines"], (e0.url, e1.url), strict=True):
        assert (engine["url"], engine["state"], engine["intake"], engine["version"]) == (url, "serving", "open", 3)
        assert (engine["running"], engine["kv_capacity_tokens"], engine["incarnation"]) == (0, 16_000, "1.0")
        assert counted[f"engine_version {engine['name']}"] == 3
        assert counted[f"engine_serving {engine['name']}"] == 1


async def test_a_running_turn_shows(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, gateway(tmp_path, e0) as (found, http):
        asking = asyncio.create_task(complete(http, "/sessions/s1/v1/completions"))
        await until(lambda: found.sessions.counters.tokens_generated == 4, "four tokens")
        status, counted = await get(http, "/status"), await metrics(http)
        [engine] = status["engines"]
        assert status["sessions"] == {"live": 1, "running_turns": 1, "queued": 0, "waiting_for": {}}
        assert (engine["running"], engine["kv_tokens"], engine["admitted"]) == (1, 7, 1)
        assert counted["engine_running e0"] == 1
        assert status["partial_response_pool"]["in_flight"] == 1
        e0.go.set()
        await asking
        async with http.post("/sessions/s1/finish", json={"reward": 1.0}) as answer:
            assert answer.status == 200
        status, counted = await get(http, "/status"), await metrics(http)
        assert (status["sessions"]["live"], status["buffer"]["trajectories"]) == (0, 1)
        assert counted["trajectories_finished_total"] == 1
        assert counted["buffered_trajectories"] == 1


async def test_live_sessions_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, state: str, engine: str | None, version: int | None, turns: int, running: int) -> Any:
        told = {"session_id": name, "state": state, "engine": engine, "version": version}
        kept_by = "reward" if state == "unrewarded" else "turn"
        return told | {"turns": turns, "running": running, "kept_by": kept_by}

    async with ScriptedEngine("e0", version="3", hold_at=4) as e0, gateway(tmp_path, e0) as (found, http):
        assert await get(http, "/admin/sessions") == {"live": 0, "sessions": []}
        for asked in ({"session_id": "new"}, {"session_id": "pinned", "version": 3}):
            async with http.post("/sessions", json=asked) as answer:
                assert answer.status == 200
        for name, turns in (("gone", 1), ("talks", 2), ("waits", 1)):
            for _ in range(turns):
                assert (await complete(http, f"/s/{name}/v1/completions", max_tokens=3))[0] == 200
        for name, ending in (("gone", {"reward": 1.0}), ("waits", {})):
            async with http.post(f"/sessions/{name}/finish", json=ending) as answer:
                assert answer.status == 200
        asking = asyncio.create_task(complete(http, "/s/talks/v1/completions"))
        await until(lambda: found.sessions.counters.tokens_generated == 16, "four tokens of the turn that is held")

        found.sessions.live.find(SessionId("waits")).touched_unix_s -= 60  # type: ignore[union-attr]
        listed = await get(http, "/admin/sessions")
        idle_s = [session.pop("idle_s") for session in listed["sessions"]]
        assert idle_s[2] is None
        assert idle_s[3] >= 60
        assert listed["sessions"] == [
            row("new", "live", None, None, 0, 0),
            row("pinned", "live", None, 3, 0, 0),
            row("talks", "live", "e0", 3, 2, 1),
            row("waits", "unrewarded", "e0", 3, 1, 0),
        ]
        assert listed["live"] == (await get(http, "/status"))["sessions"]["live"] == 4
        for limit, most, shown in ((2, 9, ["new", "pinned"]), (99, 1, ["new"])):
            monkeypatch.setattr("gateway.api.admin.LISTED_MAX", most)
            page = await get(http, f"/admin/sessions?limit={limit}")
            assert (page["live"], [session["session_id"] for session in page["sessions"]]) == (4, shown)
        e0.go.set()
        assert (await asking)[0] == 200
        [_, _, talks, _] = found.sessions.live
        assert (talks.turns, len(talks.running)) == (3, 0)


@pytest.mark.parametrize(("store", "mib"), [("database", 64), ("memory", 4)])
async def test_pages_are_cached_where_trajectories_are_in_the_file(tmp_path: Path, store: str, mib: int) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, experience_store=store) as (found, _):
        cache = await found.stores.database.run(lambda opened: opened.execute("PRAGMA cache_size").fetchone())
    assert cache == (-mib << 10,)


async def test_health_is_whether_any_engine_serves(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1, gateway(tmp_path, e0, e1) as (found, http):
        assert (await get(http, "/healthz"))["serving_engines"] == ["e0", "e1"]
        for engine, left in ((e0, ["e1"]), (e1, [])):
            await engine.die()
            found.fleet.suspect(EngineName(engine.name))
            state = found.fleet.state.engines[EngineName(engine.name)]
            await until(lambda state=state: state.status == "dead", "notice of the death")  # type: ignore[misc]
            async with http.get("/healthz") as answer:
                body = await answer.json()
            assert (answer.status, body["serving_engines"]) == (200 if left else 503, left)
        [first, _] = (await get(http, "/status"))["engines"]
        assert (first["state"], first["intake"], e0.url in first["last_error"]) == ("dead", "closed", True)
        assert (await metrics(http))["engine_serving e0"] == 0


async def test_an_error_of_an_engine_that_answers_again_is_history(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        member = found.fleet.handles[EngineName("e0")]

        async def told() -> tuple[str, str]:
            [engine] = (await get(http, "/status"))["engines"]
            return engine["state"], engine["last_error"]

        for fails_at in ("/metrics", "/v1/models"):
            e0.answers[fails_at] = 500
            found.fleet.suspect(member.state.name)
            await until(lambda: member.state.last_error, "notice of it")
            assert fails_at in (await told())[1]
            e0.answers.clear()
            member.poll_now.set()
            await until(lambda: member.state.status == "serving", "a look that succeeds")
            assert await told() == ("serving", "")
        looks = [e["error"] for e in (await get(http, "/admin/timeline"))["events"] if e["kind"] == "look"]
        assert ["/metrics" in looks[0], "/v1/models" in looks[1]] == [True, True]


async def test_engines_come_and_go(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1, gateway(tmp_path, e0) as (found, http):
        added = {"name": "e1", "url": e1.url}
        async with http.post("/admin/engines", json=added) as answer:
            assert answer.status == 201
        await until(lambda: found.fleet.state.sorted_engines()[1].status == "serving", "the new engine")
        async with http.post("/admin/engines", json=added) as answer:
            assert (answer.status, "already an engine named 'e1'" in await answer.text()) == (409, True)
        async with http.post("/admin/engines", json={**added, "kind": "tgi"}) as answer:
            assert (answer.status, "known kinds: vllm" in await answer.text()) == (400, True)
        async with http.post("/admin/engines", json={**added, "relay": "r"}) as answer:
            assert (answer.status, "'r' is not HOST:PORT (such as" in await answer.text()) == (400, True)
        async with http.delete("/admin/engines/e0") as answer:
            assert answer.status == 200
        async with http.delete("/admin/engines/e0") as answer:
            assert (answer.status, "there are: e1" in await answer.text()) == (404, True)
        assert [e["name"] for e in (await get(http, "/status"))["engines"]] == ["e1"]
        await complete(http)
        assert len(e1.requests) == 1
        events = (await get(http, "/admin/timeline"))["events"]
        assert [e["engine"] for e in events if e["kind"] == "segment"] == ["e1"]
        assert (await get(http, "/admin/repack"))["plans"] == []


@contextlib.asynccontextmanager
async def closing(directory: Path, drain_timeout_s: float) -> AsyncIterator[tuple[Any, ...]]:
    """A gateway that is told to close while a turn is held: its engine, its URL, the client's request, the closing."""
    async with ScriptedEngine("e0", hold_at=4) as e0:
        found = await start(config(directory, e0))
        async with aiohttp.ClientSession(found.url) as http:
            await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
            asking = asyncio.create_task(complete(http))
            await until(lambda: found.sessions.counters.tokens_generated == 4, "four tokens")
            ending = asyncio.create_task(found.close(drain_timeout_s=drain_timeout_s))
            yield e0, found.url, asking, ending
            asking.cancel()
            await asyncio.wait({asking, ending})


async def test_closing_lets_a_running_turn_finish(tmp_path: Path) -> None:
    async with closing(tmp_path, 60.0) as (e0, url, asking, ending):
        await refused(url)
        assert not ending.done()
        e0.go.set()
        code, answer = await asking
        assert (code, answer["choices"][0]["token_ids"]) == (200, scripted(PROMPT, 6)[0])
        await ending


async def test_closing_hands_over_what_has_not_finished_in_time(tmp_path: Path) -> None:
    async with closing(tmp_path, 0.01) as (e0, _, asking, ending):
        await asyncio.wait({ending}, timeout=60)  # the turn is held: it would wait for ever
        assert ending.done()
        code, answer = await asking
        assert (code, "send it again: the turn will go on" in answer["error"]["message"]) == (503, True)
        await until(lambda: e0.requests[0].left, "the abort upstream")
        e0.go.set()
        found = await start(config(tmp_path, e0))
        async with aiohttp.ClientSession(found.url) as http:
            code, answer = await complete(http)
        assert (code, answer["choices"][0]["token_ids"]) == (200, scripted(PROMPT, 6)[0])
        assert e0.requests[1].prompt == [*PROMPT, *scripted(PROMPT, 4)[0]], "no token is asked for twice"
        await found.close()


async def test_a_gateway_that_closes_takes_no_new_session(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0:
        found = await start(config(tmp_path, e0))
        async with aiohttp.ClientSession(found.url) as http:
            await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
            await (await http.get("/status")).read()  # a connection that is there when the gateway begins to close
            found.sessions.live.draining = True
            for path, body in (("/sessions", {}), ("/v1/completions", {"model": MODEL, "prompt": list(PROMPT)})):
                async with http.post(path, json=body) as answer:
                    assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")
        await found.close()


async def test_a_request_before_the_first_engine_was_seen_is_not_called_too_long(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        found = await start(config(tmp_path, e0))
        async with aiohttp.ClientSession(found.url) as http:
            code, answer = await complete(http)
        await found.close()
        assert code in (200, 503), answer  # it waits, or is to come again


async def refused(url: str) -> None:
    """Until nothing listens there any more."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            while True:
                _, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
                writer.close()


@pytest.mark.parametrize("path", ["/admin/timeline?after=x", "/admin/timeline?limit=-1", "/admin/sessions?limit=x"])
async def test_a_wrong_number_is_named(tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path) as (_, http), http.get(path) as answer:
        assert (answer.status, "is not a number" in await answer.text()) == (400, True)


async def test_an_engine_that_is_no_use_is_not_taken_in(tmp_path: Path) -> None:
    e1, critic = ScriptedEngine("e1"), ScriptedEngine("x", answers={"/v1/models": '{"data": [{"id": "critic"}]}'})
    async with ScriptedEngine("e0") as e0, e1, critic, gateway(tmp_path, e0) as (found, http):
        await e1.die()
        refused = {
            e1.url: (
                503,
                f"engine e9 cannot be used: GET {e1.url}/metrics: {e1.url} does not accept",
                "start it first",
            ),
            critic.url: (503, "serves ['critic'], not 'policy'", "--served-model-name"),
            e0.url + "/": (409, "is engine 'e0' already", "counts once"),
        }
        for url, (status, message, hint) in refused.items():
            async with http.post("/admin/engines", json={"name": "e9", "url": url}) as answer:
                said_ = (await answer.json())["error"]["message"]
                assert (answer.status, message in said_, hint in said_) == (status, True, True), said_
        assert list(found.fleet.handles) == ["e0"]
        async with http.post("/admin/engines", json={"name": "e9", "url": e1.url, "check": False}) as answer:
            assert answer.status == 201
        await until(lambda: found.fleet.state.engines[EngineName("e9")].last_error, "the first look")
        [told] = [e for e in (await get(http, "/status"))["engines"] if e["name"] == "e9"]
        assert (told["state"], "does not accept connections" in told["last_error"]) == ("dead", True)
