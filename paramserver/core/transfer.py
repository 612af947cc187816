"""Progress of one version into one place: which chunk to request next, and from which byte.

Invariants:
- a chunk is wanted, in flight on exactly one stripe, or done; it is done only with its digest verified;
- what a broken stripe had received of a chunk is kept: the next request for it starts at that byte;
- a chunk whose digest did not match starts again at byte 0.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from paramserver.core.records import ChunkMap


@dataclass(frozen=True, slots=True)
class Want:
    """One data request: chunk number, the first byte wanted; `suspect`: the sender checks its own bytes first."""

    index: int
    from_byte: int
    suspect: bool = False


SPANS_MAX = 64
"""Spans kept apart: more than one chunk of the slowest stripe takes while the others bring theirs."""


class ActiveTime:
    """How long at least one of several stripes was active. Their spans of time overlap where they run side by side."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque()  # apart from each other, ascending
        self._before_s = 0.0  # of spans no longer kept
        self._before = -math.inf  # when the last of those ended

    @property
    def seconds(self) -> float:
        return self._before_s + sum(ended - began for began, ended in self._spans)

    def add(self, began: float, ended: float) -> None:
        """A stripe's span, which ended after all that were added before it."""
        began = max(began, self._before)
        while self._spans and self._spans[-1][1] >= began:
            began = min(began, self._spans.pop()[0])
        self._spans.append((began, ended))
        if len(self._spans) > SPANS_MAX:
            first, self._before = self._spans.popleft()
            self._before_s += self._before - first


class TransferState:
    """Owned by one transfer, called under its lock."""

    def __init__(self, chunks: ChunkMap, done: Iterable[int] = ()) -> None:
        self.chunks = chunks
        self._done = bytearray(chunks.num_chunks)
        self._again: list[int] = []
        self._next = 0
        self._in_flight: dict[int, str] = {}
        self._received: dict[int, int] = {}
        self._suspect: set[int] = set()
        self.num_done = 0
        self.bytes_done = 0
        for index in done:
            self._finish(index)

    @property
    def complete(self) -> bool:
        return self.num_done == self.chunks.num_chunks

    @property
    def bytes_here(self) -> int:
        """Bytes in place, those not yet verified included."""
        return self.bytes_done + sum(self._received.values())

    def take(self, stripe: str) -> Want | None:
        """The next wanted chunk for `stripe`; None when nothing is left to request."""
        index = self._pop()
        if index is None:
            return None
        self._in_flight[index] = stripe
        return Want(index, self._received.get(index, 0), index in self._suspect)

    def _pop(self) -> int | None:
        if self._again:
            return heapq.heappop(self._again)
        while self._next < self.chunks.num_chunks:
            self._next += 1
            if not self._done[self._next - 1]:
                return self._next - 1
        return None

    def received(self, index: int, upto_byte: int) -> None:
        """Bytes [0, upto_byte) of an in-flight chunk lie in place, not yet verified."""
        assert index in self._in_flight
        self._received[index] = upto_byte

    def verified(self, index: int) -> None:
        del self._in_flight[index]
        self._received.pop(index, None)
        self._suspect.discard(index)
        self._finish(index)

    def recheck(self, index: int) -> Want | None:
        """The digest was wrong: the same sender gets one more request, to check its own bytes; None if it had that."""
        if index in self._suspect:
            return None
        self._suspect.add(index)
        self._received.pop(index, None)
        return Want(index, 0, suspect=True)

    def mismatched(self, index: int) -> None:
        """The digest was wrong again: the chunk is wanted from its start, and the next sender checks its own bytes."""
        del self._in_flight[index]
        self._received.pop(index, None)
        self._suspect.add(index)
        heapq.heappush(self._again, index)

    def broken(self, stripe: str) -> tuple[Want, ...]:
        """The stripe's connection is gone: what it had requested is wanted again, from the byte that it had reached."""
        mine = sorted(index for index, owner in self._in_flight.items() if owner == stripe)
        for index in mine:
            del self._in_flight[index]
            heapq.heappush(self._again, index)
        return tuple(Want(index, self._received.get(index, 0)) for index in mine)

    def _finish(self, index: int) -> None:
        assert not self._done[index]
        self._done[index] = 1
        self.num_done += 1
        self.bytes_done += self.chunks.chunk(index).length
