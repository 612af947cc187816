"""Trace contexts: to which trace, and below which span of it, something belongs. Pure.

W3C's `traceparent` carries a context between processes. The ids of spans below it are derived from names: whoever knows
the context and the name of a thing (a turn, a relay) knows the id of its span, without being sent it. So a gateway
continues the trace of a session that another one began, and a relay names the span of its upstream.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from hashlib import blake2b

TRACEPARENT = "traceparent"
"""The name of the header, and of the label of a version."""
TRACEPARENT_CHARS_MAX = 512
"""Of a header: this version of the format has 55, a later one may be longer."""
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`trace_id`: 32 hexadecimal digits. `span_id`: 16, or empty at a root, which no span is above. `sampled`: whether
    spans of the trace are recorded."""

    trace_id: str
    span_id: str
    sampled: bool

    def child(self, name: str) -> TraceContext:
        """The context of the span of that name, which has to be unique within the trace."""
        span_id = blake2b(f"{self.trace_id} {name}".encode(), digest_size=8).hexdigest()
        return TraceContext(self.trace_id, span_id, self.sampled)

    @property
    def traceparent(self) -> str:
        """The header of a request below this span, which cannot be a root."""
        assert self.span_id, "a root has no span"
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.sampled)}"


def parse_traceparent(text: str | None) -> TraceContext | None:
    """The context that a `traceparent` carries; None for none and for anything else than a valid one, which a receiver
    has to ignore."""
    if text is None or len(text) > TRACEPARENT_CHARS_MAX:
        return None
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None or (found[1] == "00" and found[5]):
        return None
    return TraceContext(found[2], found[3], bool(int(found[4], 16) & _SAMPLED))


def current_traceparent() -> str:
    """That of the span that this process is in, by OpenTelemetry's own API; empty without one. A process that has not
    imported it has no span, and pays nothing."""
    trace = sys.modules.get("opentelemetry.trace")
    context = None if trace is None else trace.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return ""
    return TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled).traceparent
