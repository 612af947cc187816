"""Throughput of sessions that wait for tools, over that of sessions whose tools answer at once.

Method. Both run through the same gateway with its default options, in front of the same mock engines, which say 50
tokens/s and may run no more turns at once than the client has model calls in flight: `CALLS` in either case. A session
has `TURNS` turns; between two of them it waits for its tool, and then for its place among the calls. With instant tools
`CALLS` sessions are there at a time. With slow ones there are `WAITING` times as many, so that most of them wait for a
tool: a lognormal time whose p99 is ten times its median. A round's ratio is the answers per second of the second over
those of the first, each counted in a window in the middle; the figure is the median of the rounds' ratios.

If a session that waits for a tool held a slot of an engine, the engines would be idle for most of the time.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway.chat import message
from tests.bench.gateway.client import Agent, close, connect, post
from tests.bench.gateway.contenders import Contender, contenders, lacking, mock_engines
from tests.bench.gateway.mock_engine import MODEL

__all__ = ["lacking", "run"]

OURS = "laminar"
RATE = 50.0
NUM_ENGINES, SLOTS = 2, 16
CALLS = NUM_ENGINES * SLOTS
TURNS, ANSWER_TOKENS = 6, 32
WAITING = 6
TOOL_MEDIAN_S, TOOL_P99_S = 1.0, 10.0
SIGMA = math.log(TOOL_P99_S / TOOL_MEDIAN_S) / 2.3263
WARM_UP_S, WINDOW_S = 8.0, 20.0
BAR = 0.95


def run() -> Iterator[Figure]:
    rates: dict[str, list[float]] = {"instant": [], "slow": []}
    gateway = ("--max-running", str(SLOTS))
    with (
        mock_engines(NUM_ENGINES, rate=RATE) as engines,
        contenders([OURS], engines, gateway=gateway) as found,
    ):
        for number in range(ROUNDS):
            for kind, into in rates.items():
                into.append(uvloop.run(_answers_per_s(found[OURS], slow=kind == "slow", seed=number)))
                print(f"tools: {kind} {into[-1]:.1f} answers/s", flush=True)
    ratios = [slow / instant for slow, instant in zip(rates["slow"], rates["instant"], strict=True)]
    what = f"answers/s with tools of a long tail (median {TOOL_MEDIAN_S:g} s, p99 {TOOL_P99_S:g} s) over instant tools"
    details = {
        "calls": CALLS,
        "sessions": {"instant": CALLS, "slow": CALLS * WAITING},
        "answers_per_s": rates,
        "of_engines": CALLS * RATE / ANSWER_TOKENS,
    }
    yield median("tools_vs_instant", what, ratios, bar=BAR, better="more", details=details)


async def _answers_per_s(contender: Contender, *, slow: bool, seed: int) -> float:
    """Sessions go on until the window is over; those in flight then are abandoned."""
    sessions = CALLS * WAITING if slow else CALLS
    agents = await connect(contender.url, sessions, keep=True)
    calls, began, answered = asyncio.Semaphore(CALLS), time.monotonic(), [0]

    def count() -> None:
        answered[0] += WARM_UP_S <= time.monotonic() - began < WARM_UP_S + WINDOW_S

    async def agent(at: int, one: Agent) -> None:
        rng = random.Random(f"{seed} {slow} {at}")
        while True:
            await _session(contender, one, rng, calls, slow, count)

    running = [asyncio.create_task(agent(at, one)) for at, one in enumerate(agents)]
    await asyncio.wait(running, timeout=WARM_UP_S + WINDOW_S, return_when=asyncio.FIRST_EXCEPTION)
    for task in running:
        if task.done():
            task.result()  # an agent ends by an error alone
        task.cancel()
    await asyncio.wait(running)
    close(agents)
    return answered[0] / WINDOW_S


async def _session(
    contender: Contender, one: Agent, rng: random.Random, calls: asyncio.Semaphore, slow: bool, count: Any
) -> None:
    made = json.loads((await one.send(post(contender.url, "/sessions", {}))).body)
    base, messages = f"/sessions/{made['session_id']}", list[dict[str, Any]]()
    for turn in range(TURNS):
        if turn and slow:
            await asyncio.sleep(rng.lognormvariate(math.log(TOOL_MEDIAN_S), SIGMA))
        messages.append({"role": "user", "content": message(rng)})
        body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS}
        async with calls:
            answer = await one.send(post(contender.url, f"{base}/v1/chat/completions", body))
        count()
        said = json.loads(answer.body)["choices"][0]["message"]
        messages.append({"role": said["role"], "content": said["content"]})
    await one.send(post(contender.url, f"{base}/finish", {"reward": rng.random()}))
