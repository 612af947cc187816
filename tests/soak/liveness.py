"""What has to go on for as long as a soak has load: a fault may hold it up for a while, and not for good. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STALL_S = 240.0
"""Faults last 20 s at most; a start after one, or a lease's end, may take a minute on a machine with other work."""


@dataclass
class Liveness:
    """`now` is in seconds of any one clock."""

    _moved_at: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _stalled: set[str] = field(default_factory=set)

    def look(self, counts: Mapping[str, int], serving: Mapping[str, bool], now: float) -> list[str]:
        """What has stood still for `STALL_S`, in words, once for each time that it does. `counts`: what is to grow, by
        what it counts; `serving`: whether a process does, by its name."""
        moved = {f"no {name}": count != self._counts.get(name) for name, count in counts.items()}
        moved |= {f"{name} does not serve": serves for name, serves in serving.items()}
        self._counts = dict(counts)
        found = []
        for what, moves in moved.items():
            since = self._moved_at.setdefault(what, now)
            if moves:
                self._moved_at[what] = now
                self._stalled.discard(what)
            elif now - since >= STALL_S and what not in self._stalled:
                self._stalled.add(what)
                found.append(f"{what} for {now - since:.0f} s")
        return found
