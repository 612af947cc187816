"""Rewards over HTTP: with the finish, for turns and leaves, and after it while nobody has used the trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway

SAMPLE = {"reader": "t", "trainer_version": 0, "trajectories": 8}


async def post(http: aiohttp.ClientSession, path: str, body: Any = None, status: int = 200) -> Any:
    async with http.post(path, json=body) as answer:
        told = await answer.json()
        assert answer.status == status, told
        return told


async def turn(http: aiohttp.ClientSession, session: str, prompt: list[int]) -> Any:
    extra = {"return_token_ids": True}
    return await post(
        http, f"/s/{session}/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2, **extra}
    )


async def branches(http: aiohttp.ClientSession, session: str) -> tuple[str, str, str]:
    """The ids of a session's answers: the first turn's, and those of two that go on from it."""
    first = await turn(http, session, [5])
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    return first["id"], *[(await turn(http, session, [*before, extra]))["id"] for extra in (7, 8)]


async def rewards(http: aiohttp.ClientSession) -> list[tuple[float, list[float | None]]]:
    told = await post(http, "/experience/sample", SAMPLE)
    return [(t["reward"], t["turn_rewards"]) for t in told["trajectories"]]


async def test_rewards_of_session_turn_and_leaf(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        first, left, _ = await branches(http, "s")
        await post(http, "/sessions/s/reward", {"turns": {first: 0.25}})
        told = await post(http, "/sessions/s/finish", {"reward": 1.0, "leaves": {left: -1.0}})
        assert (told["leaves"], told["turns"]) == (2, 3)
        assert await rewards(http) == [(-1.0, [0.25, None]), (1.0, [0.25, None])]


async def test_rewards_change_after_the_finish_until_a_trainer_has_it(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        first, left, right = await branches(http, "s")
        await post(http, "/sessions/s/finish", {"reward": 1.0, "leaves": {left: -1.0}})
        assert (await post(http, "/sessions/s/reward", {"reward": 2.0, "turns": {right: 0.5}}))["state"] == "finished"
        refused = await post(http, "/sessions/s/reward", {"turns": {"chatcmpl-nobody": 1.0}}, 400)
        assert "no turn 'chatcmpl-nobody'" in refused["error"]["message"]
        await post(http, "/sessions/s/reward", {"leaves": {first: 1.0}}, 400)
        assert await rewards(http) == [(-1.0, []), (2.0, [None, 0.5])]
        refused = await post(http, "/sessions/s/reward", {"reward": 3.0}, 409)
        assert "a reader has session s" in refused["error"]["message"]


async def test_a_finish_without_reward_waits_for_it(tmp_path: Path) -> None:
    """As routers' clients finish: they know nothing of rewards."""
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await turn(http, "s", [5])
        assert (await post(http, "/finish_session?session_id=s"))["state"] == "unrewarded"
        await post(http, "/s/s/v1/completions", {"model": MODEL, "prompt": [5]}, 409)
        assert (await post(http, "/finish_session?session_id=s"))["state"] == "unrewarded", "asked the same again"
        told = await post(http, "/finish_session?session_id=s", {"status": "truncated"}, 409)
        assert "finished with reward none, completed and waits for its reward" in told["error"]["message"]
        assert await rewards(http) == []
        assert (await post(http, "/sessions/s/reward", {"reward": 0.5}))["state"] == "finished"
        assert await rewards(http) == [(0.5, [])]
        told = await post(http, "/sessions/s/finish", {"reward": 1.0}, 409)
        assert "already finished with reward 0.5" in told["error"]["message"]
        assert (await post(http, "/finish_session?session_id=s"))["reward"] == 0.5, "the first request, sent again"


async def test_a_reward_sent_again_is_answered_again_and_another_one_is_told_what_is_recorded(tmp_path: Path) -> None:
    """While it waits, while a trainer has it, after it was used, and over a restart."""
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            first, left, _ = await branches(http, "s")
            finish = {"reward": 1.0, "turns": {first: 0.25}, "leaves": {left: -1.0}, "metrics": {"m": 1.0}}
            result = await post(http, "/sessions/s/finish", finish)
            later = {"reward": 2.0, "turns": {first.removeprefix("cmpl-"): 0.5}}
            await post(http, "/sessions/s/reward", later)

            async def check(http: aiohttp.ClientSession) -> None:
                assert await post(http, "/sessions/s/finish", finish) == result
                for again in (later, {"reward": 2.0}, {"leaves": {left: -1.0}}):
                    told = await post(http, "/sessions/s/reward", again)
                    assert told == {"session_id": "s", "state": "finished"}

            async def check_refused(http: aiohttp.ClientSession, why: str) -> None:
                await check(http)
                for other in ({"reward": 1.0}, {"reward": 2.0, "turns": {first: 0.25}}, {"turns": {"x": 1.0}}):
                    told = (await post(http, "/sessions/s/reward", other, 409))["error"]["message"]
                    assert "session s is already finished with reward 2, completed" in told
                    assert why in told
                told = (await post(http, "/sessions/s/finish", {"reward": 2.0}, 409))["error"]["message"]
                assert "already finished with reward 2" in told

            await check(http)
            batch = await post(http, "/experience/sample", SAMPLE)
            await check_refused(http, "a reader has session s")
            await post(http, "/experience/ack", {"lease_id": batch["lease_id"]})
            await check_refused(http, "is not in the experience buffer")
        async with gateway(tmp_path, e0) as (_, http):
            await check_refused(http, "is not in the experience buffer")


async def test_a_reward_of_an_evaluation_is_answered_again(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await post(http, "/sessions", {"session_id": "s", "split": "eval"})
        await turn(http, "s", [5])
        await post(http, "/finish_session?session_id=s")
        for _ in range(2):
            await post(http, "/sessions/s/reward", {"reward": 0.5})
        told = await post(http, "/sessions/s/reward", {"reward": 1.0}, 409)
        assert "already finished with reward 0.5" in told["error"]["message"]


async def test_a_window_that_ended_takes_no_reward_and_who_waited_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.endings.EXPIRY_INTERVAL_S", 0.02)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        for session in ("early", "never", "idle"):
            await turn(http, session, [5])
        await post(http, "/sessions/early/finish", {"reward": 1.0})
        object.__setattr__(found.sessions.config, "reward_window_s", -1.0)
        await post(http, "/finish_session?session_id=never")
        refused = await post(http, "/sessions/early/reward", {"reward": 2.0}, 409)
        assert "the window for rewards of early ended" in refused["error"]["message"]
        await until(lambda: found.sessions.counters.sessions_abandoned == 1, "the one that waited in vain")
        refused = await post(http, "/sessions/never/reward", {"reward": 2.0}, 409)
        assert "already abandoned" in refused["error"]["message"]
        object.__setattr__(found.sessions.config, "session_idle_s", 0.0)
        await until(lambda: found.sessions.counters.sessions_abandoned == 2, "the one that nobody touched")
        refused = await post(http, "/s/idle/v1/completions", {"model": MODEL, "prompt": [5]}, 409)
        assert "already abandoned" in refused["error"]["message"]


async def test_a_finish_names_the_group_of_a_session_that_its_first_call_made(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        for number in range(2):
            await turn(http, f"s{number}", [5])
            place = {"group_id": "task-7", "sample_index": number, "tags": {"agent": "solver"}}
            await post(http, f"/sessions/s{number}/finish", {"reward": 1.0, **place})
        await turn(http, "later", [5])
        assert (await post(http, "/sessions/later/finish", {"group_id": "task-7", "sample_index": 2}))["state"]
        await post(http, "/sessions/later/reward", {"reward": 0.5})
        told = await post(http, "/experience/sample", {**SAMPLE, "trajectories": None, "groups": 1, "group_size": 3})
        found = [(t["session_id"], t["group_id"], t["sample_index"], t["tags"]) for t in told["trajectories"]]
        solver = {"agent": "solver"}
        assert sorted(found) == [("later", "task-7", 2, {}), ("s0", "task-7", 0, solver), ("s1", "task-7", 1, solver)]


async def test_a_finish_moves_no_session_out_of_its_group_or_into_one_that_was_made(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await post(http, "/sessions", {"session_id": "grouped", "group_id": "mine"})
        await post(http, "/groups", {"group_id": "made", "group_size": 1})
        for name, group, why in (("grouped", "other", "is in group mine"), ("alone", "made", "none of its members")):
            await turn(http, name, [5])
            refused = await post(http, f"/sessions/{name}/finish", {"reward": 1.0, "group_id": group}, 409)
            assert why in refused["error"]["message"]
        await post(http, "/sessions/grouped/finish", {"reward": 1.0, "group_id": "mine"})
        await post(http, "/sessions/alone/finish", {"reward": 1.0})
