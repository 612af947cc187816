"""Logs of what fails again and again: each failure once with its cause, and few lines of what strangers can cause.

Invariants:
- a failure is logged when it begins and when its cause changes, not with every retry;
- an unexpected error is logged with its traceback.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from protos.errors import LaminarError

FAILURES_MAX = 1024
"""Failures remembered at once. One that was forgotten is logged again when it happens again."""


class FailureLog:
    """The failures of one owner (an event loop or a thread), by the name of what they cost."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._causes: OrderedDict[str, str] = OrderedDict()

    @contextlib.contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Runs the body; an error of it costs `what` alone. `what` is a whole statement: "x is not done"."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever it was: the owner goes on, and the cause is logged)
            self.failed(what, error)
        else:
            self.recovered(what)

    def failed(self, what: str, error: Exception) -> None:
        """Logs the failure, unless it was logged with this cause."""
        cause = str(error) if isinstance(error, LaminarError) else f"{type(error).__name__}: {error}"
        known = self._causes.get(what)
        self._causes[what] = cause
        self._causes.move_to_end(what)
        while len(self._causes) > FAILURES_MAX:
            self._causes.popitem(last=False)
        if cause == known:
            return
        if isinstance(error, LaminarError):
            self._log.warning("%s: %s", what, cause)
        else:
            self._log.error("%s: %s", what, cause, exc_info=error)

    def recovered(self, what: str) -> None:
        """Forgets the failure, so that the next one is logged."""
        if self._causes.pop(what, None) is not None:
            self._log.info("no longer: %s", what)

    def is_failing(self, what: str) -> bool:
        return what in self._causes


class RareLines:
    """Log lines that strangers can cause: at most `lines_max` in `PERIOD_S`, and the next one says how many were left
    out. Any thread may call it."""

    PERIOD_S = 10.0

    def __init__(self, log: logging.Logger, lines_max: int) -> None:
        self._log, self._lines_max = log, lines_max
        self._mutex = threading.Lock()
        self._began_s = -self.PERIOD_S
        self._lines = self._left_out = 0

    def say(self, level: int, line: str) -> None:
        with self._mutex:
            now = time.monotonic()
            if now - self._began_s >= self.PERIOD_S:
                self._began_s, self._lines = now, 0
            if self._lines >= self._lines_max:
                self._left_out += 1
                return
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
        self._log.log(level, "%s%s", line, f" ({left_out} such lines were left out before it)" if left_out else "")
