"""When a client that was refused for lack of capacity should retry: from how fast places come free. Pure.

Two things make a place: a turn that leaves an engine, and a trainer that takes a batch (the staleness bound). Each has
a pace of its own, measured over its last events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

EVENTS_MAX = 64
"""Events from which a pace is read: enough to smooth bursts, few enough to follow a change."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 120.0
"""SDKs obey at most a minute or two, and ignore a longer Retry-After."""
UNKNOWN_S = 5.0
"""Before anything was measured."""


@dataclass(slots=True)
class Pace:
    """When something happened, lately; clock readings in seconds."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))

    def happened(self, now: float) -> None:
        self.times.append(now)

    def interval_s(self, now: float) -> float | None:
        """Mean time between events, counting the time since the last one if it is longer; None before the second."""
        if len(self.times) < 2:
            return None
        mean = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        return max(mean, (now - self.times[0]) / len(self.times))


def retry_for_a_place(ahead: int, pace: Pace, now: float) -> float:
    """Until the `ahead` turns that wait, and then this one, have got a place."""
    interval_s = pace.interval_s(now)
    return UNKNOWN_S if interval_s is None else _bounded((ahead + 1) * interval_s)


def retry_for_a_batch(pace: Pace, now: float) -> float:
    """Until the trainer takes its next batch."""
    interval_s = pace.interval_s(now)
    if interval_s is None:
        return UNKNOWN_S
    return _bounded(interval_s - (now - pace.times[-1]))


def _bounded(seconds: float) -> float:
    return min(RETRY_MAX_S, max(RETRY_MIN_S, seconds))
