"""How long turns become, learnt from those that ended: what running ones will probably still need. Pure.

Estimates are made for many turns at once: arguments are arrays of one length, or numbers that hold for all.

Invariants:
- memory is bounded by `KEPT` lengths;
- before `SEEN_MIN` turns ended, half of what a turn may still generate is expected;
- what a client `expected` of a turn's length says how many times as long as others it will be, its tail with it; it
  bounds nothing, and a turn that outlived it counts as any other.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

KEPT = 2048
"""Ended turns remembered: enough for a p99, few enough to follow a policy whose answers grow."""
SEEN_MIN = 32
DURATIONS_MAX = 128

Tokens = npt.NDArray[np.int64] | int
"""Of each turn, or of every one."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class TurnLengths:
    """Generated tokens of turns that ended by themselves. `expected` is 0 where a client named no length."""

    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    _total: int = 0
    _longer: tuple[Ints, Ints] | None = None  # `_longer_than`, until another turn ends

    def ended(self, generated: int) -> None:
        if len(self._recent) == KEPT:
            self._total -= self._recent[0]
        self._total += generated
        self._recent.append(generated)
        self._longer = None

    @property
    def known(self) -> bool:
        return len(self._recent) >= SEEN_MIN

    @property
    def mean(self) -> float:
        return self._total / len(self._recent) if self._recent else 0.0

    def remaining(self, generated: Tokens, left: Tokens, expected: Tokens = 0) -> Ints:
        """Tokens that a turn with `generated` will on average still generate; at least 1, at most `left`."""
        half = np.maximum(1, np.asarray(left) // 2)
        if not self.known:
            ahead = np.clip(np.subtract(expected, generated), 1, np.maximum(1, left))
            return np.asarray(np.where(np.greater(expected, generated), ahead, half))
        scale = self._scale(generated, expected)
        nums, sums = self._longer_than()
        at = _index(generated / scale, nums)
        num, tokens = nums[at], sums[at]
        mean = np.rint(scale * tokens / np.maximum(num, 1))  # of those that became longer
        ahead = np.maximum(1, np.minimum(left, mean - generated)).astype(np.int64)
        return np.where(num > 0, ahead, half)

    def alive(self, generated: Tokens, further: Tokens, expected: Tokens = 0) -> Floats:
        """Probability that a turn with `generated` goes on for more than `further` tokens."""
        if not self.known:
            return np.ones(np.broadcast(generated, further).shape)
        scale = self._scale(generated, expected)
        nums, _ = self._longer_than()
        now, later = nums[_index(generated / scale, nums)], nums[_index(np.add(generated, further) / scale, nums)]
        return np.where(now > 0, later / np.maximum(now, 1), 0.5)

    def growth(
        self,
        tokens: Tokens,
        generated: Tokens,
        left: Tokens,
        further: Tokens,
        *,
        frees: npt.NDArray[np.bool_] | bool,
        expected: Tokens = 0,
    ) -> Ints:
        """KV tokens more (or, below 0, less) that a turn will probably hold after `further` steps.

        `frees`: its KV goes when it ends (a call without session); else its next turn will want it.
        """
        alive, grown = self.alive(generated, further, expected), np.minimum(further, left)
        kept = np.rint(alive * grown + (1 - alive) * grown / 2)
        if not np.any(frees):
            return kept.astype(np.int64)
        return np.where(frees, np.rint(alive * np.add(tokens, grown)) - tokens, kept).astype(np.int64)

    def _longer_than(self) -> tuple[Ints, Ints]:
        """By whole tokens, from 0 to the longest: how many of the remembered turns became longer, and how long they are
        together. Searching the sorted lengths took ten times as long."""
        if self._longer is None:
            nums = np.bincount(np.fromiter(self._recent, np.int64, len(self._recent)))
            sums = nums * np.arange(len(nums))
            self._longer = len(self._recent) - np.cumsum(nums), self._total - np.cumsum(sums)
        return self._longer

    def _scale(self, generated: Tokens, expected: Tokens) -> Floats | float:
        """How many times as long as others a turn will be."""
        outlived = np.greater_equal(generated, expected)
        if not self._total or outlived.all():
            return 1.0
        return np.where(outlived, 1.0, expected / self.mean)


def _index(tokens: Floats | float, table: Ints) -> Ints:
    return np.minimum(tokens, len(table) - 1).astype(np.int64)


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
