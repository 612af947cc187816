"""Spans as they are made here, at their end, from times that are recorded anyway; and the decision of what is sampled.

A process without `--otlp` has no tracer: where one may be, `if tracer is not None` is all that a request pays.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from protos.telemetry.context import TraceContext

Attribute = str | int | float | bool | Sequence[str] | Sequence[int]
SpanKind = Literal["internal", "server", "client", "producer", "consumer"]

ERROR_CHARS_MAX = 512
"""Of the error of a span, which may quote what another process sent."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span that has ended. `parent`: the context above it; a root's, or None, if there is none. `links`: spans of the
    same or of other traces that it follows from. `error`: why what it stands for failed; empty if it did not.

    Attributes hold ids, names and counts; never the text of a prompt or an answer.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    started_unix_s: float
    ended_unix_s: float
    attributes: Mapping[str, Attribute]
    kind: SpanKind = "internal"
    links: Sequence[TraceContext] = ()
    error: str = ""


class Tracer:
    """Decides which traces are sampled, and records the spans of those. `ratio`: the share of traces that begin here;
    a trace that began elsewhere is sampled if its caller says so."""

    def __init__(
        self,
        record: Callable[[Span], object],
        ratio: float,
        *,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._record, self._new_id = record, new_id
        self._bound = round(ratio * (1 << 64))

    def begin(self) -> TraceContext:
        """The root of a new trace. It is sampled by the rule of OpenTelemetry's TraceIdRatioBased, so that an engine
        with the same ratio samples the same traces."""
        trace_id = self._new_id()
        return TraceContext(trace_id, "", int(trace_id[16:], 16) < self._bound)

    def record(self, span: Span) -> None:
        """Queues it for export, if its trace is sampled. Never waits, never raises for a collector that is away."""
        if span.context.sampled:
            self._record(span)
