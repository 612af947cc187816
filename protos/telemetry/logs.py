"""Log records with the glossary's names: their fields, and their form as JSON lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from protos.telemetry.context import TraceContext

FIELDS = ("model", "version", "session", "turn", "engine", "relay", "trace_id", "span_id")
"""What a record may be about, in the order in which it is shown."""
FIELD_CHARS_MAX = 512


def about(trace: TraceContext | None = None, **fields: str | int | None) -> dict[str, str | int]:
    """The `extra` of a log call: what it is about, by names of `FIELDS`, and the span that it belongs to."""
    assert fields.keys() <= set(FIELDS), fields
    found = {name: value for name, value in fields.items() if value is not None}
    if trace is not None:
        found["trace_id"] = trace.trace_id
        if trace.span_id:
            found["span_id"] = trace.span_id
    return found


def fields_of(record: logging.LogRecord) -> dict[str, str | int]:
    """Those of `FIELDS` that the record has."""
    found = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
    return {
        name: value[:FIELD_CHARS_MAX] if isinstance(value, str) else value
        for name, value in found.items()
        if isinstance(value, str | int)
    }


class JsonLines(logging.Formatter):
    """A JSON object a line: time (UTC), level, logger, message, and what the record is about. `names`: of the process.

    Quoting makes of any text one line; the message is cut off after `message_chars_max`.
    """

    def __init__(self, names: Mapping[str, str], message_chars_max: int) -> None:
        super().__init__()
        self._names, self._max = names, message_chars_max

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if len(message) > self._max:
            message = f"{message[: self._max]} ... ({len(message)} characters)"
        line: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **self._names,
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)
