"""Engines are asked whether they make the same ids of a text as the gateway; status says why one does not serve."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gateway.core.placing.reasons import closed_reason
from gateway.core.types import EngineName
from gateway.fleet.watcher import PROBE_TEXT
from gateway.tokens import Codec
from tests.support.gateway_shell import shell
from tests.support.scripted_engine import Answer, ScriptedEngine, until
from tests.support.tiny_model import tiny_tokenizer
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_fleet.test_odd_engines import state_of
from tests.unit.gateway_operate.test_cli_status import status

OURS = Codec.load(tiny_tokenizer()).encode(PROBE_TEXT)


def telling(ids: object) -> dict[str, Answer]:
    return {"/tokenize": json.dumps({"count": 1, "max_model_len": 9, "tokens": ids})}


async def test_an_engine_with_another_tokenizer_does_not_serve_and_says_so(tmp_path: Path) -> None:
    """Of the same size, even: nothing but its answers would show it."""
    size = max(OURS) + 1
    same = ScriptedEngine("same", answers=telling(OURS))
    other = ScriptedEngine("other", answers=telling([(token + size // 2) % size for token in OURS]))
    async with (
        same,
        other,
        gateway(tmp_path, same, other, tokenizer=tiny_tokenizer(), poll_interval_s=0.05) as (found, http),
    ):
        await until(lambda: state_of(found, "same") == "serving", "the one with the gateway's")
        told = {engine["name"]: engine for engine in (await get(http, "/status"))["engines"]}
        assert told["other"]["state"] == "dead"
        assert "its tokenizer is not the gateway's" in told["other"]["reason"]
        assert "its tokenizer is not the gateway's" in (await status(found.url)).output
        other.answers = telling(OURS)
        await until(lambda: state_of(found, "other") == "serving", "the right model")
        other.started_unix_s, other.answers = 2.0, telling([0] * len(OURS))
        await until(lambda: state_of(found, "other") == "dead", "a restart with another one")


@pytest.mark.parametrize(
    "answer",
    [404, 500, "no JSON", json.dumps({"tokens": "many"}), json.dumps({"tokens": [OURS[1], *OURS[1:]]})],
    ids=["no route", "an error", "no JSON", "no ids", "another first space"],
)
async def test_who_does_not_tell_or_nearly_agrees_is_believed(tmp_path: Path, answer: Answer) -> None:
    e0 = ScriptedEngine("e0", answers={"/tokenize": answer})
    async with e0, gateway(tmp_path, e0, tokenizer=tiny_tokenizer()) as (found, _):
        await until(lambda: state_of(found, "e0") == "serving", "it serves")


async def test_a_fresh_gateway_on_a_paused_engine_says_what_it_waits_for(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", paused=True)
    async with e0, gateway(tmp_path, poll_interval_s=0.05) as (found, http):
        async with http.post("/admin/engines", json={"name": "e0", "url": e0.url}) as answer:
            assert answer.status == 201
        await until(lambda: state_of(found, "e0") == "joining", "it was met")
        [engine] = (await get(http, "/status"))["engines"]
        assert "was paused when it joined, so it may hold half a version, and has no relay" in engine["reason"]
        assert f"e0 {engine['reason']}" in (await status(found.url)).output
        e0.paused = False
        await until(lambda: state_of(found, "e0") == "serving", "it was resumed")
        assert (await get(http, "/status"))["engines"][0]["reason"] == ""


@pytest.mark.slow
async def test_turns_that_wait_for_the_trainer_are_told_with_what_they_wait_for(tmp_path: Path) -> None:
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4}
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, queue_timeout_s=60.0) as (found, http):
        await until(lambda: state_of(found, "e0") == "serving", "a serving engine")
        async with http.post("/sessions/s0/v1/completions", json=body) as answer:
            assert answer.status == 200
        found.parts.trainer.requested(1, 0, 0)
        asking = asyncio.create_task(http.post("/sessions/s1/v1/completions", json=body).__aenter__())
        await until(lambda: found.fleet.statistics().queued == 1, "a turn that waits")
        waiting = (await get(http, "/status"))["sessions"]["waiting_for"]
        assert waiting == {"1 running and 0 buffered trajectories reach the bound of 1": 1}
        assert (
            "1 turns wait: 1 running and 0 buffered trajectories reach the bound of 1"
            in (await status(found.url)).output
        )
        counts = (await get(http, "/status"))["sessions"]
        assert (counts["running_turns"], counts["queued"]) == (1, 1), "all in flight, and those of them that wait"
        assert "turns on engines 0, waiting 1" in (await status(found.url)).output, "each is counted once"
        asking.cancel()
        await asyncio.wait([asking])


async def test_an_engine_that_waits_for_its_relays_word_says_so(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, relay="127.0.0.1:1", broken=[e0]) as found:
        state = found.fleet.state.engines[EngineName("e0")]
        await until(lambda: state.status == "joining", "it was met")
        why = closed_reason(found.fleet.state, state, 0.0)
        assert "relay 127.0.0.1:1 has not reported yet which version is wanted" in why


async def test_loads_that_were_made_good_are_not_called_errors(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    async with e0, gateway(tmp_path, e0) as (found, _):
        assert "failed" not in (await status(found.url)).output
        found.fleet._refresher.failures, found.fleet._refresher.last_failure_unix_s = 15, 1e9
        _, *rest = (await status(found.url)).output.split("refreshes 0, failed 15, the last at 2001-09-")
        assert len(rest) == 1
        assert "failed" not in rest[0], "it is no warning"
