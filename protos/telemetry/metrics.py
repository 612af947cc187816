"""Tables of metrics: a row for each, and the instruments made of the rows, which are read when a reader collects them.

docs/reference/metrics.md is made of the daemons' tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from opentelemetry.metrics import CallbackOptions, Meter, Observation

OTEL_UNITS = {"bytes": "By", "seconds": "s"}
"""OpenTelemetry's codes of the units that stand in the names of served metrics; others do not."""

Value = tuple[float, Sequence[str]]
"""A value, and those of the metric's labels in their order."""
Callback = Callable[[CallbackOptions], Iterable[Observation]]
SourcesT = TypeVar("SourcesT")


@dataclass(frozen=True, slots=True)
class Metric(Generic[SourcesT]):
    """A row of a table. Where it is served, bytes and seconds are added to `name`, if they do not end it already, and
    `_total` to a counter's. `needs`: the option without which it is not served.
    """

    kind: Literal["counter", "gauge"]
    name: str
    unit: str
    help: str
    read: Callable[[SourcesT], Iterable[Value]]
    labels: Sequence[str] = ()
    needs: str = ""


def one(read: Callable[[SourcesT], float]) -> Callable[[SourcesT], Iterable[Value]]:
    """The values of a metric without labels."""
    return lambda sources: [(read(sources), ())]


def add_instruments(
    meter: Meter,
    metrics: Iterable[Metric[SourcesT]],
    sources: SourcesT,
    within: Callable[[Callback], Callback] = lambda callback: callback,
) -> None:
    """An instrument for each metric, whose values are read from `sources`. `within` wraps the callbacks, as for sources
    that one thread alone may read."""
    for metric in metrics:
        add_instrument(meter, metric, within(_callback(metric, sources)))


def add_instrument(meter: Meter, metric: Metric[SourcesT], observe: Callback) -> None:
    """The instrument of one row, whose values come from `observe`."""
    make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
    make(metric.name, [observe], OTEL_UNITS.get(metric.unit, ""), metric.help)


ON_LOOP_TIMEOUT_S = 2.0
"""For the event loop to read one metric; one that is held for longer costs that metric this collection."""


def on_loop(loop: asyncio.AbstractEventLoop) -> Callable[[Callback], Callback]:
    """For `add_instruments`: the callbacks run on the event loop that owns what they read, whichever thread collects.
    The loop must not wait for a collection."""

    def within(callback: Callback) -> Callback:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            found: Future[list[Observation]] = Future()

            def read() -> None:
                try:
                    found.set_result(list(callback(options)))
                except Exception as error:  # noqa: BLE001  (it is raised where the result is awaited)
                    found.set_exception(error)

            loop.call_soon_threadsafe(read)
            return found.result(ON_LOOP_TIMEOUT_S)

        return observe

    return within


def _callback(metric: Metric[SourcesT], sources: SourcesT) -> Callback:
    # +value: a bool, of which OTLP has none, as a number
    return lambda _: [
        Observation(+value, dict(zip(metric.labels, labels, strict=True))) for value, labels in metric.read(sources)
    ]
