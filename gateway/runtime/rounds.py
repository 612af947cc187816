"""A share of each round of the event loop for work that comes in crowds, so that everything else gets its turn.

Engines that began hundreds of turns together send their events together. Handled at once they held the loop for 100 ms,
and a request that arrived meanwhile waited so long at each of the steps up to its first byte. Here events share
`SHARE_S` of a round; the rest waits for the next round, in order of arrival. Events that one stream brings meanwhile
are handed over together, so a gateway that lags behind works less per token.

Clients' requests that arrive together begin in several rounds, too, one in each: a share of 0. That spreads all later
steps: each follows its first step by as many rounds as those of other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SHARE_S = 0.001
"""A request needs about ten rounds up to its first byte."""


class Rounds:
    """For engines' events there is one for each event loop: `of`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.perf_counter,
        *,
        share_s: float | None = None,
    ) -> None:
        """`share_s`: of a round, SHARE_S unless it is given; with 0 one begins in each."""
        self.loop = loop
        self._clock = clock
        self._share_s = SHARE_S if share_s is None else share_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = False  # something was taken in this round: `_next` is called in the next one
        self._until = 0.0  # the end of this round's share

    def take(self, hand_over: Callable[[], None]) -> bool:
        """True: the caller may hand over now. False: `hand_over` is called in a later round."""
        if not self._begun:
            self._begun = True
            self._until = self._clock() + self._share_s
            self.loop.call_soon(self._next)
            return True
        if not self._waiting and self._clock() < self._until:
            return True
        self._waiting.append(hand_over)
        return False

    def _next(self) -> None:
        """A new round."""
        waiting = self._waiting
        self._begun = bool(waiting)
        if not waiting:
            return
        self._until = self._clock() + self._share_s
        self.loop.call_soon(self._next)
        while waiting:
            waiting.popleft()()
            if self._clock() >= self._until:
                return


_present: Rounds | None = None


def of(loop: asyncio.AbstractEventLoop) -> Rounds:
    """The one of this event loop: a process has one loop at a time."""
    global _present
    if _present is None or _present.loop is not loop:
        _present = Rounds(loop)
    return _present
