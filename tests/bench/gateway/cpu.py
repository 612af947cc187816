"""Processor time of the gateway's token path against the Rust routers', per streamed event and per token.

Method. All contenders run at once in front of the same mock engines, and take turns: in every round each gets the same
load from the same client, and the processor time of all its processes and threads is read from their own clocks. A
round's ratio is ours over the better router's of that round; the figure is the median of the rounds' ratios. Tokens are
those that the engines sent meanwhile.

- event: streams of one token per event, text to the client. The routers relay; the gateway asks the engine for ids and
  logprobs beside the text, records them on disk, and makes the text from the ids.
- token: as before, with events of the size that the gateway itself asks engines for beside so many turns; the routers'
  have one token each.

Both have a row for each of 8, 50 and 200 tokens/s a stream: the slower the streams, the more weighs what runs whatever
they say (looks, flushes), and the fewer tokens make up the second that an event may gather. How many tokens an event
had is told beside each row, as the engines sent it and as the clients received it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import uvloop

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.contenders import Contender, ContenderFailed, contenders, lacking, mock_engines

__all__ = ["lacking", "run"]

NUM_ENGINES = 4
RUST = ("sglang", "vllm")
NAMES = (*RUST, "laminar")
STREAM_ROUNDS = ROUNDS + 4  # a round's ratio wavers by a fifth, with what else this machine's host does
STREAM_S = 3.0
TRIES = 3

Costs = Mapping[str, Sequence[load.Cost]]
"""Of each contender, its rounds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One speed of a figure; `formerly`: the key of a figure of an older definition that is the same measurement."""

    streams: int
    tokens_s: float  # of each stream
    formerly: str = ""


EVENT_ROWS = (Row(48, 8.0), Row(48, 50.0, "cpu_per_event_vs_rust"), Row(48, 200.0))
EVENT_BAR = 2.5
TOKEN_ROWS = (
    Row(512, 8.0, "cpu_per_token_slow_vs_rust"),
    Row(512, 50.0, "cpu_per_token_vs_rust"),
    Row(128, 200.0),  # as many tokens in all as at 50: one core carries every contender
)
TOKEN_BAR = 0.25


def run() -> Iterator[Figure]:
    for row in EVENT_ROWS:
        yield from event_figures(row, *_costs(row, ("--tokens-per-event", "1")))
    for row in TOKEN_ROWS:
        yield from token_figures(row, *_costs(row, ()))


def event_figures(row: Row, costs: Costs, failed: Mapping[str, int]) -> list[Figure]:
    return _figures("cpu_per_event", "CPU per streamed event of one token", EVENT_BAR, row, costs, failed)


def token_figures(row: Row, costs: Costs, failed: Mapping[str, int]) -> list[Figure]:
    return _figures("cpu_per_token", "CPU per token, routers with one per event", TOKEN_BAR, row, costs, failed)


def _figures(key: str, what: str, bar: float, row: Row, costs: Costs, failed: Mapping[str, int]) -> list[Figure]:
    """The row, and after it the same rounds under the key of an older definition."""
    us = {name: [cost.us for cost in rounds] for name, rounds in costs.items()}
    at = f"{row.streams} streams of {row.tokens_s:g} tokens/s"
    sizes = events_size(costs)
    told = {"us_per_token": load.medians(us), "tokens_per_event": sizes, "streams": row.streams, "not_counted": failed}
    ratios = over_better(us, "laminar")
    what = f"{what}, ours over the better Rust router's, {at}"
    note = f"tokens per event: {sizes['laminar']['sent']:g}"
    figure = median(f"{key}_{row.tokens_s:g}_vs_rust", what, ratios, bar=bar, note=note, details=told)
    return [figure, *_as_formerly(figure, row)]


def _as_formerly(figure: Figure, row: Row) -> list[Figure]:
    """It had one row with a bar, and none for the slow one."""
    if not row.formerly:
        return []
    bar = None if "slow" in row.formerly else figure.bar
    what = f"old definition, the rounds of {figure.key}: {figure.what}"
    return [replace(figure, key=row.formerly, what=what, bar=bar)]


def events_size(costs: Costs) -> dict[str, dict[str, float]]:
    """Tokens of an event of each contender, as sent by engines and as received by clients: medians of the rounds."""
    sizes = {name: [cost.tokens_per_event for cost in rounds] for name, rounds in costs.items()}
    return {
        name: {
            "sent": round(statistics.median(sent for sent, _ in rounds), 2),
            "received": round(statistics.median(received for _, received in rounds), 2),
        }
        for name, rounds in sizes.items()
    }


def _costs(row: Row, options: Sequence[str]) -> tuple[Costs, dict[str, int]]:
    """Of all rounds; and how often a contender's load was sent again."""
    costs: dict[str, list[load.Cost]] = {name: [] for name in NAMES}
    failed = dict.fromkeys(NAMES, 0)
    with mock_engines(NUM_ENGINES, rate=row.tokens_s) as engines, contenders(NAMES, engines, gateway=options) as found:
        for _ in range(STREAM_ROUNDS):
            for name, contender in found.items():
                cost, failures = _measured(contender, engines, row.streams, row.tokens_s)
                costs[name].append(cost)
                failed[name] += failures
    return costs, failed


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
