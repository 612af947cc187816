"""What the last sampled trajectories were like: lengths, rewards, and how long they waited for a trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from gateway.core.selection import Entry
from gateway.core.spread import Spread, spread_of

SAMPLED_MAX = 4096
"""Trajectories that the statistics cover: the last so many."""


class SampledStatistics(msgspec.Struct, frozen=True):
    """Of the last sampled trajectories (sessions). `waited_s`: from the finish to the sample."""

    tokens: Spread
    sampled_tokens: Spread
    reward: Spread
    waited_s: Spread


class SampledRecord:
    """Owner of what was sampled last."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, int, float, float]] = deque(maxlen=SAMPLED_MAX)

    def took(self, entries: Iterable[Entry], now_unix_s: float) -> None:
        for entry in entries:
            facts = entry.facts
            waited_s = max(0.0, now_unix_s - facts.finished_unix_s)
            self._last.append((facts.num_tokens, facts.num_sampled, facts.reward, waited_s))

    def statistics(self) -> SampledStatistics:
        columns = list(zip(*self._last, strict=True)) or [(), (), (), ()]
        return SampledStatistics(*(spread_of(column) for column in columns))
