"""JSON log lines: one object a line, with the glossary's names, whatever a message holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from protos.process import LINE_CHARS_MAX, setup_logging
from protos.telemetry.context import TraceContext
from protos.telemetry.logs import FIELD_CHARS_MAX, about

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)
log = logging.getLogger("laminar.test")


@pytest.fixture(autouse=True)
def _handlers_of_the_root() -> Iterator[None]:
    before = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = before


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_what_the_process_and_the_record_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json", model="policy")
    log.warning("turn %s cut", "t1", extra=about(TRACE, session="s", engine="e0", version=7, relay=None))
    (line,) = lines(capsys)
    assert str(line.pop("time")).endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "laminar.test",
        "message": "turn t1 cut",
        "model": "policy",
        "version": 7,
        "session": "s",
        "engine": "e0",
        "trace_id": TRACE.trace_id,
        "span_id": TRACE.span_id,
    }


def test_no_message_forges_a_line_or_fills_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json")
    log.info('two\nlines \u2028 "quoted" \x1b[31m \ud800', extra=about(session="x" * 5000))
    log.info("x" * (LINE_CHARS_MAX + 1))
    first, second = lines(capsys)
    assert first["message"] == 'two\nlines \u2028 "quoted" \x1b[31m \ud800'
    assert first["session"] == "x" * FIELD_CHARS_MAX
    assert str(second["message"]).endswith(f"... ({LINE_CHARS_MAX + 1} characters)")


def test_an_exception_is_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    (line,) = lines(capsys)
    assert "ValueError: why" in str(line["exception"])


def test_text_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    log.info("two\nlines", extra=about(session="s"))
    assert capsys.readouterr().err.endswith(" INFO    laminar.test: two\\nlines\n")


def test_a_name_that_is_in_no_glossary_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        about(host="h")
