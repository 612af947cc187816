"""A relay's metrics for Prometheus, through OpenTelemetry: read when scraped, from `statistics()` and the versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import start_http_server

from paramserver.daemon.parts import RelayParts
from paramserver.data.server import DataServer
from protos.errors import Conflict

Observe = Callable[[], Iterable[Observation]]


def serve_metrics(host: str, port: int, parts: RelayParts, data: DataServer) -> tuple[str, Callable[[], None]]:
    """Serves /metrics; returns "host:port" and what stops it. Conflict when the port is taken."""
    reader = PrometheusMetricReader()
    provider = MeterProvider([reader], Resource({"service.name": "laminar-relay", "relay": parts.config.name}))
    meter = provider.get_meter("laminar.relay")
    for name, unit, text, observe in _gauges(parts):
        meter.create_observable_gauge(f"laminar_relay_{name}", [_callback(observe)], unit, text)
    meter.create_observable_counter(
        "laminar_relay_sent", [_callback(lambda: [Observation(data.bytes_sent)])], "By", "Bytes sent to peers."
    )
    try:
        server, thread = start_http_server(port, host)
    except OSError as error:
        raise Conflict(
            f"cannot serve metrics on {host}:{port}: {error.strerror}", hint="choose another --metrics-port"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        provider.shutdown()

    return f"{host}:{server.server_port}", stop


def _callback(observe: Observe) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: observe()


def _gauges(parts: RelayParts) -> list[tuple[str, str, str, Observe]]:
    lease, models, pins, fetches = parts.lease, parts.models, parts.pins, parts.fetches
    pool, spill, drafts = parts.store.pool, parts.spill, parts.drafts

    def ages() -> Iterable[Observation]:
        now = time.time()
        for model, versions in models.items():
            shown = versions.shown()
            if shown:
                yield Observation(max(0.0, now - shown[-1].sealed_unix_s), {"model": model})

    def newest() -> Iterable[Observation]:
        for model, versions in models.items():
            shown = versions.shown()
            if shown:
                yield Observation(shown[-1].version, {"model": model})

    return [
        ("newest_version_age", "s", "Seconds since the newest version held here was sealed.", ages),
        ("newest_version", "", "The newest version held here.", newest),
        ("pool", "By", "Size of the pool.", lambda: [Observation(pool.pool_bytes)]),
        ("pool_used", "By", "Bytes of snapshots in the pool.", lambda: [Observation(pool.statistics().used_bytes)]),
        (
            "pool_quarantined",
            "By",
            "Bytes that wait until their readers let go.",
            lambda: [Observation(pool.statistics().quarantined_bytes)],
        ),
        (
            "spill_failures",
            "",
            "Versions that could not be written to disk.",
            lambda: [Observation(spill.failures if spill is not None else 0)],
        ),
        (
            "commits_in_doubt",
            "",
            "Versions whose sealing transaction was sent and not yet answered.",
            lambda: [Observation(drafts.num_in_doubt())],
        ),
        ("pins", "", "Pins held on snapshots here.", lambda: [Observation(len(pins.all()))]),
        ("transfers", "", "Versions on their way here.", lambda: [Observation(len(fetches.transfers()))]),
        ("registry_reachable", "", "1 while etcd answers.", lambda: [Observation(int(lease.reachable))]),
    ]
