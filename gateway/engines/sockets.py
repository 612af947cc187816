"""The sockets of streams under way, read in batches while they bring hundreds of events a second.

An event loop that reads each socket as soon as something is there wakes up for every event, and finds nothing of what
the event before it had left in the processor's caches: an event by itself took 95 us where one of ten took 69. Here one
look reads what all sockets have; while looks find something for two, the next one comes `REST_S` later. With fewer
events there is no rest, and each is read at once. So are answers' heads and first events, which are not read here.

- a look takes about `SHARE_S` of a round of the event loop; what is over is found by the next round's look, and others
  have their turn in between. The kernel gives out what was not looked at first.
"""

from __future__ import annotations

import asyncio
import math
import select
import time
from collections.abc import Callable

SHARE_S = 0.001
"""A request needs some ten rounds up to its first byte."""
REST_S = 0.003
"""From look to look: how much later than at once a token may be shown."""
LOOKED_MAX = 64
"""Sockets of one look."""


class Sockets:
    """One for each event loop: `of`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self.loop = loop
        self._clock = clock
        self._epoll = select.epoll()
        self._reads: dict[int, Callable[[], None]] = {}
        self._looked_at = -math.inf
        self._watched = False  # by the event loop; else a look is due after a rest, or there is nothing to watch
        self._resting: asyncio.TimerHandle | None = None

    def add(self, fd: int, read: Callable[[], None]) -> None:
        """`read` is called whenever there is something to read, or the socket's end."""
        self._epoll.register(fd, select.EPOLLIN)
        self._reads[fd] = read
        if self._resting is None:
            self._watch(True)

    def remove(self, fd: int) -> None:
        del self._reads[fd]
        self._epoll.unregister(fd)

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self.loop.add_reader(self._epoll.fileno(), self._look)
        elif self._watched and not wanted:
            self.loop.remove_reader(self._epoll.fileno())
        self._watched = wanted

    def _look(self) -> None:
        now = self._clock()
        rested, self._resting = self._resting is not None, None
        ready = self._epoll.poll(0, LOOKED_MAX)
        worth_resting = len(ready) > 1 if rested else now - self._looked_at < REST_S
        self._looked_at = now
        all_read = False
        try:
            all_read = self._read([fd for fd, _ in ready], now + SHARE_S) and len(ready) < LOOKED_MAX
        finally:  # whatever one of them raised, the others are looked at again
            rests = worth_resting and all_read and bool(ready)
            if rests:
                self._resting = self.loop.call_later(max(0.0, now + REST_S - self._clock()), self._look)
            self._watch(not rests and bool(self._reads))

    def _read(self, ready: list[int], until: float) -> bool:
        """Whether there was time for all of them."""
        for at, fd in enumerate(ready, 1):
            read = self._reads.get(fd)
            if read is not None:  # else it was given up since the look
                read()
            if self._clock() >= until:
                return at == len(ready)
        return True


_present: Sockets | None = None


def of(loop: asyncio.AbstractEventLoop) -> Sockets:
    """A process has one loop at a time."""
    global _present
    if _present is None or _present.loop is not loop:
        _present = Sockets(loop)
    return _present
