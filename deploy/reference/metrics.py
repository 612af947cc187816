"""docs/reference/metrics.md: every metric that relays and gateways serve, under the name by which it is served.

The rows are those of the daemons' own tables. Their instruments are made here, over values of this module, and names,
types and help texts are read from what a scrape would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client import Metric as Family

import gateway.operate.metrics
import paramserver.daemon.metrics
from deploy.reference import markdown
from deploy.reference.markdown import code, prose, table

HEAD = ("metric", "type", "labels", "unit", "what it is", "served with")
INTRO = """
A relay serves its metrics at `--metrics-port`, a gateway at `GET /metrics`, in the text format of Prometheus. Each
series of `laminar_...` also has the labels `otel_scope_name`, `otel_scope_version` and `otel_scope_schema_url`. A
counter begins at 0 with its process. [alerts.md](../alerts.md) has the alerts, `deploy/prometheus` their rules and an
example of the jobs. Engines serve metrics of their own; the embedded engine has vLLM's names, for what it has of them.
"""
PROCESS = """
Both serve those of Prometheus' client library for Python, too. A relay also serves `target_info`, whose label `relay`
is its name.
"""


class Metric(Protocol):
    """A row of a daemon's table."""

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def labels(self) -> Sequence[str]: ...


MetricT = TypeVar("MetricT", bound=Metric)
Callback = Callable[[CallbackOptions], Iterable[Observation]]


def served(
    metrics: Iterable[MetricT], add_instrument: Callable[[Meter, MetricT, Callback], None]
) -> Iterator[tuple[MetricT, Family]]:
    """Each metric, and what a scrape gets of its instrument."""
    registry = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(disable_target_info=True, registry=registry)])
    meter, rows = provider.get_meter("reference"), list(metrics)
    for metric in rows:
        add_instrument(meter, metric, _value_of(metric))
    families = list(registry.collect())
    provider.shutdown()
    for metric, family in zip(rows, families, strict=True):
        assert family.name.startswith(metric.name), f"{family.name} is not served of {metric.name}"
        yield metric, family


def _value_of(metric: Metric) -> Callback:
    """A callback with one value, and a text for each label."""
    return lambda _: [Observation(0, dict.fromkeys(metric.labels, ""))]


def relay_rows() -> Iterator[tuple[str, ...]]:
    table_of, add = paramserver.daemon.metrics.METRICS, paramserver.daemon.metrics.add_instrument
    for metric, family in served(table_of, add):
        yield _row(family, metric.labels, metric.unit)


def gateway_rows() -> Iterator[tuple[str, ...]]:
    table_of, add = gateway.operate.metrics.METRICS, gateway.operate.metrics.add_instrument
    for metric, family in served(table_of, add):
        yield _row(family, metric.labels, metric.unit, code(metric.needs) if metric.needs else "")


def process_rows() -> Iterator[tuple[str, ...]]:
    """Of the client library's own collectors, on Linux."""
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        for family in collector.collect():
            yield _row(family, list(family.samples[0].labels), "")


def _row(family: Family, labels: Sequence[str], unit: str, needs: str = "") -> tuple[str, ...]:
    name = family.samples[0].name
    return code(name), family.type, ", ".join(map(code, labels)), unit, prose(family.documentation), needs


def page() -> str:
    return markdown.page(
        "Metrics",
        INTRO,
        "## Relay",
        table(HEAD, relay_rows()),
        "## Gateway",
        table(HEAD, gateway_rows()),
        "## Process",
        PROCESS,
        table(HEAD, process_rows()),
    )
