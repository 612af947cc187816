"""What the client does to a contender, and what that cost its processes."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.gateway.client import Agent, Call, close, connect, numbered, post
from tests.bench.gateway.contenders import Contender
from tests.bench.gateway.mock_engine import MODEL

SETTLE_S = 0.5
WARM_TOKENS = 60


def chat(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds of a contender against what it did meanwhile."""

    cpu_s: float
    events: int
    requests: int


async def requests(contender: Contender, body: dict[str, Any], *, num: int, connections: int) -> Cost:
    """`num` whole answers, over connections that are kept alive."""
    agents = await connect(contender.url, connections)
    numbers = itertools.count()

    async def agent(one: Agent) -> None:
        for _ in range(num // connections):
            await one.send(_numbered(contender, body, next(numbers)))

    before = contender.cpu_s()
    await asyncio.gather(*map(agent, agents))
    cost = Cost(contender.cpu_s() - before, 0, num // connections * connections)
    close(agents)
    return cost


async def stream(contender: Contender, body: dict[str, Any], *, streams: int, seconds: float) -> Cost:
    """Events of `streams` that run all the while: their beginnings and ends lie outside what is counted."""
    agents = await connect(contender.url, streams)
    body = {**body, "stream": True}
    calls = await at_work(contender, agents, body)
    await all_begun(agents, calls)
    await asyncio.sleep(SETTLE_S)
    before, seen = contender.cpu_s(), sum(agent.call.events for agent in agents)
    await asyncio.sleep(seconds)
    cost = Cost(contender.cpu_s() - before, sum(agent.call.events for agent in agents) - seen, 0)
    raise_failure(calls)
    close(agents)
    await asyncio.sleep(SETTLE_S)  # they hear that the client left before somebody else is measured
    return cost


async def at_work(contender: Contender, agents: Sequence[Agent], body: dict[str, Any]) -> list[asyncio.Future[Call]]:
    """Streams that began beside others: each agent's first is short, and no two agents' end together. The first of them
    begin beside fewer than `agents`, and keep the smaller events that they are given."""

    async def agent(number: int, one: Agent) -> asyncio.Future[Call]:
        await one.send(_numbered(contender, {**body, "max_tokens": 1 + number % WARM_TOKENS}, number))
        return one.send(_numbered(contender, body, number))

    tasks = [asyncio.create_task(agent(number, one)) for number, one in enumerate(agents)]
    return [await task for task in tasks]


async def all_begun(agents: Sequence[Agent], calls: Sequence[asyncio.Future[Call]]) -> None:
    """Until every stream has brought an event."""
    while not all(agent.call.events for agent in agents):
        raise_failure(calls)
        await asyncio.sleep(0.05)


def _numbered(contender: Contender, body: dict[str, Any], number: int) -> bytes:
    return post(contender.url, "/v1/chat/completions", numbered(body, number))


def raise_failure(calls: Sequence[asyncio.Future[Call]]) -> None:
    for call in calls:
        if call.done():
            call.result()
            raise AssertionError("a stream ended while it was measured: give it more tokens")


def medians(rounds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rounds.items()}
