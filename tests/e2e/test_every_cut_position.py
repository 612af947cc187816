"""Greedy turns moved at every position, between real embedded engines through the real gateway: identical tokens.

Between the gateway and each engine stands a gate that lets so many tokens of a turn's first stream pass and holds the
rest, so that each move comes at the very position that is meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.app import Gateway, start
from gateway.config import EngineSpec, GatewayConfig
from tests.support import processes
from tests.support.scripted_engine import until
from tests.support.tiny_model import VOCAB, Dtype, tiny_model

pytestmark = pytest.mark.slow

TURNS, LENGTH = 12, 24
NUMERICS: list[tuple[Dtype, tuple[str, ...]]] = [("float32", ()), ("bfloat16", ("--batch-invariant",))]
Answer = tuple[list[int], list[float]]


@dataclass
class Gate:
    """`async with Gate(engine_url) as gate`: the engine at `gate.url`, first streams held after `tokens` of them."""

    engine_url: str
    tokens: int | None = None  # None: nothing is held
    url: str = ""
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def __aenter__(self) -> Gate:
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession(self.engine_url))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with self._http.request(request.method, request.path_qs, data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            first = request.path == "/v1/completions" and json.loads(body)["request_id"].endswith("-0")
            left = self.tokens if first else None
            async for line in answer.content:
                if left is not None and line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    left -= len(event["choices"][0]["token_ids"])
                    if left <= 0:
                        await response.write(shortened(event, -left))
                        await asyncio.Event().wait()  # until the gateway leaves
                await response.write(line)
            return response

    async def forget_prefixes(self) -> None:
        async with self._http.post("/reset_prefix_cache") as answer:
            answer.raise_for_status()


def shortened(event: dict[str, Any], by: int) -> bytes:
    """The event without its last tokens, as the engine would have sent it had it gathered less."""
    choice = event["choices"][0]
    keep = len(choice["token_ids"]) - by
    choice["token_ids"] = choice["token_ids"][:keep]
    choice["logprobs"] = {name: values[:keep] for name, values in choice["logprobs"].items()}
    event["usage"]["completion_tokens"] -= by
    choice["finish_reason"] = None
    return b"data: " + json.dumps(event).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def fleet(
    directory: Path, dtype: Dtype, flags: tuple[str, ...]
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession, list[Gate]]]:
    model = tiny_model(dtype=dtype)
    command = ["gateway", "engine", "--port=0", f"--model={model}", f"--dtype={dtype}", f"--max-num-seqs={TURNS}"]
    async with contextlib.AsyncExitStack() as stack:
        gates = []
        for name in ("e0", "e1"):
            engine = await asyncio.to_thread(processes.start, name, [*command, "--weight-version=0", *flags], directory)
            stack.callback(engine.kill)
            gates.append(await stack.enter_async_context(Gate(engine.ready["url"])))
        specs = tuple(EngineSpec(f"e{i}", "vllm", gate.url, None) for i, gate in enumerate(gates))
        settings = GatewayConfig(model="policy", tokenizer=model, port=0, engines=specs, tokens_per_event=1)
        found = await start(settings)
        stack.push_async_callback(found.close, 1.0)
        await until(lambda: all(e.status == "serving" for e in found.fleet.state.sorted_engines()), "engines", 180)
        yield found, await stack.enter_async_context(aiohttp.ClientSession(found.url)), gates


def prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(3, VOCAB) for _ in range(chance.randrange(1, 60))] for _ in range(TURNS)]


async def ask(http: aiohttp.ClientSession, session: str, prompt: list[int]) -> Answer:
    body: dict[str, Any] = {"model": "policy", "session_id": session, "prompt": prompt, "max_tokens": LENGTH}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        choice = (await answer.json())["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def ask_and_move(
    found: Gateway, http: aiohttp.ClientSession, asked: dict[str, list[int]], at: int
) -> list[Answer]:
    """The whole answers; each turn was moved to the other engine after its token `at`, and nothing else happened."""
    answers = [asyncio.create_task(ask(http, session, prompt)) for session, prompt in asked.items()]

    def flow() -> bool:
        assert not any(answer.done() for answer in answers), [a.result() for a in answers if a.done()]
        return [len(run.record.token_ids) for run in found.sessions.running.values()] == [at] * len(asked)

    await until(flow, f"{at} tokens of each", 180)
    runs = list(found.sessions.running.values())
    ways = {run: (run.engine, next(e for e in found.fleet.state.engines if e != run.engine)) for run in runs}
    for run, (_, other) in ways.items():
        assert run.move(other) is not None
    told = await asyncio.gather(*answers)
    for run, (source, other) in ways.items():
        assert [(s.engine, s.start, s.end) for s in run.segments] == [(source, 0, at), (other, at, LENGTH)]
    return told


@pytest.mark.parametrize(("dtype", "flags"), NUMERICS, ids=["float32", "bfloat16-invariant"])
async def test_greedy_turns_moved_at_every_position_say_the_same(
    dtype: Dtype, flags: tuple[str, ...], tmp_path: Path
) -> None:
    async with fleet(tmp_path, dtype, flags) as (found, http, gates):
        turns = list(enumerate(prompts()))
        uncut = [await ask(http, f"uncut-{i}", prompt) for i, prompt in turns]  # one by one: alone in their batches
        for at in range(1, LENGTH):
            for gate in gates:
                gate.tokens = at
                if at % 2:  # else much of a moved turn's prompt is found on its new engine
                    await gate.forget_prefixes()
            moved = await ask_and_move(found, http, {f"{i}-{at}": prompt for i, prompt in turns}, at)
            for (i, _), got, wanted in zip(turns, moved, uncut, strict=True):
                assert got[0] == wanted[0], f"turn {i} moved after token {at}"
                assert got[1] == (wanted[1] if flags else pytest.approx(wanted[1], abs=1e-4)), f"turn {i} after {at}"
        counters = found.sessions.counters
        print(f"{dtype}: {TURNS} turns of {LENGTH} tokens, {(LENGTH - 1) * TURNS} moves, all tokens identical")
        assert (counters.turns_cut, counters.turns_lost) == (0, 0)
