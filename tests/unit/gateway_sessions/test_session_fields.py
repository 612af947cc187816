"""What a session may be told when it is made: how many turns, how much context, until when, and how urgent it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.core.fleet.config import FleetConfig
from gateway.core.types import SessionId
from tests.support.gateway_shell import check_at_rest, read, shell
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import post, turn


async def test_a_session_has_no_more_turns_than_it_may(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await post(http, "/sessions", {"session_id": "s", "max_turns": 2})
        for prompt in ([5], [6]):
            await turn(http, "s", prompt)
        told = await post(http, "/s/s/v1/completions", {"model": MODEL, "prompt": [7]}, 409)
        assert "has had 2 turns, 0 run, of 2 at most" in told["error"]["message"]
        await post(http, "/sessions", {"max_turns": 0}, 400)
        told = await post(http, "/sessions", {"on_version_loss": "maybe"}, 400)
        assert "invalid enum value 'maybe' (one of segment, strict, fail)" in told["error"]["message"]


async def test_a_session_uses_no_more_context_than_it_may(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await post(http, "/sessions", {"session_id": "s", "max_context_tokens": 6})
        asked = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 100}
        told = await post(http, "/s/s/v1/completions", asked)
        assert (told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]) == (2, "length")
        told = await post(http, "/s/s/v1/completions", {**asked, "prompt": list(range(5, 11))}, 400)
        assert "6 tokens" in told["error"]["message"]


@pytest.mark.slow
async def test_a_session_past_its_deadline_is_abandoned_with_its_running_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.endings.EXPIRY_INTERVAL_S", 0.02)
    async with ScriptedEngine("e0", hold_at=2) as e0, gateway(tmp_path, e0) as (found, http):
        await post(http, "/sessions", {"session_id": "late", "deadline_s": 2.0})
        await post(http, "/sessions", {"session_id": "calm", "deadline_s": 600.0})
        asked = {"model": MODEL, "prompt": [5], "max_tokens": 9}
        told = await post(http, "/s/late/v1/completions", asked, 409)
        assert "its session was abandoned (its deadline is over)" in told["error"]["message"]
        assert (await get(http, "/sessions/calm"))["state"] == "live"
        await until(lambda: found.sessions.counters.sessions_abandoned == 1, "its end")


async def test_the_more_urgent_of_those_who_wait_goes_first(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", hold_at=2)
    async with e0, shell(tmp_path, e0, fleet=FleetConfig(max_running=1)) as found:
        first = asyncio.create_task(read(found.run(found.session("first"))))
        await until(lambda: e0.requests, "the one that runs")
        waiting = []
        for number, priority in enumerate((0, -5, 7, 7)):
            run = found.run(found.session(f"s{number}", priority=priority))
            waiting.append(asyncio.create_task(read(run)))
            await until(lambda n=number: found.fleet.statistics().queued == n + 1, "it waits")  # type: ignore[misc]
        e0.go.set()
        await asyncio.gather(first, *waiting)
        ended = sorted((s.newest.segments[0].started_unix_s, s.session_id) for s in found.sessions.live)
        assert [name for _, name in ended] == ["first", "s2", "s3", "s0", "s1"]
        check_at_rest(found)


async def test_what_a_client_expects_of_a_turn_is_what_plans_reckon_with_and_no_limit(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=2) as e0:
        async with gateway(tmp_path, e0) as (found, http):
            await post(http, "/sessions", {"session_id": "s", "expected_output_tokens": 4})
            await post(http, "/sessions", {"session_id": "any"})
            await post(http, "/sessions", {"expected_output_tokens": 0}, 400)
            asked = {"model": MODEL, "prompt": [5], "max_tokens": 9}
            running = [asyncio.create_task(post(http, f"/s/{name}/v1/completions", asked)) for name in ("s", "any")]
            await until(lambda: found.sessions.counters.tokens_generated == 4, "two tokens each")
            repacker, [engine] = found.parts.repacker, found.fleet.state.sorted_engines()
            grown = {load.session_id: load.kv_at for load in await repacker.loads(engine)}
            assert grown == {"s": [3, *[5] * 4], "any": [3, *[6] * 4]}, "two of four are left, and half of seven"
            e0.go.set()
            for told in await asyncio.gather(*running):
                assert told["usage"]["completion_tokens"] == 9
        async with gateway(tmp_path, e0) as (found, _):
            assert found.sessions.live.get(SessionId("s")).spec.expected_output_tokens == 4, "after a restart, too"


@pytest.mark.parametrize("from_user", [True, False])
async def test_calls_of_one_user_are_one_session_unless_that_is_switched_off(tmp_path: Path, from_user: bool) -> None:
    asked = {"model": MODEL, "prompt": [5], "max_tokens": 2, "user": "u"}
    told: list[tuple[str, str]] = []
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, session_from_user=from_user) as (found, http):
        for body in (asked, {**asked, "prompt": [6]}, {**asked, "metadata": {"session_id": "s"}}):
            async with http.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                told.append((answer.headers["X-Session-ID"], answer.headers["X-Laminar-Session-From"]))
        assert told[2] == ("s", "body")
        assert {s.session_id for s in found.sessions.live} == ({"u", "s"} if from_user else {"s"})
        if from_user:
            assert told[:2] == [("u", "body")] * 2
        else:
            assert [source for _, source in told[:2]] == ["none", "none"]
            assert told[0][0] != told[1][0]


async def test_a_session_that_has_ended_tells_how(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await turn(http, "s", [5])
        told = await post(http, "/sessions/s/finish", {"reward": 0.5})
        assert await get(http, "/sessions/s") == {"session_id": "s", "state": "finished", "result": told}
        await post(http, "/sessions", {"session_id": "gone"})
        await post(http, "/sessions/gone/abandon", {"reason": "why not"})
        assert await get(http, "/sessions/gone") == {"session_id": "gone", "state": "abandoned", "result": None}
        async with http.get("/sessions/never") as answer:
            assert answer.status == 404
        refused = await post(http, "/sessions", {"session_id": "s"}, 409)
        assert "(finished with reward 0.5, completed); trajectories carry its name" in refused["error"]["message"]


async def test_what_clients_of_engines_look_for_is_there(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        assert (await get(http, "/health"))["serving_engines"] == ["e0"]
        refused = await post(http, "/admin/engines", {"name": "x", "url": f"{e0.url}/v1/"}, 400)
        assert f"without the /v1: {e0.url}" in refused["error"]["message"]
