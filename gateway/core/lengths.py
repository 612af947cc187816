"""How long turns become, learnt from those that ended: what a running one will probably still need. Pure.

Invariants:
- memory is bounded by `KEPT` lengths;
- before `SEEN_MIN` turns ended, half of what a turn may still generate is expected;
- what a client `expected` of a turn's length says how many times as long as others it will be, its tail with it; it
  bounds nothing, and a turn that outlived it counts as any other.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT = 2048
"""Ended turns remembered: enough for a p99, few enough to follow a policy whose answers grow."""
SEEN_MIN = 32
DURATIONS_MAX = 128


@dataclass(slots=True)
class TurnLengths:
    """Generated tokens of turns that ended by themselves."""

    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    _sorted: list[int] = field(default_factory=list)
    _total: int = 0
    _sums: list[int] = field(default_factory=list)  # of the sorted ones up to each; made again when they changed

    def ended(self, generated: int) -> None:
        if len(self._recent) == KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
            self._total -= self._recent[0]
        self._total += generated
        self._recent.append(generated)
        bisect.insort(self._sorted, generated)
        self._sums.clear()

    @property
    def known(self) -> bool:
        return len(self._recent) >= SEEN_MIN

    @property
    def mean(self) -> float:
        return self._total / len(self._sorted) if self._sorted else 0.0

    def remaining(self, generated: int, left: int, expected: int | None = None) -> int:
        """Tokens that a turn with `generated` will on average still generate; at least 1, at most `left`."""
        if not self.known and expected is not None and expected > generated:
            return max(1, min(left, expected - generated))
        num, scale = len(self._sorted), self._scale(generated, expected)
        shorter = bisect.bisect_right(self._sorted, generated / scale) if self.known else num
        if shorter == num:
            return max(1, left // 2)
        longer = self._sum_up_to(num) - self._sum_up_to(shorter)
        return max(1, min(left, round(scale * longer / (num - shorter)) - generated))

    def _scale(self, generated: int, expected: int | None) -> float:
        """How many times as long as others a turn will be."""
        if expected is None or generated >= expected or not self._total:
            return 1.0
        return expected / self.mean

    def _sum_up_to(self, count: int) -> int:
        if not self._sums:
            self._sums = list(itertools.accumulate(self._sorted, initial=0))
        return self._sums[count]

    def alive(self, generated: int, further: int, expected: int | None = None) -> float:
        """Probability that a turn with `generated` goes on for more than `further` tokens."""
        return self._alive(generated, (further,), expected)[0]

    def _alive(self, generated: int, ahead: Sequence[int], expected: int | None) -> Sequence[float]:
        if not self.known:
            return [1.0] * len(ahead)
        num, scale = len(self._sorted), self._scale(generated, expected)
        now = num - bisect.bisect_right(self._sorted, generated / scale)
        if not now:
            return [0.5] * len(ahead)
        return [(num - bisect.bisect_right(self._sorted, (generated + further) / scale)) / now for further in ahead]

    def growth(
        self,
        tokens: int,
        generated: int,
        left: int,
        ahead: Sequence[int],
        *,
        frees: bool,
        expected: int | None = None,
    ) -> tuple[int, ...]:
        """KV tokens more (or, below 0, less) that the turn will probably hold after each of so many steps.

        `frees`: its KV goes when it ends (a call without session); else its next turn will want it.
        """
        found = []
        for further, alive in zip(ahead, self._alive(generated, ahead, expected), strict=True):
            grown = min(further, left)
            if frees:
                found.append(round(alive * (tokens + grown)) - tokens)
            else:
                found.append(round(alive * grown + (1 - alive) * grown / 2))
        return tuple(found)


@dataclass(slots=True)
class SessionDurations:
    """Seconds from the first turn of a session to its finish, of recent ones."""

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS_MAX))

    def ended(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def typical_s(self) -> float:
        """The median; 0 before the first session has finished."""
        return statistics.median(self._recent) if self._recent else 0.0
