"""Processor time of a chat on the default path: sessions of several turns, with their tokens recorded and a reward.

Method. All contenders run at once in front of the same mock engines, and take turns. In every round each gets the same
load from the same client: `SESSIONS` sessions at once, their beginnings spread over one answer's time; each has `TURNS`
turns, a new message of 2 KiB in each behind the history so far, and gets `ANSWER_TOKENS` tokens back, as one JSON
answer, from engines that say 50 tokens/s. The processor time of all of a contender's processes and threads is read from
their own clocks, from before the first request until all is answered, and divided by the number of chats. A round's
ratio is ours over the better router's of that round; the figure is the median of the rounds' ratios.

- The gateway runs with its default options. Making each session (`POST /sessions`) and finishing it with a reward
  (`POST /sessions/ID/finish`: on the disk, synced) are in its cost, as are the template, tokenising, the records of ids
  and logprobs, and the trajectories.
- The routers relay the same bodies as text: they know no sessions, so nothing more is asked of them.
- No two messages are alike, and answers are repeated in the history as they came.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import uvloop

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.client import Agent, close, connect, post
from tests.bench.gateway.contenders import Contender, contenders, lacking, mock_engines
from tests.bench.gateway.cpu import NUM_ENGINES, RUST, over_better
from tests.bench.gateway.mock_engine import MODEL

__all__ = ["lacking", "run"]

OURS = "laminar"
RATE = 50.0
SESSIONS, TURNS = 48, 4
MESSAGE_BYTES = 2048
ANSWER_TOKENS = 64
IN_A_ROW = 2  # sessions of an agent in a round, one after the other
BAR = 10.0


def run() -> Iterator[Figure]:
    rounds: dict[str, list[float]] = {name: [] for name in (*RUST, OURS)}
    with mock_engines(NUM_ENGINES, rate=RATE) as engines, contenders(list(rounds), engines) as found:
        for number in range(ROUNDS + 1):
            for name, contender in found.items():
                cost = uvloop.run(converse(contender, seed=number))
                print(f"chat: {name} {cost.us:.0f} us", flush=True)
                if number:  # the first warms up
                    rounds[name].append(cost.us)
    told = {"us_per_chat": load.medians(rounds), "sessions": SESSIONS, "turns": TURNS, "tokens_per_s": RATE}
    what = "CPU per chat of 2 KiB in finished sessions, tokens recorded, ours over the better Rust router's"
    yield median("cpu_per_chat_vs_rust", what, over_better(rounds, OURS), bar=BAR, details=told)


async def converse(contender: Contender, *, seed: int = 0) -> load.Cost:
    """All sessions of a round. `num` of the cost is how many chats they had."""
    agents = await connect(contender.url, SESSIONS, keep=True)
    numbers = itertools.count()

    async def agent(at: int, one: Agent) -> None:
        await asyncio.sleep(at / SESSIONS * ANSWER_TOKENS / RATE)
        for _ in range(IN_A_ROW):
            await _session(contender, one, random.Random(f"{seed}-{next(numbers)}"))

    before = contender.cpu_s()
    await asyncio.gather(*(agent(at, one) for at, one in enumerate(agents)))
    cost = load.Cost(contender.cpu_s() - before, SESSIONS * IN_A_ROW * TURNS)
    close(agents)
    return cost


async def _session(contender: Contender, one: Agent, rng: random.Random) -> None:
    """A router is sent the chats alone."""
    url, base = contender.url, ""
    if contender.name == OURS:
        made = await one.send(post(url, "/sessions", {}))
        base = f"/sessions/{json.loads(made.body)['session_id']}"
    messages: list[dict[str, Any]] = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": message(rng)})
        body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS}
        answer = await one.send(post(url, f"{base}/v1/chat/completions", body))
        said = json.loads(answer.body)["choices"][0]["message"]
        messages.append({"role": said["role"], "content": said["content"]})
    if base:
        await one.send(post(url, f"{base}/finish", {"reward": rng.random()}))


def message(rng: random.Random) -> str:
    """2 KiB of text like no other."""
    said = ""
    while len(said) < MESSAGE_BYTES:
        said += f"What is the sum of {rng.randrange(1000)} and {rng.randrange(1000)}? Call the calculator first. "
    return said[:MESSAGE_BYTES]
