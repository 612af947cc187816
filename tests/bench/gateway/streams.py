"""Latency and capacity under many streams.

- added_latency: with 1,000 streams under way, short requests are sent beside them, and the time to their first byte is
  taken; the same load goes straight to the engines and through the gateway, in turns. Per round: p99 through the
  gateway minus p99 direct. Both ask engines for the same size of events.
- streams_max: so many streams at 50 tokens/s, each held for `HOLD_S`, on one gateway process. A step is passed if no
  stream fails, the last third brings as many tokens as the first (no growing lag), and nobody waits `GAP_S`.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import uvloop

from gateway.core.pacing import TOKENS_PER_EVENT_MAX
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.client import Agent, AnswerFailed, Call, close, connect, numbered, post
from tests.bench.gateway.contenders import contenders, mock_engines

NUM_ENGINES = 4
RATE = 50.0
BACKGROUND = 1000
PROBERS, PROBES = 4, 400
INTERVAL = TOKENS_PER_EVENT_MAX  # which the gateway asks for by itself with so many turns
STEPS = (1000, 2000, 3000)
HOLD_S = 60.0
GAP_S = 5.0
LAG = 0.98
LONG = 30_000
CHAT = "/v1/chat/completions"


def run() -> Iterator[Figure]:
    yield added_latency()
    yield streams_max()


def added_latency() -> Figure:
    rounds: list[float] = []
    p99: dict[str, list[float]] = {"direct": [], "gateway": []}
    with mock_engines(NUM_ENGINES, rate=RATE) as engines, contenders(["laminar"], engines) as found:
        for _ in range(ROUNDS):
            p99["direct"].append(uvloop.run(first_bytes(engines)))
            p99["gateway"].append(uvloop.run(first_bytes([found["laminar"].url])))
            rounds.append((p99["gateway"][-1] - p99["direct"][-1]) * 1e3)
    what = f"time to the first byte, p99, over going direct, beside {BACKGROUND} streams"
    told = {name: round(statistics.median(values) * 1e3, 2) for name, values in p99.items()}
    return median("added_latency_p99_ms", what, rounds, bar=25.0, unit="ms", details={"p99_ms": told})


async def first_bytes(urls: Sequence[str]) -> float:
    """Seconds to the first byte, p99, of probes spread over `urls` while the streams run."""
    agents: list[Agent] = []
    for url in urls:
        agents += await connect(url, BACKGROUND // len(urls))
    calls = _stream_all(agents, urls)
    await load.all_begun(agents, calls)
    numbers = itertools.count()
    probers = [(await connect(url, 1), url) for _ in range(PROBERS // len(urls) or 1) for url in urls]
    found: list[float] = []

    async def probe(one: Agent, url: str) -> None:
        for _ in range(PROBES // len(probers)):
            body = numbered(load.chat("hello", 4, stream=True, **_interval(url, urls)), next(numbers))
            call = await one.send(post(url, CHAT, body))
            assert call.first_at is not None
            found.append(call.first_at - call.sent_at)
            await asyncio.sleep(0.02)

    await asyncio.gather(*(probe(one[0], url) for one, url in probers))
    load.raise_failure(calls)
    close([*agents, *(one[0] for one, _ in probers)])
    await asyncio.sleep(load.SETTLE_S)
    return statistics.quantiles(found, n=100)[98]


def _stream_all(agents: Sequence[Agent], urls: Sequence[str]) -> list[asyncio.Future[Call]]:
    each = len(agents) // len(urls)
    calls = []
    for number, agent in enumerate(agents):
        url = urls[number // each]
        body = numbered(load.chat("hello", LONG, stream=True, **_interval(url, urls)), number)
        calls.append(agent.send(post(url, CHAT, body)))
    return calls


def _interval(url: str, urls: Sequence[str]) -> dict[str, int]:
    """Engines are told, when they are asked directly; the gateway tells them itself."""
    return {"stream_interval": INTERVAL} if len(urls) > 1 else {}


@dataclass(frozen=True, slots=True)
class Held:
    """A step: `kept` is the last third's tokens over the first's."""

    streams: int
    kept: float
    longest_gap_s: float
    cores: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.kept >= LAG and self.longest_gap_s < GAP_S


def streams_max() -> Figure:
    steps: list[Held] = []
    with mock_engines(NUM_ENGINES, rate=RATE) as engines, contenders(["laminar"], engines) as found:
        for streams in STEPS:
            steps.append(uvloop.run(held(found["laminar"], streams)))
            print(f"streams_max: {steps[-1]}", flush=True)
            if not steps[-1].passed:
                break
    best = max((step.streams for step in steps if step.passed), default=0)
    what = f"concurrent streams at {RATE:g} tokens/s, each held for {HOLD_S:g} s, on one process"
    return Figure(
        "streams_max",
        what,
        float(best),
        bar=2000,
        better="more",
        of="largest step passed",
        note=f"steps tried: {', '.join(str(step.streams) for step in steps)}",
        details={"steps": [str(step) for step in steps]},
    )


def _passed_on(url: str) -> int:
    """Tokens so far. Not counted in events: what the gateway reads at once it shows at once."""
    status = httpx.get(f"{url}/status", timeout=GAP_S).raise_for_status().json()
    return int(status["counters"]["tokens_generated"])


async def held(contender: load.Contender, streams: int) -> Held:
    agents = await connect(contender.url, streams)
    calls = await load.at_work(contender, agents, load.chat("hello", LONG, stream=True), RATE)
    await asyncio.sleep(load.SETTLE_S)
    cpu, seen, counts = contender.cpu_s(), await asyncio.to_thread(_passed_on, contender.url), []
    for agent in agents:
        agent.call.longest_gap_s = 0.0
    for _ in range(3):
        await asyncio.sleep(HOLD_S / 3)
        now = await asyncio.to_thread(_passed_on, contender.url)
        counts.append(now - seen)
        seen = now
    try:
        load.raise_failure(calls)
        failure = ""
    except AnswerFailed as e:
        failure = repr(e)
    gap = max(agent.call.longest_gap_s for agent in agents)
    result = Held(streams, counts[2] / counts[0], round(gap, 3), round((contender.cpu_s() - cpu) / HOLD_S, 3), failure)
    close(agents)
    await asyncio.sleep(8)  # past the grace that clients have who leave
    return result
