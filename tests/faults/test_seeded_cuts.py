"""Cuts by seed through the real gateway over HTTP: every answer equals the uncut one, nothing is lost, nothing twice.

And engines whose weights change under a turn: the answer is what they said, and no trainer gets it.

`LAMINAR_FAULTKIT_SEEDS` says how many seeds (`make faultkit`: 1,000).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway, start
from gateway.config import EngineSpec, GatewayConfig
from gateway.faultkit.engine import ScriptedEngine
from gateway.faultkit.script import RESUMABLE, Cut, CutKind, cuts_by_seed
from gateway.tokens import Codec
from tests.support.scripted_engine import until
from tests.support.tiny_model import tiny_model

SEEDS = int(os.environ.get("LAMINAR_FAULTKIT_SEEDS", "100"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300 + SEEDS),
    # An engine that dies drops, unclosed, what it accepted in that very moment.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

VOCABULARY, AT_ONCE, CUT_SHARE = 512, 24, 0.6
CALL = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 30"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]


def asked_by(seed: int) -> tuple[str, dict[str, Any]]:
    """A request of any shape: ids or messages, streamed or not, with and without stops, alternatives and tools."""
    chance = random.Random(seed)
    body: dict[str, Any] = {"model": "policy", "session_id": f"s{seed}", "return_token_ids": True}
    body |= {"stream": chance.random() < 0.5, "seed": seed}
    if chance.random() < 0.3:
        body |= {"messages": [{"role": "user", "content": f"{seed} and 30?"}], "tools": TOOLS, "max_tokens": 200}
        return "/v1/chat/completions", body | {"logprobs": True}
    prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.randrange(1, 9))]
    body |= {"prompt": prompt, "max_tokens": chance.randrange(1, 80), "logprobs": 0, "ignore_eos": True}
    if chance.random() < 0.3:
        body["stop"] = [chance.choice("abcdefgh"), "a long stop that never comes"]
    return "/v1/completions", body


def calling(codec: Codec) -> Callable[[Sequence[int]], list[int] | None]:
    """Engines call the tool after an assistant's head; on any other prompt they say what they always do."""
    head, call = codec.encode("<|im_start|>assistant\n"), [*codec.encode(CALL), min(codec.turn_end_ids)]

    def says(ids: Sequence[int]) -> list[int] | None:
        starts = [i for i in range(len(ids)) if list(ids[i : i + len(head)]) == head]
        return call[len(ids) - starts[-1] - len(head) :] if starts else None

    return says


def counting(draw: Callable[[], Cut | None], drawn: Counter[str]) -> Callable[[], Cut | None]:
    def counted() -> Cut | None:
        if (cut := draw()) is not None:
            drawn[cut.kind] += 1
        return cut

    return counted


@contextlib.asynccontextmanager
async def gateway(
    directory: Path, share: float, drawn: Counter[str], kinds: Sequence[CutKind] = RESUMABLE
) -> AsyncIterator[tuple[Gateway, Any]]:
    """A real gateway on a port, over three engines that cut a share of what they are asked."""
    model = tiny_model()
    says = calling(Codec.load(model))
    async with contextlib.AsyncExitStack() as stack:
        specs = []
        for i in range(3):
            draw = counting(cuts_by_seed(1000 + i, share, 60, kinds), drawn)
            engine = ScriptedEngine(
                f"e{i}", chunk=1 + i * 2, split=i == 1, draw=draw, generate=says, vocab_size=VOCABULARY
            )
            engine.revive_s = 0.2
            await stack.enter_async_context(engine)
            specs.append(EngineSpec(engine.name, "vllm", engine.url, None))
        found = await start(
            GatewayConfig(
                model="policy",
                tokenizer=Path(model),
                data=directory,
                port=0,
                engines=tuple(specs),
                stall_timeout_s=2.0,  # of a look at an engine, too: longer than most pauses of a busy machine
                poll_interval_s=0.1,
                dead_after_polls=1,
            )
        )
        stack.push_async_callback(found.close, 1.0)
        await until(lambda: all(e.status == "serving" for e in found.fleet.state.sorted_engines()), "serving engines")
        http = await stack.enter_async_context(
            aiohttp.ClientSession(found.url, timeout=aiohttp.ClientTimeout(total=120))
        )
        yield found, http


async def answer_to(http: aiohttp.ClientSession, seed: int) -> dict[str, Any]:
    path, body = asked_by(seed)
    async with http.post(path, json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    events = [text]
    if body["stream"]:
        assert text.endswith("data: [DONE]\n\n"), text[-300:]
        events = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return joined([choice for event in events for choice in json.loads(event)["choices"]])


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client has in the end, the same for a stream and a whole answer."""
    said = [choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices]
    probs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "text": "".join(s.get("content") or "" for s in said),
        "ids": [i for choice in choices for i in choice.get("token_ids") or ()],
        "logprobs": [p for told in probs for p in told.get("token_logprobs", ())]
        + [entry["logprob"] for told in probs for entry in told.get("content") or ()],
        "finish": [c["finish_reason"] for c in choices if c.get("finish_reason")],
        "stopped_by": [c["stop_reason"] for c in choices if c.get("stop_reason")],
        "calls": [call["function"] for s in said for call in s.get("tool_calls") or ()],
    }


async def all_answers(http: aiohttp.ClientSession) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """By seed: what the client has, and what the gateway said when the session was finished."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        async with places:
            answer = await answer_to(http, seed)
            async with http.post(f"/sessions/s{seed}/finish", json={"reward": float(seed)}) as finished:
                assert finished.status == 200, await finished.text()
                return answer, await finished.json()

    both = await asyncio.gather(*map(one, range(SEEDS)))
    return [answer for answer, _ in both], [finished for _, finished in both]


async def records(http: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
    """What a trainer gets, by session."""
    wanted = {"reader": "test", "trainer_version": 0, "trajectories": SEEDS}
    async with http.post("/experience/sample", json=wanted) as answer:
        trajectories = (await answer.json())["trajectories"]
    return {
        t["session_id"]: {
            name: t[name] for name in ("token_ids", "logprobs", "loss_mask", "versions", "reward", "turns")
        }
        for t in trajectories
    }


async def test_every_answer_equals_the_uncut_one(tmp_path: Path) -> None:
    drawn: Counter[str] = Counter()
    async with gateway(tmp_path / "uncut", 0.0, drawn) as (_, http):
        (uncut, _), uncut_records = await all_answers(http), await records(http)
    assert not drawn
    assert len(uncut_records) == SEEDS
    async with gateway(tmp_path / "cut", CUT_SHARE, drawn) as (found, http):
        cut, _ = await all_answers(http)
        for seed, (wanted, got) in enumerate(zip(uncut, cut, strict=True)):
            assert got == wanted, f"seed {seed}: {asked_by(seed)}"
        assert await records(http) == uncut_records
        counters = found.sessions.counters
        print(f"{SEEDS} seeds, {sum(drawn.values())} cuts: {dict(drawn)}; {counters.cuts_by_reason}")
        assert (counters.turns_lost, counters.turns_completed, counters.turns_started) == (0, SEEDS, SEEDS)
        assert counters.turns_cut >= sum(drawn.values()) * 0.9  # some come after the last token
        assert counters.tokens_generated >= sum(len(answer["ids"]) for answer in uncut)
        if SEEDS >= 1000:
            assert set(drawn) == set(RESUMABLE), "every kind came"
    assert any(answer["calls"] for answer in uncut)
    assert any(answer["stopped_by"] for answer in uncut)


async def test_a_version_that_changes_under_a_turn_is_told_and_never_trained_on(tmp_path: Path) -> None:
    drawn: Counter[str] = Counter()
    async with gateway(tmp_path / "uncut", 0.0, drawn) as (_, http):
        uncut, _ = await all_answers(http)
    async with gateway(tmp_path / "changed", CUT_SHARE, drawn, ("version",)) as (found, http):
        answers, finished = await all_answers(http)
        assert answers == uncut, "a client has what the engine said"
        contradicted = {end["session_id"] for end in finished if "contradicted" in end["evidence"]}
        print(f"{SEEDS} seeds, {drawn['version']} changes of version, {len(contradicted)} sessions not trained on")
        # A turn of one token has no room for a change, and one whose stop string came first is left before it is told.
        assert drawn["version"] / 2 < len(contradicted) <= drawn["version"]
        assert set(await records(http)) == {f"s{seed}" for seed in range(SEEDS)} - contradicted
        assert found.sessions.counters.version_mismatches == len(contradicted)
