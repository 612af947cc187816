"""The end of a trainer's process by SIGTERM: what it holds at the gateway is given back first."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

SIGTERM_PATIENCE_S = 20.0
"""How long the process outlives a SIGTERM; schedulers kill after 30 s. A second SIGTERM ends it at once."""


_stops: set[Callable[[], None]] = set()


def at_sigterm(stop: Callable[[], None]) -> None:
    """Has `stop` called in a thread when SIGTERM comes; the process then ends by that signal, as it would have.

    Does nothing off the main thread, and where the program handles SIGTERM itself: it calls `stop` then.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
    _stops.add(stop)


def forget(stop: Callable[[], None]) -> None:
    """It was called meanwhile."""
    _stops.discard(stop)


def _terminated(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    # Not here: the main thread may hold a lock that a stop needs.
    threading.Thread(target=_end, name="laminar-sigterm", daemon=True).start()


def _end() -> None:
    deadline = time.monotonic() + SIGTERM_PATIENCE_S
    stopping = [threading.Thread(target=stop, name="laminar-stop", daemon=True) for stop in list(_stops)]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in stopping):
        log.warning("what this trainer holds at the gateway was not given back within %g s", SIGTERM_PATIENCE_S)
    os.kill(os.getpid(), signal.SIGTERM)
