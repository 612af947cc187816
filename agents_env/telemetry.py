"""What a runner reports about itself: JSON log lines, and metrics for Prometheus from the counts of its run.

The fields of a line are those of the other daemons' (docs/telemetry.md).
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agents_env.failures import RunFailed
from agents_env.runner import Statistics
from protos.foreign_text import LINE_CHARS_MAX, OneLine

TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
FIELDS = ("session",)
"""Of a record's `extra`, what stands in its line."""


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if len(message) > LINE_CHARS_MAX:
            message = f"{message[:LINE_CHARS_MAX]} ... ({len(message)} characters)"
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **{name: str(getattr(record, name)) for name in FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup_logging(level: str, form: str) -> None:
    """Sends log lines to stderr, as "text" or "json"."""
    logging.basicConfig(stream=sys.stderr, level=level.upper())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines() if form == "json" else OneLine(TEXT, datefmt="%Y-%m-%dT%H:%M:%S"))


@dataclass(frozen=True, slots=True)
class RunnerMetric:
    """A row of the table. A counter is served with `_total`."""

    kind: Literal["counter", "gauge"]
    name: str
    unit: str
    help: str
    read: Callable[[Statistics], float]
    labels: Sequence[str] = ()


METRICS: Sequence[RunnerMetric] = (
    RunnerMetric("gauge", "laminar_runner_running", "rollouts", "Rollouts under way now.", lambda now: now.running),
    RunnerMetric(
        "counter", "laminar_runner_rollouts", "rollouts", "Rollouts that came to a reward.", lambda now: now.rollouts
    ),
    RunnerMetric(
        "counter", "laminar_runner_failed", "attempts", "Attempts at samples that failed.", lambda now: now.failed
    ),
    RunnerMetric(
        "counter",
        "laminar_runner_given_up",
        "samples",
        "Samples that were given up after all their attempts.",
        lambda now: now.given_up,
    ),
    RunnerMetric(
        "counter",
        "laminar_runner_groups_completed",
        "groups",
        "Groups of which every sample came to a reward.",
        lambda now: now.groups_completed,
    ),
    RunnerMetric("counter", "laminar_runner_turns", "turns", "Model calls that were answered.", lambda now: now.turns),
    RunnerMetric(
        "counter",
        "laminar_runner_completion_tokens",
        "tokens",
        "Tokens of all answers, as the server counts them.",
        lambda now: now.completion_tokens,
    ),
    RunnerMetric(
        "counter",
        "laminar_runner_retries",
        "requests",
        "Requests that were sent again, to a server that was full or away.",
        lambda now: now.retries,
    ),
)


class RunnerMetrics(Collector):
    """Read at each scrape."""

    def __init__(self, read: Callable[[], Statistics]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        for metric in METRICS:
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            yield family(metric.name, metric.help, metric.read(now))


@contextlib.contextmanager
def serving_metrics(port: int | None, read: Callable[[], Statistics]) -> Iterator[str | None]:
    """Serves /metrics on loopback, and yields "host:port"; None without a port. RunFailed when it is taken."""
    if port is None:
        yield None
        return
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, RunnerMetrics(read)):
        registry.register(collector)
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise RunFailed(f"metrics cannot be served at port {port}: {error.strerror}") from error
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
