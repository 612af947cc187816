"""A share of each round of the event loop for engines' events, so that everything else gets its turn.

Engines that began hundreds of turns together send their events together. Handled at once they held the loop for 100 ms,
and a request that arrived meanwhile waited so long at each of the steps up to its first byte. Here events share
`SHARE_S` of a round; the rest waits for the next round, in order of arrival. Events that one stream brings meanwhile
are handed over together, so a gateway that lags behind works less per token.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

SHARE_S = 0.001
"""A request needs about ten rounds up to its first byte."""
QUIET_S = 0.01
"""After so long without an event the loop has gone round by itself: no callback has to notice the next round."""


class Rounds:
    """One for each event loop: `of`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self.loop = loop
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._until = -math.inf  # the end of the share of the round that was last seen to begin

    def take(self, hand_over: Callable[[], None]) -> bool:
        """True: the caller may hand over now. False: `hand_over` is called in a later round."""
        waiting = self._waiting
        if not waiting:
            now = self._clock()
            if now < self._until:
                return True
            if now > self._until + QUIET_S:
                self._until = now + SHARE_S
                return True
            self.loop.call_soon(self._next)
        waiting.append(hand_over)
        return False

    def _next(self) -> None:
        """A new round."""
        waiting = self._waiting
        self._until = self._clock() + SHARE_S
        try:
            while waiting:
                waiting.popleft()()
                if self._clock() >= self._until:
                    return
        finally:
            if waiting:
                self.loop.call_soon(self._next)


_present: Rounds | None = None


def of(loop: asyncio.AbstractEventLoop) -> Rounds:
    """The one of this event loop: a process has one loop at a time."""
    global _present
    if _present is None or _present.loop is not loop:
        _present = Rounds(loop)
    return _present
