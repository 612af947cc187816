"""How much of the prompts the chosen engine had seen before: a multi-turn load, and the routers' policies.

Groups of sessions begin with the same prompt, as in GRPO; each session has turns whose history grows. Every mock engine
remembers the blocks of 16 tokens that it was sent or said, and never forgets; text that routers relay becomes tokens by
the tokenizer that the gateway uses. A round's ratio is our share over the best policy's of that round.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import uvloop

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway.client import Agent, close, connect, post
from tests.bench.gateway.contenders import Contender, contenders, lacking, mock_engines
from tests.bench.gateway.mock_engine import MODEL

__all__ = ["lacking", "run"]

NUM_ENGINES = 4
CACHE_TOKENS = 1 << 24
GROUPS, GROUP_SIZE, TURNS = 12, 4, 6
ANSWER_TOKENS = 32
POLICIES = (
    ("sglang", "cache_aware"),
    ("sglang", "power_of_two"),
    ("vllm", "cache_aware"),
    ("vllm", "consistent_hash"),
    ("vllm", "sticky_least_loaded"),
)
OURS = ("laminar", "")
WORDS = [
    "the",
    "trainer",
    "makes",
    "new",
    "weights",
    "every",
    "few",
    "minutes",
    "and",
    "a",
    "fleet",
    "of",
    "engines",
    "generates",
    "trajectories",
    "with",
    "them",
]


def run() -> Iterator[Figure]:
    rounds: dict[tuple[str, str], list[float]] = {one: [] for one in (*POLICIES, OURS)}
    for number in range(ROUNDS):
        for name, policy in rounds:
            rounds[name, policy].append(_share(name, policy, number))
    best = [max(rounds[policy][number] for policy in POLICIES) for number in range(ROUNDS)]
    ratios = [ours / theirs for ours, theirs in zip(rounds[OURS], best, strict=True)]
    what = "share of prompt tokens found on the engine chosen, over the best of the routers' policies"
    told = {
        f"{name} {policy}".strip(): [round(share, 4) for share in shares] for (name, policy), shares in rounds.items()
    }
    yield median("prefix_hit_share", what, ratios, bar=1.0, better="more", details={"shares": told})


def _share(name: str, policy: str, seed: int) -> float:
    """Fresh engines and a fresh router: nobody has seen anything."""
    with (
        mock_engines(NUM_ENGINES, rate=500.0, cache_tokens=CACHE_TOKENS) as engines,
        contenders([name], engines, policy=policy) as found,
    ):
        uvloop.run(_converse(found[name], random.Random(seed)))
        counted = [json.load(urllib.request.urlopen(f"{url}/bench/prefix")) for url in engines]
    return float(sum(c["hits"] for c in counted) / sum(c["tokens"] for c in counted))


async def _converse(contender: Contender, rng: random.Random) -> None:
    """Groups begin one after the other, their sessions together."""
    agents = await connect(contender.url, GROUPS * GROUP_SIZE, keep=True)
    running: list[asyncio.Task[None]] = []
    for group in range(GROUPS):
        prompt = f"Task {group}: {_words(rng, 200)}"
        for sibling in range(GROUP_SIZE):
            number = group * GROUP_SIZE + sibling
            session = _Session(contender, agents[number], f"g{group}s{sibling}", random.Random(rng.random()))
            running.append(asyncio.create_task(session.run(prompt)))
        await asyncio.sleep(0.05)
    await asyncio.gather(*running)
    close(agents)


class _Session:
    def __init__(self, contender: Contender, agent: Agent, name: str, rng: random.Random) -> None:
        self._url, self._agent, self._name, self._rng = contender.url, agent, name, rng

    async def run(self, prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        for _ in range(TURNS):
            body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS}
            headers = {"X-Session-ID": self._name}
            call = await self._agent.send(post(self._url, "/v1/chat/completions", body, headers))
            messages = [*messages, _said(bytes(call.body)), {"role": "user", "content": _words(self._rng, 60)}]
            await asyncio.sleep(self._rng.uniform(0, 0.05))  # its tool


def _said(answer: bytes) -> dict[str, Any]:
    message = json.loads(answer)["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))
