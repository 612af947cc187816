"""Processor time of the gateway's token path with telemetry exported, over the same without.

Method. Two gateways run at once in front of the same mock engines, one with `--otlp` and its default ratio (1 % of
the traces), to a collector that takes everything and keeps nothing. They take turns: in every round each gets the same
whole chats from the same client, 512 at a time, and the processor time of all its threads, those of the exporters
included, is read from their own clocks. Whole chats, so that what telemetry does at the beginning and the end of a turn
is in it. A round's ratio is with over without; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import uvloop

from tests.bench.figures import ROUNDS, Figure, median
from tests.bench.gateway import load
from tests.bench.gateway.contenders import contenders, mock_engines
from tests.support.collector import receiving

__all__ = ["lacking", "run"]

NUM_ENGINES = 4
STREAMS = 512
RATE = 50.0
TOKENS = 100  # of a chat: two seconds
CHATS = 2 * STREAMS  # of a contender in a round
NUM_ROUNDS = ROUNDS + 4  # as the rows of `cpu`
BAR = 1.05
EXPORTER = "opentelemetry.exporter.otlp"
OFF, ON = "laminar-off", "laminar-on"


def lacking() -> list[str]:
    there = importlib.util.find_spec("opentelemetry.exporter") and importlib.util.find_spec(EXPORTER)
    return [] if there else ["OpenTelemetry's OTLP exporter: `make env`, or pip install 'laminar-rl[otlp]'"]


def run() -> Iterator[Figure]:
    costs: dict[str, list[float]] = {OFF: [], ON: []}
    received: Counter[str] = Counter()  # exports by signal
    with (
        receiving(lambda path, _: received.update([path.rpartition("/")[2]])) as url,
        mock_engines(NUM_ENGINES, rate=RATE) as engines,
        contenders((OFF, ON), engines, each={ON: ("--otlp", url)}) as found,
    ):
        for number in range(NUM_ROUNDS + 1):  # the first warms both up
            for name in _order(number):
                body = load.chat(f"hello {number}", TOKENS, stream=True)
                cost = uvloop.run(load.requests(found[name], body, num=CHATS, connections=STREAMS))
                if number:
                    costs[name].append(cost.us / TOKENS)
    ratios = [on / off for on, off in zip(costs[ON], costs[OFF], strict=True)]
    what = f"CPU per token with telemetry (1 % of traces) over the same without, {STREAMS} streams of {RATE:g} tokens/s"
    told = {name: round(statistics.median(rounds), 3) for name, rounds in costs.items()}
    details = {"us_per_token": told, "streams": STREAMS, "exports": dict(received)}
    yield median("telemetry_cpu_per_token", what, ratios, bar=BAR, details=details)


def _order(number: int) -> Sequence[str]:
    """Each goes first as often as the other."""
    return (OFF, ON) if number % 2 else (ON, OFF)
