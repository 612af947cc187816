"""The table of a relay's metrics, and the port where Prometheus reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import make_wsgi_app

from paramserver.core.access import metrics_refusal
from paramserver.core.records import Sealed
from paramserver.daemon.health import Health, with_health
from paramserver.daemon.http_port import serve_http
from paramserver.daemon.parts import RelayParts
from paramserver.data.engine_ports import EnginePort, EnginePortStatistics
from paramserver.data.server import DataServer
from protos.access.credentials import Credentials
from protos.access.tls import FleetTls
from protos.errors import Conflict
from protos.telemetry.metrics import Metric, Value, add_instruments, one


@dataclass(frozen=True, slots=True)
class Sources:
    """What the metrics are read from."""

    parts: RelayParts
    data: DataServer
    engine_ports: Sequence[EnginePort]


def _of_newest(read: Callable[[Sealed], float]) -> Callable[[Sources], Iterable[Value]]:
    """A value of each model's newest version here; none of a model that has none."""

    def values(sources: Sources) -> Iterable[Value]:
        for model, versions in sources.parts.models.items():
            shown = versions.shown()
            if shown:
                yield read(shown[-1]), (model,)

    return values


def _of_credentials(read: Callable[[Credentials], float]) -> Callable[[Sources], Iterable[Value]]:
    def values(sources: Sources) -> Iterable[Value]:
        credentials = sources.parts.credentials
        return [] if credentials is None else [(read(credentials), ())]

    return values


def _of_engine_ports(read: Callable[[EnginePortStatistics], float]) -> Callable[[Sources], Iterable[Value]]:
    def values(sources: Sources) -> Iterable[Value]:
        for port in sources.engine_ports:
            found = port.statistics()
            yield read(found), (found.engine,)

    return values


def _refused_at_engine_ports(sources: Sources) -> Iterable[Value]:
    for port in sources.engine_ports:
        found = port.statistics()
        yield from ((times, (found.engine, reason)) for reason, times in found.refused.items())


NOT_BY_TLS = "metrics are served by https, to certificates of the fleet, such as a reader's"

METRICS: Sequence[Metric[Sources]] = (
    Metric(
        "gauge",
        "laminar_relay_newest_version",
        "version",
        "The newest sealed version of the model that the relay holds complete.",
        _of_newest(lambda sealed: sealed.version),
        labels=("model",),
    ),
    Metric(
        "gauge",
        "laminar_relay_newest_version_age",
        "seconds",
        "Time since that version was sealed.",
        _of_newest(lambda sealed: max(0.0, time.time() - sealed.sealed_unix_s)),
        labels=("model",),
    ),
    Metric(
        "gauge",
        "laminar_relay_pool",
        "bytes",
        "Size of the pool of snapshots (--pool-bytes).",
        one(lambda sources: sources.parts.store.pool.pool_bytes),
    ),
    Metric(
        "gauge",
        "laminar_relay_pool_used",
        "bytes",
        "Bytes of snapshots in the pool.",
        one(lambda sources: sources.parts.store.pool.statistics().used_bytes),
    ),
    Metric(
        "gauge",
        "laminar_relay_pool_quarantined",
        "bytes",
        "Bytes of retired versions that processes still map: their memory is reused once they are unmapped.",
        one(lambda sources: sources.parts.store.pool.statistics().quarantined_bytes),
    ),
    Metric(
        "gauge",
        "laminar_relay_spill_failures",
        "versions",
        "Versions that could not be written to the disk of --spill, or removed from it, since the start; 0 without it.",
        one(lambda sources: 0 if sources.parts.spill is None else sources.parts.spill.failures),
    ),
    Metric(
        "gauge",
        "laminar_relay_commits_in_doubt",
        "versions",
        "Versions whose sealing transaction was sent to etcd and is not answered yet.",
        one(lambda sources: sources.parts.drafts.num_in_doubt()),
    ),
    Metric(
        "gauge",
        "laminar_relay_pins",
        "pins",
        "Pins that engines and gateways hold on versions here.",
        one(lambda sources: len(sources.parts.pins.all())),
    ),
    Metric(
        "gauge",
        "laminar_relay_transfers",
        "versions",
        "Versions that the relay is receiving now.",
        one(lambda sources: len(sources.parts.fetches.transfers())),
    ),
    Metric(
        "gauge",
        "laminar_relay_registry_reachable",
        "1 or 0",
        "1 while etcd answers the relay and takes its writes.",
        one(lambda sources: sources.parts.lease.reachable),
    ),
    Metric(
        "gauge",
        "laminar_relay_certificate_expiry",
        "seconds",
        "Time until the relay's certificate expires. Without --credentials there is none.",
        _of_credentials(lambda found: found.material.expires_unix_s - time.time()),
    ),
    Metric(
        "gauge",
        "laminar_relay_credentials_failed",
        "1 or 0",
        "1 while the files of --credentials cannot be used as they are, and those before them still are.",
        _of_credentials(lambda found: bool(found.failure)),
    ),
    Metric(
        "counter",
        "laminar_relay_sent",
        "bytes",
        "Bytes sent to other relays and to clients that pull.",
        one(lambda sources: sources.data.bytes_sent),
    ),
    Metric(
        "gauge",
        "laminar_relay_engine_connections",
        "connections",
        "Connections to the engine through its port of TLS. Engines without one have none.",
        _of_engine_ports(lambda found: found.open),
        labels=("engine",),
    ),
    Metric(
        "counter",
        "laminar_relay_engine_connections_refused",
        "connections",
        "Connections that an engine's port of TLS refused, by reason.",
        _refused_at_engine_ports,
        labels=("engine", "reason"),
    ),
)


def export_metrics(meter: Meter, sources: Sources) -> None:
    """The metrics as instruments of `meter`, which reads them in a thread of its own."""
    add_instruments(meter, METRICS, sources)


def serve_metrics(host: str, port: int, sources: Sources, health: Health) -> tuple[str, Callable[[], None]]:
    """Serves /metrics, and the relay's health beside it; returns "host:port" and what stops it. Where the relay has
    credentials, metrics are for holders of a certificate. Raises Conflict when the port is taken."""
    credentials = sources.parts.credentials
    reader = PrometheusMetricReader()
    provider = MeterProvider([reader], Resource({"service.name": "laminar-relay", "relay": sources.parts.config.name}))
    export_metrics(provider.get_meter("laminar.relay"), sources)
    try:
        tls = FleetTls(credentials, serving=True, refusal=metrics_refusal) if credentials is not None else None
        served = make_wsgi_app() if tls is None else for_tls_alone(make_wsgi_app())
        address, stop_serving = serve_http(host, port, with_health(served, health), tls)
    except OSError as error:
        raise Conflict(
            f"cannot serve metrics on {host}:{port}: {error.strerror}", hint="choose another --metrics-port"
        ) from error

    def stop() -> None:
        stop_serving()
        provider.shutdown()

    return address, stop


def for_tls_alone(application: WSGIApplication) -> WSGIApplication:
    """`application` for connections by TLS, whose other end has shown a certificate; the others get 403."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["wsgi.url_scheme"] == "https":
            return application(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [f"{NOT_BY_TLS}\n".encode()]

    return answer
