"""How a test names the end of a TLS connection, whichever release of Python met it."""

from __future__ import annotations

import ssl

import pytest

from tests.support.tls_endings import ending


def met(kind: type[ssl.SSLError], reason: str) -> ssl.SSLError:
    error = kind(1, f"[SSL: {reason}] met")
    error.reason = reason
    return error


@pytest.mark.parametrize("kind", [ssl.SSLError, ssl.SSLEOFError], ids=lambda kind: kind.__name__)
def test_an_end_without_an_alert_is_one_whatever_class_it_has(kind: type[ssl.SSLError]) -> None:
    assert ending(met(kind, "UNEXPECTED_EOF_WHILE_READING")) == "eof"


def test_an_alert_is_named_and_a_reset_is_one() -> None:
    assert ending(met(ssl.SSLError, "TLSV13_ALERT_CERTIFICATE_REQUIRED")) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert ending(BrokenPipeError()) == "reset"
