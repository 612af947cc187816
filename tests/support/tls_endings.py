"""How a connection by TLS ended, in a word: what a test's client met is compared with what it may meet."""

from __future__ import annotations

import ssl


def ending(error: ssl.SSLError | ConnectionError) -> str:
    """The alert or the reason; "eof" without an alert, "reset" for any other end of the connection.

    Whether a peer that goes away is met while reading or while writing is chance, and OpenSSL has a text for each.
    Python 3.11.2 has no class of its own for an end that is met while reading."""
    if isinstance(error, ConnectionError):
        return "reset"
    if isinstance(error, ssl.SSLEOFError) or error.reason == "UNEXPECTED_EOF_WHILE_READING":
        return "eof"
    return error.reason or str(error)
