"""What the client does to a contender, and what that cost its processes."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.bench.gateway.client import Agent, Call, close, connect, numbered, post
from tests.bench.gateway.contenders import Contender, ContenderFailed
from tests.bench.gateway.mock_engine import MODEL

SETTLE_S = 0.5
BEGIN_S, END_S = 60.0, 60.0
"""At most, until all streams have brought an event, and until those whose measuring is over have ended."""
SPREAD_S = 6.0
"""By which the last stream has begun, after the first: so much longer each is than its measuring."""


class StreamOver(Exception):
    """A stream that should outlast its measuring did not."""


def chat(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds of a contender, and how many answers or tokens it passed on meanwhile; of tokens, in how many
    events they left the engines and reached the clients."""

    cpu_s: float
    num: int
    engine_events: int = 0
    client_events: int = 0

    @property
    def us(self) -> float:
        """Of each, in microseconds."""
        return self.cpu_s / self.num * 1e6

    @property
    def tokens_per_event(self) -> tuple[float, float]:
        """As the engines sent them, and as clients received them: what waited together is shown together."""
        return self.num / self.engine_events, self.num / self.client_events


async def requests(contender: Contender, body: dict[str, Any], *, num: int, connections: int) -> Cost:
    """`num` whole answers, over connections that are kept alive."""
    agents = await connect(contender.url, connections)
    numbers = itertools.count()

    async def agent(one: Agent) -> None:
        for _ in range(num // connections):
            await one.send(_numbered(contender, body, next(numbers)))

    before = contender.cpu_s()
    await asyncio.gather(*map(agent, agents))
    cost = Cost(contender.cpu_s() - before, num // connections * connections)
    close(agents)
    return cost


async def stream(
    contender: Contender, engines: Sequence[str], text: str, *, streams: int, rate: float, seconds: float
) -> Cost:
    """Tokens of `streams` that run all the while, as the engines sent them. The streams have ended when this returns: a
    router need not tell its engines that a client left, and what goes on would be in the next one's way."""
    agents = await connect(contender.url, streams)
    body = chat(text, round(rate * (SPREAD_S + SETTLE_S + seconds)), stream=True)
    try:
        calls = await at_work(contender, agents, body, rate)
        await asyncio.sleep(SETTLE_S)
        sent, cpu_s, received = await _so_far(contender, engines, agents)
        await asyncio.sleep(seconds)
        sent_then, cpu_then, received_then = await _so_far(contender, engines, agents)
        tokens, events = sent_then.tokens - sent.tokens, sent_then.events - sent.events
        cost = Cost(cpu_then - cpu_s, tokens, events, received_then - received)
        raise_failure(calls)
        ended, left = await asyncio.wait(calls, timeout=END_S)
        if left:
            raise ContenderFailed(f"{contender.name} leaves {len(left)} of {streams} streams without an end")
        for call in ended:
            call.result()
    finally:
        close(agents)
        await asyncio.sleep(SETTLE_S)
    return cost


async def _so_far(contender: Contender, engines: Sequence[str], agents: Sequence[Agent]) -> tuple[Sent, float, int]:
    """What the engines sent, and right after that the contender's time and the clients' events: asking the engines
    takes a while, which at both ends of a measurement belongs to the same side."""
    sent = await engines_sent(engines)
    return sent, contender.cpu_s(), sum(agent.call.events for agent in agents)


@dataclass(frozen=True, slots=True)
class Sent:
    """By all engines' timed streams so far."""

    tokens: int
    events: int


async def engines_sent(engines: Sequence[str]) -> Sent:
    pages = await engines_tell(engines, "sent")
    return Sent(sum(page["tokens"] for page in pages), sum(page["events"] for page in pages))


async def engines_tell(engines: Sequence[str], page: str) -> list[Any]:
    """`/bench/PAGE` of each mock engine."""
    async with httpx.AsyncClient() as client:
        answers = await asyncio.gather(*(client.get(f"{url}/bench/{page}") for url in engines))
    return [answer.raise_for_status().json() for answer in answers]


async def at_work(
    contender: Contender, agents: Sequence[Agent], body: dict[str, Any], rate: float, first_number: int = 0
) -> list[asyncio.Future[Call]]:
    """Streams that all began beside as many others: each agent's first, of one to two seconds, ends while those of the
    other agents run. Chats are numbered from `first_number` on: one that asks again for what a client left before its
    end is a retry to the gateway, which gives it that answer's beginning and goes on from there."""
    least = max(1, round(rate))

    async def agent(number: int, one: Agent) -> asyncio.Future[Call]:
        await one.send(_numbered(contender, {**body, "max_tokens": least + number % least}, number))
        return one.send(_numbered(contender, body, number))

    try:
        async with asyncio.timeout(BEGIN_S):
            calls = await asyncio.gather(*(agent(number, one) for number, one in enumerate(agents, first_number)))
            await all_begun(agents, calls)
    except (TimeoutError, StreamOver) as e:
        silent = sum(not one.call.events for one in agents)
        why = f"{contender.name} leaves {silent} of {len(agents)} streams without an event"
        raise ContenderFailed(f"{why} ({e or f'{BEGIN_S:g} s'})") from e
    return calls


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
            raise StreamOver("a stream ended while it was measured: give it more tokens")


def medians(rounds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rounds.items()}
