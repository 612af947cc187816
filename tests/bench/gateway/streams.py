"""Latency and capacity under many streams.

- added_latency: with 1,000 streams under way, short requests are sent beside them, and the time to their first byte is
  taken; the same load goes straight to the engines and through the gateway, in turns. Per round: p99 through the
  gateway minus p99 direct. Both ask engines for the same size of events.
- streams_max: so many streams at 50 tokens/s, each held for `HOLD_S`, on one gateway process, as their clients received
  them. A step is passed if no stream fails, every client has the engines' text without gap or repetition and, at the
  end, nothing missing that was due; at least `ON_TIME` of all events came on time, and nobody waited `GAP_S` for one.
  What is missing and what is late say `arrivals`.
- streams_max_by_counter: the same steps by the definition before that one. The gateway's own counter brings as many
  tokens in the last third as in the first (no growing lag), and nobody waits `GAP_S` for an event.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import uvloop

from gateway.core.placing.event_size import TOKENS_PER_EVENT_MAX
from gateway.tokens import Codec
from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.arrivals import ON_TIME_S, Arrivals, Script, received
from tests.bench.gateway.client import Agent, AnswerFailed, Call, close, connect, numbered, post
from tests.bench.gateway.contenders import ContenderFailed, contenders, mock_engines
from tests.bench.gateway.mock_engine import NUM_IDS, answer_ids
from tests.support.tiny_model import tiny_model

NUM_ENGINES = 4
RATE = 50.0
BACKGROUND = 1000
PROBERS, PROBES = 4, 400
INTERVAL = TOKENS_PER_EVENT_MAX  # which the gateway asks for by itself with so many turns
STEPS = (1000, 2000, 3000)
HOLD_S = 60.0
GAP_S = 5.0
ON_TIME = 0.99
LAG = 0.98
LONG = 30_000
CHAT = "/v1/chat/completions"


def run() -> Iterator[Figure]:
    yield added_latency()
    yield from streams_max()


def added_latency() -> Figure:
    rounds: list[float] = []
    numbers = itertools.count()  # no round asks again for what another left: that is a retry
    p99: dict[str, list[float]] = {"direct": [], "gateway": []}
    with mock_engines(NUM_ENGINES, rate=RATE) as engines, contenders(["laminar"], engines) as found:
        for _ in range(ROUNDS):
            p99["direct"].append(uvloop.run(first_bytes(engines, numbers)))
            p99["gateway"].append(uvloop.run(first_bytes([found["laminar"].url], numbers)))
            rounds.append((p99["gateway"][-1] - p99["direct"][-1]) * 1e3)
    what = f"time to the first byte, p99, over going direct, beside {BACKGROUND} streams"
    told = {name: round(statistics.median(values) * 1e3, 2) for name, values in p99.items()}
    return median("added_latency_p99_ms", what, rounds, bar=25.0, unit="ms", details={"p99_ms": told})


async def first_bytes(urls: Sequence[str], numbers: Iterator[int]) -> float:
    """Seconds to the first byte, p99, of probes spread over `urls` while the streams run. `numbers`: of the chats."""
    agents: list[Agent] = []
    for url in urls:
        agents += await connect(url, BACKGROUND // len(urls))
    calls = _stream_all(agents, urls, numbers)
    await load.all_begun(agents, calls)
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


def _stream_all(agents: Sequence[Agent], urls: Sequence[str], numbers: Iterator[int]) -> list[asyncio.Future[Call]]:
    each = len(agents) // len(urls)
    calls = []
    for number, agent in enumerate(agents):
        url = urls[number // each]
        body = numbered(load.chat("hello", LONG, stream=True, **_interval(url, urls)), next(numbers))
        calls.append(agent.send(post(url, CHAT, body)))
    return calls


def _interval(url: str, urls: Sequence[str]) -> dict[str, int]:
    """Engines are told, when they are asked directly; the gateway tells them itself."""
    return {"stream_interval": INTERVAL} if len(urls) > 1 else {}


@dataclass(frozen=True, slots=True)
class Held:
    """A step, as its clients saw it; `kept`: the last third's tokens over the first's, by the gateway's counter."""

    streams: int
    kept: float
    longest_gap_s: float
    cores: float
    on_time: float
    delay_p50_s: float
    delay_p99_s: float
    delay_max_s: float
    missing: int
    tokens_per_event: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        received = self.on_time >= ON_TIME and not self.missing
        return not self.failure and received and self.longest_gap_s < GAP_S

    @property
    def passed_by_counter(self) -> bool:
        return not self.failure and self.kept >= LAG and self.longest_gap_s < GAP_S


def streams_max() -> Iterator[Figure]:
    steps: list[Held] = []
    first_number = 0
    with mock_engines(NUM_ENGINES, rate=RATE) as engines, contenders(["laminar"], engines) as found:
        for streams in STEPS:
            steps.append(uvloop.run(held_or_not(found["laminar"], streams, first_number)))
            first_number += streams
            print(f"streams_max: {steps[-1]}", flush=True)
            if not steps[-1].passed and not steps[-1].passed_by_counter:
                break
    yield from step_figures(steps)


def step_figures(steps: Sequence[Held]) -> list[Figure]:
    what = f"concurrent streams at {RATE:g} tokens/s, each held for {HOLD_S:g} s, on one process"
    received = f"{what}: what clients received, whole and {ON_TIME:.0%} of events within {ON_TIME_S:g} s of their pace"
    counted = f"old definition, by the gateway's own counter: {what}"
    return [
        _largest("streams_max", received, [step.streams for step in steps if step.passed], steps),
        _largest("streams_max_by_counter", counted, [step.streams for step in steps if step.passed_by_counter], steps),
    ]


def _largest(key: str, what: str, passed: Sequence[int], steps: Sequence[Held]) -> Figure:
    return Figure(
        key,
        what,
        float(max(passed, default=0)),
        bar=2000,
        better="more",
        of="largest step passed",
        note=f"steps tried: {', '.join(str(step.streams) for step in steps)}",
        details={"steps": [str(step) for step in steps]},
    )


def _passed_on(url: str) -> int:
    """Tokens so far, by the gateway's own counter."""
    status = httpx.get(f"{url}/status", timeout=GAP_S).raise_for_status().json()
    return int(status["counters"]["tokens_generated"])


def said() -> Script:
    """What the mock engines' ids are in the gateway's text."""
    codec = Codec.load(tiny_model())
    return Script([json.dumps(codec.decode([token]))[1:-1].encode() for token in answer_ids(NUM_IDS)])


async def held_or_not(contender: load.Contender, streams: int, first_number: int = 0) -> Held:
    """A step whose streams do not even begin is not passed; those before it stand."""
    try:
        return await held(contender, streams, first_number)
    except ContenderFailed as e:
        return failed(streams, str(e))


def failed(streams: int, why: str) -> Held:
    none = float("nan")
    return Held(streams, none, none, none, none, none, none, none, 0, none, why)


async def held(contender: load.Contender, streams: int, first_number: int) -> Held:
    script, loop = said(), asyncio.get_running_loop()
    agents = await connect(contender.url, streams, arrivals=lambda: Arrivals(script))
    calls = await load.at_work(contender, agents, load.chat("hello", LONG, stream=True), RATE, first_number)
    await asyncio.sleep(load.SETTLE_S)
    cpu, seen, counts = contender.cpu_s(), await asyncio.to_thread(_passed_on, contender.url), []
    since = loop.time()
    for _ in range(3):
        await asyncio.sleep(HOLD_S / 3)
        now = await asyncio.to_thread(_passed_on, contender.url)
        counts.append(now - seen)
        seen = now
    until, cores = loop.time(), (contender.cpu_s() - cpu) / HOLD_S
    try:
        load.raise_failure(calls)
        failure = ""
    except AnswerFailed as e:
        failure = repr(e)
    found = [agent.call.arrivals for agent in agents]
    result = judged(streams, [one for one in found if one is not None], since, until, counts, cores, failure)
    close(agents)
    await asyncio.sleep(8)  # past the grace that clients have who leave
    return result


def judged(
    streams: int,
    found: Sequence[Arrivals],
    since: float,
    until: float,
    counts: Sequence[int],
    cores: float,
    failure: str = "",
) -> Held:
    """`counts`: tokens of each third, by the gateway's counter."""
    each = [received(one, RATE, since, until) for one in found]
    delays = sorted(delay for one in each for delay in one.delays_s)
    wrong = next((one.wrong for one in each if one.wrong), "")
    return Held(
        streams,
        kept=round(counts[2] / counts[0], 4),
        longest_gap_s=round(max(one.longest_gap_s for one in each), 3),
        cores=round(cores, 3),
        on_time=round(sum(delay <= ON_TIME_S for delay in delays) / max(1, len(delays)), 5),
        delay_p50_s=round(_share_of(delays, 0.5), 3),
        delay_p99_s=round(_share_of(delays, 0.99), 3),
        delay_max_s=round(_share_of(delays, 1.0), 3),
        missing=sum(one.missing for one in each),
        tokens_per_event=round((until - since) * RATE * streams / max(1, len(delays)), 1),
        failure=failure or (f"not the engines' text: {wrong}" if wrong else ""),
    )


def _share_of(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("inf")
