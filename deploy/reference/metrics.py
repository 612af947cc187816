"""docs/reference/metrics.md: every metric that relays and gateways serve, under the name by which it is served.

The rows are those of the daemons' own tables. Their instruments are made here, over values of this module, and names,
types and help texts are read from what a scrape would get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client import Metric as Family

import agents_env.telemetry
import gateway.operate.metrics
import paramserver.daemon.metrics
from deploy.reference import markdown
from deploy.reference.markdown import code, prose, table
from protos.telemetry.metrics import Callback, Metric, add_instrument

HEAD = ("metric", "type", "labels", "unit", "what it is", "served with")
INTRO = """
A relay serves its metrics at `--metrics-port`, a gateway at `GET /metrics`, in the text format of Prometheus. Each
series of `laminar_...` also has the labels `otel_scope_name`, `otel_scope_version` and `otel_scope_schema_url`. A
counter begins at 0 with its process. [alerts.md](../alerts.md) has the alerts, `deploy/prometheus` their rules and an
example of the jobs. Engines serve metrics of their own; the embedded engine has vLLM's names, for what it has of them.
"""
RUNNER = """
`agents-env run --metrics-port PORT` serves them at `/metrics`, on loopback.
"""
PROCESS = """
All of them serve those of Prometheus' client library for Python, too. A relay also serves `target_info`, whose label
`relay` is its name.
"""


def served(metrics: Iterable[Metric[Any]]) -> Iterator[tuple[Metric[Any], Family]]:
    """Each metric, and what a scrape gets of its instrument."""
    registry = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(disable_target_info=True, registry=registry)])
    meter, table_of = provider.get_meter("reference"), list(metrics)
    for metric in table_of:
        add_instrument(meter, metric, _value_of(metric))
    families = list(registry.collect())
    provider.shutdown()
    for metric, family in zip(table_of, families, strict=True):
        assert family.name.startswith(metric.name), f"{family.name} is not served of {metric.name}"
        yield metric, family


def _value_of(metric: Metric[Any]) -> Callback:
    """A callback with one value, and a text for each label."""
    return lambda _: [Observation(0, dict.fromkeys(metric.labels, ""))]


def rows(metrics: Iterable[Metric[Any]]) -> Iterator[tuple[str, ...]]:
    for metric, family in served(metrics):
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
        table(HEAD, rows(paramserver.daemon.metrics.METRICS)),
        "## Gateway",
        table(HEAD, rows(gateway.operate.metrics.METRICS)),
        "## Runner",
        RUNNER,
        table(HEAD, rows(agents_env.telemetry.METRICS)),
        "## Process",
        PROCESS,
        table(HEAD, process_rows()),
    )
