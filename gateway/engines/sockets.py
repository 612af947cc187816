"""The sockets of streams in progress, read in batches while they bring hundreds of events a second.

An event loop that reads each socket as soon as it is readable wakes up for every event, with cold processor caches: an
event by itself took 95 us, one in a batch of ten 69. Here one poll reads whatever all sockets have. The next poll comes
when about `EVENTS_WANTED` more events should be there, after `REST_MIN_S` to `REST_MAX_S`. With few streams, or few
events, there is no rest, and each event is read at once. So are responses' heads and first events, which never come
here: they decide what a user waits for.

A poll takes about `SHARE_S` of a round of the event loop. What is left is found by the poll of the next round, and
other callbacks run in between; the kernel then reports the sockets first that were not read.
"""

from __future__ import annotations

import asyncio
import math
import select
import time
from collections.abc import Callable

SHARE_S = 0.001
"""A request needs about ten rounds up to its first byte."""
REST_MIN_S = 0.003
REST_MAX_S = 0.01
"""Between two polls: how much later a token may be shown than it could be."""
EVENTS_WANTED = 8
"""In one poll: with more, an event hardly costs less."""
STREAMS_FEW = 20
"""Fewer streams are each read at once, as they stream token by token (`gateway.core.placing.event_size`)."""
GAP_SHARE = 1 / 8
"""Weight of one poll in the moving average of the gap between events."""
POLLED_MAX = 64
"""Sockets of one poll."""


class Sockets:
    """One for each event loop: `of`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self.loop = loop
        self._clock = clock
        self._epoll = select.epoll()
        self._reads: dict[int, Callable[[], None]] = {}
        self._polled_at = -math.inf
        self._gap_s = REST_MAX_S  # between two events, on average
        self._watched = False  # by the event loop; else a poll is due after a rest, or there is nothing to watch
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
            self.loop.add_reader(self._epoll.fileno(), self._poll)
        elif self._watched and not wanted:
            self.loop.remove_reader(self._epoll.fileno())
        self._watched = wanted

    def _poll(self) -> None:
        now, self._resting = self._clock(), None
        ready = self._epoll.poll(0, POLLED_MAX)
        gap_s = min(REST_MAX_S, (now - self._polled_at) / max(1, len(ready)))
        self._gap_s += GAP_SHARE * (gap_s - self._gap_s)
        self._polled_at = now
        all_read = False
        try:
            all_read = self._read(ready, now + SHARE_S) and len(ready) < POLLED_MAX
        finally:  # whatever one of them raised, the others are polled again
            rests = all_read and len(self._reads) >= STREAMS_FEW and 2 * self._gap_s <= REST_MAX_S
            if rests:
                rest_s = min(REST_MAX_S, max(REST_MIN_S, EVENTS_WANTED * self._gap_s))
                self._resting = self.loop.call_later(max(0.0, now + rest_s - self._clock()), self._poll)
            self._watch(not rests and bool(self._reads))

    def _read(self, ready: list[tuple[int, int]], until: float) -> bool:
        """Returns whether there was time for all of them."""
        for at, (fd, _) in enumerate(ready, 1):
            read = self._reads.get(fd)
            if read is not None:  # else it was removed since the poll
                read()
            if self._clock() >= until:
                return at == len(ready)
        return True


_present: Sockets | None = None


def of(loop: asyncio.AbstractEventLoop) -> Sockets:
    """The one of this event loop: a process has one loop at a time."""
    global _present
    if _present is None or _present.loop is not loop:
        _present = Sockets(loop)
    return _present
