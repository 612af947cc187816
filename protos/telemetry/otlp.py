"""The export of metrics, traces and logs to a collector, by OpenTelemetry's SDK and its OTLP exporters.

Nothing but `protos.telemetry.options.start` imports this module, and only with `--otlp`.

Invariants:
- what waits for the collector is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`, `OTEL_BLRP_MAX_QUEUE_SIZE`: 2,048 each by
  default); beyond, the oldest is dropped, and a log line reports it, at most one a minute;
- exporting happens in threads of the SDK: no caller waits for it, and none gets its errors;
- what the exporters themselves log is not exported.

The standard variables hold for the rest: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT, _COMPRESSION, those of one
signal (OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and so on), and OTEL_METRIC_EXPORT_INTERVAL.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from protos.telemetry.context import TraceContext
from protos.telemetry.logs import fields_of
from protos.telemetry.spans import ERROR_CHARS_MAX, Span

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""For the last batches to reach the collector when the process ends."""
EXPORTERS = ("opentelemetry", "urllib3", "requests")
"""Libraries that log about an export: exported in turn, one failure would make the next."""
BODY_CHARS_MAX = 8192

_SEVERITY = {
    logging.DEBUG: SeverityNumber.DEBUG,
    logging.INFO: SeverityNumber.INFO,
    logging.WARNING: SeverityNumber.WARN,
    logging.ERROR: SeverityNumber.ERROR,
    logging.CRITICAL: SeverityNumber.FATAL,
}


class Export:
    """The export of one process, until `close`. `names` are attributes of all that it exports."""

    def __init__(self, url: str, service: str, names: Mapping[str, str]) -> None:
        resource = Resource.create({"service.name": service, **{f"laminar.{key}": text for key, text in names.items()}})
        spans, logs = OTLPSpanExporter(_endpoint(url, "traces")), OTLPLogExporter(_endpoint(url, "logs"))
        metrics = OTLPMetricExporter(_endpoint(url, "metrics"))
        self._ends: Sequence[Callable[[], object]] = (spans.shutdown, logs.shutdown, metrics.shutdown)
        self._ids = _GivenIds()
        self._traces = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        self._traces.add_span_processor(BatchSpanProcessor(spans))
        self._tracer = self._traces.get_tracer("laminar")
        self._logs = LoggerProvider(resource, shutdown_on_exit=False)
        self._logs.add_log_record_processor(BatchLogRecordProcessor(logs))
        self._handler = OtlpHandler(self._logs)
        logging.getLogger().addHandler(self._handler)
        self._metrics = MeterProvider([PeriodicExportingMetricReader(metrics)], resource, shutdown_on_exit=False)
        self.meter = self._metrics.get_meter("laminar")

    def record(self, span: Span) -> None:
        """Queues the span. One thread at a time may call it."""
        self._ids.give(span.context)
        made = self._tracer.start_span(
            span.name,
            _below(span.parent),
            _KINDS[span.kind],
            dict(span.attributes),
            [Link(_span_context(link)) for link in span.links if link.span_id],
            _nanoseconds(span.started_unix_s),
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error[:ERROR_CHARS_MAX]))
        made.end(_nanoseconds(max(span.started_unix_s, span.ended_unix_s)))

    def close(self) -> None:
        """Sends what waits, within `CLOSE_S`."""
        logging.getLogger().removeHandler(self._handler)
        closing = [
            threading.Thread(target=provider.shutdown, name="otlp-close", daemon=True)
            for provider in (self._traces, self._logs, self._metrics)
        ]
        deadline = time.monotonic() + CLOSE_S
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [end for end, thread in zip(self._ends, closing, strict=True) if thread.is_alive()]
        if late:
            log.warning("the last telemetry did not reach the collector within %g s, and is dropped", CLOSE_S)
        for end in late:
            end()  # of the exporter: it tries no more


class OtlpHandler(logging.Handler):
    """Exports log records, with what they are about as attributes, and the span that they name as theirs."""

    def __init__(self, provider: LoggerProvider) -> None:
        super().__init__()
        self._provider = provider

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in EXPORTERS:
            return
        try:
            self._provider.get_logger(record.name).emit(_log_record(record))
        except Exception:  # noqa: BLE001  (logging's own rule: a handler's error goes to stderr, and to nobody else)
            self.handleError(record)


class _GivenIds(IdGenerator):
    """The ids of the span that is about to be made: they are derived from names, and known before it ends."""

    def __init__(self) -> None:
        self._context = TraceContext("0" * 32, "0" * 16, sampled=False)

    def give(self, context: TraceContext) -> None:
        self._context = context

    def generate_span_id(self) -> int:
        return int(self._context.span_id, 16)

    def generate_trace_id(self) -> int:
        return int(self._context.trace_id, 16)


_KINDS = {kind.name.lower(): kind for kind in SpanKind}


def _endpoint(url: str, signal: str) -> str:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or f"{url}/v1/{signal}"


def _span_context(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=True, trace_flags=flags)


def _below(parent: TraceContext | None) -> Context:
    """The SDK's form of it; an empty one for a span that nothing is above."""
    if parent is None or not parent.span_id:
        return Context()
    return set_span_in_context(NonRecordingSpan(_span_context(parent)), Context())


def _nanoseconds(unix_s: float) -> int:
    return round(unix_s * 1e9)


def _log_record(record: logging.LogRecord) -> LogRecord:
    fields = fields_of(record)
    trace_id, span_id = fields.pop("trace_id", None), fields.pop("span_id", None)
    named = TraceContext(str(trace_id), str(span_id), sampled=True) if trace_id and span_id else None
    attributes = {f"laminar.{name}": value for name, value in fields.items()}
    if record.exc_info and record.exc_info[0] is not None:
        attributes["exception.type"] = record.exc_info[0].__name__
        attributes["exception.stacktrace"] = logging.Formatter().formatException(record.exc_info)[:BODY_CHARS_MAX]
    return LogRecord(
        timestamp=_nanoseconds(record.created),
        context=_below(named),
        severity_text=record.levelname,
        severity_number=_SEVERITY.get(record.levelno, SeverityNumber.UNSPECIFIED),
        body=record.getMessage()[:BODY_CHARS_MAX],
        attributes=attributes,
    )
