"""Processor time of the gateway's token path against the Rust routers', per streamed event and per token.

Method. All contenders run at once in front of the same mock engines, and take turns: in every round each gets the same
load from the same client, and the processor time of all its processes and threads is read from their own clocks. A
round's ratio is ours over the better router's of that round; the figure is the median of the rounds' ratios. Tokens are
those that the engines sent meanwhile.

- event: streams of one token per event at 50 tokens/s, text to the client. The routers relay; the gateway asks the
  engine for ids and logprobs beside the text, records them on disk, and makes the text from the ids.
- token: as before, with events of the size that the gateway itself asks engines for beside 512 turns, at the
  50 tokens/s of the other figures; and at 8, where what runs whatever streams (looks, flushes) weighs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import uvloop

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.contenders import Contender, ContenderFailed, contenders, lacking, mock_engines

__all__ = ["lacking", "run"]

NUM_ENGINES = 4
RUST = ("sglang", "vllm")
STREAM_ROUNDS = ROUNDS + 4  # a round's ratio wavers by a fifth, with what else this machine's host does
STREAM_S = 3.0
TRIES = 3
FEW = (48, 50.0)  # streams, and tokens per second of each
MANY = (512, 50.0)  # so many that the gateway asks for its largest events; one core carries every contender
SLOW = (512, 8.0)


def run() -> Iterator[Figure]:
    yield from per_event()
    yield from per_token()


def per_event() -> Iterator[Figure]:
    what = "CPU per streamed event of one token"
    yield from _streams("cpu_per_event_vs_rust", what, 2.5, *FEW, ("--tokens-per-event", "1"))


def per_token() -> Iterator[Figure]:
    what = "CPU per token, routers with one per event"
    yield from _streams("cpu_per_token_vs_rust", what, 0.25, *MANY)
    yield from _streams("cpu_per_token_slow_vs_rust", f"{what}, at {SLOW[1]:g} tokens/s a stream", None, *SLOW)


def _streams(
    key: str, what: str, bar: float | None, streams: int, rate: float, options: Sequence[str] = ()
) -> Iterator[Figure]:
    """Per token: the routers' events have one each, ours what the gateway asked for."""
    names = (*RUST, "laminar")
    rounds: dict[str, list[float]] = {name: [] for name in names}
    failed = dict.fromkeys(names, 0)
    with mock_engines(NUM_ENGINES, rate=rate) as engines, contenders(names, engines, gateway=options) as found:
        for _ in range(STREAM_ROUNDS):
            for name, contender in found.items():
                cost, failures = _measured(contender, engines, streams, rate)
                rounds[name].append(cost.us)
                failed[name] += failures
    told = {"us_per_token": load.medians(rounds), "streams": streams, "not_counted": failed}
    yield median(
        key, f"{what}, ours over the better Rust router's", over_better(rounds, "laminar"), bar=bar, details=told
    )


def _measured(contender: Contender, engines: Sequence[str], streams: int, rate: float) -> tuple[load.Cost, int]:
    """And how often before that it left a stream without an event, as a router does at times: that is not counted."""
    for failures in range(TRIES):
        under_way = load.stream(contender, engines, "hello", streams=streams, rate=rate, seconds=STREAM_S)
        try:
            return uvloop.run(under_way), failures
        except ContenderFailed as e:
            print(e, flush=True)
    raise ContenderFailed(f"{contender.name} failed {TRIES} times in a row")


def over_better(rounds: dict[str, list[float]], ours: str) -> list[float]:
    return [own / min(others) for own, *others in zip(rounds[ours], *(rounds[name] for name in RUST), strict=True)]
