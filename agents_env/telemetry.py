"""What a runner reports about itself: metrics for Prometheus, from the counts of its run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    core,
    start_http_server,
)
from prometheus_client.registry import Collector

from agents_env.failures import RunFailed
from agents_env.runner import Statistics
from protos.telemetry.metrics import Metric, one

METRICS: Sequence[Metric[Statistics]] = (
    Metric("gauge", "laminar_runner_running", "rollouts", "Rollouts under way now.", one(lambda now: now.running)),
    Metric(
        "counter",
        "laminar_runner_rollouts",
        "rollouts",
        "Rollouts that came to a reward.",
        one(lambda now: now.rollouts),
    ),
    Metric(
        "counter", "laminar_runner_failed", "attempts", "Attempts at samples that failed.", one(lambda now: now.failed)
    ),
    Metric(
        "counter",
        "laminar_runner_given_up",
        "samples",
        "Samples that were given up after all their attempts.",
        one(lambda now: now.given_up),
    ),
    Metric(
        "counter",
        "laminar_runner_groups_completed",
        "groups",
        "Groups of which every sample came to a reward.",
        one(lambda now: now.groups_completed),
    ),
    Metric("counter", "laminar_runner_turns", "turns", "Model calls that were answered.", one(lambda now: now.turns)),
    Metric(
        "counter",
        "laminar_runner_completion_tokens",
        "tokens",
        "Tokens of all answers, as the server counts them.",
        one(lambda now: now.completion_tokens),
    ),
    Metric(
        "counter",
        "laminar_runner_retries",
        "requests",
        "Requests that were sent again, to a server that was full or away.",
        one(lambda now: now.retries),
    ),
)


class RunnerMetrics(Collector):
    """Read at each scrape."""

    def __init__(self, read: Callable[[], Statistics]) -> None:
        self._read = read

    def collect(self) -> Iterator[core.Metric]:
        now = self._read()
        for metric in METRICS:
            family = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
            [(value, _)] = metric.read(now)
            yield family(metric.name, metric.help, value)


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
