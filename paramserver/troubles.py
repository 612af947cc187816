"""Errors that cost one task, key, peer, model or version alone: logged once with their cause, and tried again.

Invariants:
- what is contained never ends the loop, watch or thread around it; cancellation passes;
- a trouble is logged when it begins and when its cause changes, not each time that it is met again;
- an error nobody foresaw is logged with its traceback.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator

from protos.errors import LaminarError

TROUBLES_MAX = 1024
"""Troubles remembered at once. One that was forgotten is logged again when it is met again."""


class Troubles:
    """The troubles of one owner (an event loop or a thread), by the name of what they cost."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._causes: OrderedDict[str, str] = OrderedDict()

    @contextlib.contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """Runs the body; an error of it costs `what` alone. `what` is a whole statement: "x is not done"."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever it was: the owner goes on, and the cause is logged)
            self.met(what, error)
        else:
            self.over(what)

    def met(self, what: str, error: Exception) -> None:
        """Logs the trouble unless it is known with this cause."""
        cause = str(error) if isinstance(error, LaminarError) else f"{type(error).__name__}: {error}"
        known = self._causes.get(what)
        self._causes[what] = cause
        self._causes.move_to_end(what)
        while len(self._causes) > TROUBLES_MAX:
            self._causes.popitem(last=False)
        if cause == known:
            return
        if isinstance(error, LaminarError):
            self._log.warning("%s: %s", what, cause)
        else:
            self._log.error("%s: %s", what, cause, exc_info=error)

    def over(self, what: str) -> None:
        """Forgets the trouble, so that it is logged when it comes again."""
        if self._causes.pop(what, None) is not None:
            self._log.info("no longer: %s", what)

    def is_known(self, what: str) -> bool:
        return what in self._causes
