"""How long engines' events may hold the event loop in one round of it, so that everything else gets its turn.

Engines that began hundreds of turns together send their events together: taken all at once they held the loop for
100 ms, and a request that came meanwhile waits so long at each of the steps up to its first byte. Here they share
`SHARE_S` of a round; what is over waits for the next one, in the order in which it came. Events of one stream that
come meanwhile are handed over together, so that a gateway that lags behind works less per token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SHARE_S = 0.001
"""A request needs some ten rounds up to its first byte."""


class Rounds:
    """One for each event loop: `of`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self.loop = loop
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._until = 0.0
        self._begun = False

    def take(self, hand_over: Callable[[], None]) -> bool:
        """Whether the caller may do it now; else it is called in a later round."""
        if not self._begun:
            self._begin()
            return True
        if not self._waiting and self._clock() < self._until:
            return True
        self._waiting.append(hand_over)
        return False

    def _begin(self) -> None:
        self._begun = True
        self._until = self._clock() + SHARE_S
        self.loop.call_soon(self._next)

    def _next(self) -> None:
        """A new round."""
        self._begun = False
        waiting = self._waiting
        if not waiting:
            return
        self._begin()
        while waiting:
            waiting.popleft()()
            if self._clock() >= self._until:
                return


_present: Rounds | None = None


def of(loop: asyncio.AbstractEventLoop) -> Rounds:
    """A process has one loop at a time."""
    global _present
    if _present is None or _present.loop is not loop:
        _present = Rounds(loop)
    return _present
