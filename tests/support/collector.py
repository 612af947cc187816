"""An OpenTelemetry collector for tests: OTLP over HTTP at a port of its own, whatever it gets decoded and kept."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Attributes = dict[str, Any]


@dataclass(frozen=True)
class SeenSpan:
    """A span as it arrived; ids in hexadecimal digits, an empty `parent` at a root."""

    service: Attributes
    name: str
    trace_id: str
    span_id: str
    parent: str
    started: int
    ended: int
    attributes: Attributes
    links: tuple[str, ...]
    error: str

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(frozen=True)
class SeenLog:
    service: Attributes
    logger: str
    body: str
    trace_id: str
    span_id: str
    attributes: Attributes


@dataclass
class Collector:
    url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    logs: list[SeenLog] = field(default_factory=list)
    metrics: dict[str, list[tuple[Attributes, float]]] = field(default_factory=dict)

    def named(self, name: str, **attributes: Any) -> list[SeenSpan]:
        """Spans of that name with those attributes, whose prefix `laminar.` is left out here, by begin."""
        wanted = {f"laminar.{key}": value for key, value in attributes.items()}
        found = [span for span in self.spans if span.name == name and wanted.items() <= span.attributes.items()]
        return sorted(found, key=lambda span: span.started)

    def one(self, name: str, **attributes: Any) -> SeenSpan:
        found = self.named(name, **attributes)
        assert len(found) == 1, (name, attributes, self.spans)
        return found[0]

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not arrive; spans: {[span.name for span in self.spans]}"
            time.sleep(0.02)

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _attributes(resource.resource.attributes)
                self.spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/logs":
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
                service = _attributes(resource.resource.attributes)
                self.logs += [
                    _log(service, scope.scope.name, record)
                    for scope in resource.scope_logs
                    for record in scope.log_records
                ]
        elif path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        points = metric.sum.data_points if metric.HasField("sum") else metric.gauge.data_points
                        self.metrics[metric.name] = [
                            (_attributes(p.attributes), p.as_double or p.as_int) for p in points
                        ]
        else:
            raise AssertionError(f"nothing is sent to {path}")


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


def _attributes(pairs: Any) -> Attributes:
    return {pair.key: _value(pair.value) for pair in pairs}


def _span(service: Attributes, span: Any) -> SeenSpan:
    return SeenSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        tuple(link.span_id.hex() for link in span.links),
        span.status.message if span.status.code == 2 else "",
    )


def _log(service: Attributes, logger: str, record: Any) -> SeenLog:
    trace_id, span_id = record.trace_id.hex(), record.span_id.hex()
    return SeenLog(service, logger, record.body.string_value, trace_id, span_id, _attributes(record.attributes))


@contextmanager
def collecting() -> Iterator[Collector]:
    """Decodes and keeps every export until the end of the block."""
    collector = Collector()
    with receiving(collector.take) as collector.url:
        yield collector


@contextmanager
def receiving(take: Callable[[str, bytes], None]) -> Iterator[str]:
    """Serves in threads of its own until the end of the block; yields the address. `take(path, body)` is called for
    one export at a time."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            with lock:
                take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
