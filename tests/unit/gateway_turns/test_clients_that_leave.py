"""What becomes of an answer whose client leaves before it has seen all of it, and of the session that ends then."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post, turn

NUM = 12


async def stream_and_leave(http: aiohttp.ClientSession, session: str, after: int, **more: Any) -> int:
    """Streams a turn of so many tokens and closes it once `after` were read; returns how many were."""
    asked = {"model": MODEL, "prompt": [5], "max_tokens": NUM, "stream": True, "return_token_ids": True, **more}
    read = 0
    async with http.post(f"/s/{session}/v1/completions", json=asked) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: {"):
                read += line.count(b'"token_ids":[') and len(ids_of(line))
                if read >= after:
                    break
        answer.close()
    return read


def ids_of(line: bytes) -> list[int]:
    choices = json.loads(line[6:])["choices"]
    return [i for choice in choices for i in choice.get("token_ids", [])]


async def trained(http: aiohttp.ClientSession) -> list[dict[str, Any]]:
    told = await post(http, "/experience/sample", SAMPLE)
    return list(told["trajectories"])


async def test_the_tail_that_no_client_was_sent_is_not_trained_on(tmp_path: Path) -> None:
    engine = ScriptedEngine("e0", chunk=1, hold_at=4)
    async with engine, gateway(tmp_path, engine, disconnect_grace_s=30.0) as (found, http):
        read = await stream_and_leave(http, "s", 4)
        await until(lambda: found.sessions.counters.turns_orphaned == 1, "the client is seen to have left")
        engine.go.set()
        await until(lambda: not found.sessions.running, "the turn's end")
        await post(http, "/sessions/s/finish", {"reward": 1.0})
        [one] = await trained(http)
    assert read == 4
    assert len(one["token_ids"]) == 1 + NUM, "the record is whole"
    assert one["loss_mask"] == [0] + [1] * 4 + [0] * (NUM - 4)
    assert one["logprobs"][5:] == [0.0] * (NUM - 4)
    assert one["versions"][5:] == [-1] * (NUM - 4)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "in flight"])
async def test_what_no_client_was_sent_is_not_trained_on_after_a_restart_either(tmp_path: Path, ended: bool) -> None:
    """Of a turn in flight nobody knows how much was sent; its client did not see its end, and no agent acted on it."""
    engine = ScriptedEngine("e0", chunk=1, hold_at=4)
    async with engine:
        async with gateway(tmp_path, engine, disconnect_grace_s=30.0) as (found, http):
            await stream_and_leave(http, "s", 4)
            await until(lambda: found.sessions.counters.turns_orphaned == 1, "the client is seen to have left")
            if ended:
                engine.go.set()
                await until(lambda: not found.sessions.running, "the turn's end")
        engine.go.set()
        async with gateway(tmp_path, engine) as (found, http):
            await until(lambda: not found.sessions.running, "the turn's end")
            await post(http, "/sessions/s/finish", {"reward": 1.0})
            [one] = await trained(http)
    assert len(one["token_ids"]) == 1 + NUM, "the record is whole"
    assert sum(one["loss_mask"]) == (4 if ended else 0)


@pytest.mark.slow
async def test_who_asks_again_after_a_restart_is_trained_on_all(tmp_path: Path) -> None:
    engine = ScriptedEngine("e0", chunk=1, hold_at=4)
    async with engine:
        async with gateway(tmp_path, engine, disconnect_grace_s=30.0) as (found, http):
            await stream_and_leave(http, "s", 4)
            await until(lambda: found.sessions.counters.turns_orphaned == 1, "the client is seen to have left")
        engine.go.set()
        async with gateway(tmp_path, engine) as (found, http):
            assert await stream_and_leave(http, "s", NUM + 1) == NUM
            assert found.sessions.counters.turns_joined == 1
            await post(http, "/sessions/s/finish", {"reward": 1.0})
            [one] = await trained(http)
    assert one["loss_mask"] == [0] + [1] * NUM


async def test_who_asks_again_and_gets_the_rest_is_trained_on_all(tmp_path: Path) -> None:
    engine = ScriptedEngine("e0", chunk=1, hold_at=4)
    async with engine, gateway(tmp_path, engine, disconnect_grace_s=30.0) as (found, http):
        await stream_and_leave(http, "s", 4)
        await until(lambda: found.sessions.counters.turns_orphaned == 1, "the client is seen to have left")
        engine.go.set()
        assert await stream_and_leave(http, "s", NUM + 1) == NUM
        assert found.sessions.counters.turns_joined == 1
        await post(http, "/sessions/s/finish", {"reward": 1.0})
        [one] = await trained(http)
    assert one["loss_mask"] == [0] + [1] * NUM


async def test_a_plain_answer_is_trained_on_whole(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        await turn(http, "s", [5])
        await post(http, "/sessions/s/finish", {"reward": 1.0})
        [one] = await trained(http)
    assert one["loss_mask"] == [0, 1, 1]


async def test_a_session_can_be_finished_right_after_its_client_left(tmp_path: Path) -> None:
    """The turn ends with what was sent, although it would have gone on for the grace."""
    engine = ScriptedEngine("e0", chunk=1, hold_at=4)
    async with engine, gateway(tmp_path, engine, disconnect_grace_s=30.0) as (_, http):
        await stream_and_leave(http, "s", 4)
        told = await post(http, "/sessions/s/finish", {"reward": 1.0})
        assert (told["turns"], told["sampled_tokens"], told["stored"]) == (1, 4, True)
        [one] = await trained(http)
    assert one["loss_mask"] == [0, 1, 1, 1, 1]


async def test_a_turn_that_somebody_reads_is_not_ended_by_a_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.turn_service.CONCLUDE_PATIENCE_S", 0.1)
    engine = ScriptedEngine("e0", chunk=1, hold_at=4)
    async with engine, gateway(tmp_path, engine) as (_, http):
        await post(http, "/s/s/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 2})
        asked = {"model": MODEL, "prompt": [5], "max_tokens": NUM, "stream": True, "return_token_ids": True}
        async with http.post("/s/s/v1/completions", json=asked) as answer:
            assert await answer.content.readline()
            told = await post(http, "/sessions/s/finish", {"reward": 1.0}, 409)
            assert "a running turn" in told["error"]["message"]
            engine.go.set()
            assert b"[DONE]" in await answer.read()
        await post(http, "/sessions/s/finish", {"reward": 1.0})


async def test_choices_beyond_the_sessions_turns_leave_nothing_running(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await post(http, "/sessions", {"session_id": "s", "max_turns": 2})
        asked = {"model": MODEL, "prompt": [5], "max_tokens": 4, "n": 3}
        told = await post(http, "/s/s/v1/completions", asked, 409)
        assert "3 are requested, of 2 at most" in told["error"]["message"]
        assert (found.sessions.counters.turns_started, e0.requests) == (0, [])
        await post(http, "/s/s/v1/completions", {**asked, "n": 2})
        assert (await get(http, "/sessions/s"))["turns"] == 2


async def test_of_two_requests_at_once_the_one_without_room_leaves_nothing_running(tmp_path: Path) -> None:
    """Each has room when it comes; only one has when its turns begin."""
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, disconnect_grace_s=60.0) as (found, http):
        await post(http, "/sessions", {"session_id": "s", "max_turns": 3})
        asked = {"model": MODEL, "prompt": [5], "max_tokens": 4, "n": 2}

        async def ask(prompt: int) -> int:
            async with http.post("/s/s/v1/completions", json={**asked, "prompt": [prompt]}) as answer:
                await answer.read()
                return answer.status

        statuses = await asyncio.gather(ask(5), ask(6))
        await until(lambda: not found.sessions.running, "no turn")
    assert sorted(statuses) in ([200, 409], [409, 409])


@pytest.mark.parametrize("name", ["a#b", "a?b", "%41", "a%2Fb", "ü+&=", "a%252Fb"])
async def test_a_name_with_what_urls_use_is_the_same_session_by_its_base_url(tmp_path: Path, name: str) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        made = await post(http, "/sessions", {"session_id": name})
        async with http.post(
            URL(made["base_url"] + "/completions", encoded=True), json={"model": MODEL, "prompt": [5], "max_tokens": 2}
        ) as answer:
            assert answer.status == 200, await answer.text()
        told = await get(http, URL(made["base_url"].removesuffix("/v1"), encoded=True))
        assert (told["session_id"], told["turns"]) == (name, 1)


@pytest.mark.parametrize("name", [".", "..", "a b", "a/b", "a\x00b", ""])
async def test_names_that_no_url_can_hold_are_refused(tmp_path: Path, name: str) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        if name:
            await post(http, "/sessions", {"session_id": name}, 400)
        else:
            assert (await post(http, "/sessions", {"session_id": name}))["session_id"]


async def test_of_an_answer_that_is_sent_whole_nothing_was_seen_before_its_end(tmp_path: Path) -> None:
    engine = ScriptedEngine("e0", chunk=1, hold_at=4)
    async with engine, gateway(tmp_path, engine, disconnect_grace_s=30.0) as (found, http):
        asked = {"model": MODEL, "prompt": [5], "max_tokens": NUM}
        leaving = asyncio.create_task(post(http, "/s/s/v1/completions", asked))
        await until(lambda: engine.said_tokens >= 4, "tokens")
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: found.sessions.counters.turns_orphaned == 1, "the client is seen to have left")
        engine.go.set()
        await until(lambda: not found.sessions.running, "the turn's end")
        await post(http, "/sessions/s/finish", {"reward": 1.0})
        [one] = await trained(http)
    assert one["loss_mask"] == [0] * (1 + NUM)
