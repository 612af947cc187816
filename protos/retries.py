"""Requests that are sent again: the pauses between their tries, and what no further try mends."""

from __future__ import annotations

import random
import ssl
import time

NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
"""OpenSSL's names, by release, for an answer to the handshake that is none of TLS."""

_jitter = random.Random()  # of pauses only


class Backoff:
    """The pauses of one request. They double from `first_s` to `most_s`, longer by a random part of up to a quarter:
    callers that were turned away together come back apart."""

    def __init__(self, first_s: float, most_s: float, patience_s: float) -> None:
        """`patience_s`: for all tries from the first failure on: a try may have waited for long before."""
        self._pause_s, self._most_s, self._patience_s = first_s, most_s, patience_s
        self._deadline: float | None = None

    def pause_s(self, at_least_s: float = 0.0, *, limited: bool = False) -> float | None:
        """Seconds until the next try, `at_least_s` if the server said so; None: the patience ends before. `limited`:
        the caller limits the time of the whole, so this failure counts for nothing."""
        pause_s = max(self._pause_s, at_least_s) * (1 + 0.25 * _jitter.random())
        self._pause_s = min(2 * self._pause_s, self._most_s)
        if limited:
            self._deadline = None
            return pause_s
        now = time.monotonic()
        self._deadline = now + self._patience_s if self._deadline is None else self._deadline
        return None if now + pause_s > self._deadline else pause_s


def refused_tls(error: BaseException | None) -> ssl.SSLError | None:
    """OpenSSL's error of a handshake that fails every time: a certificate that is refused, or no TLS at all. The
    classes of an HTTP library and of its transport stand before it."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    final = isinstance(error, ssl.SSLCertVerificationError) or (error is not None and error.reason in NO_TLS)
    return error if final else None
