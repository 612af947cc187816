"""Growth of processes: what the kernel says of each, every few seconds, and the slope over the last half of a run.

Invariants:
- a slope is within lives: a process that was started again begins at a level of its own, and a life's first minutes
  do not count;
- growth is that slope over the longest life that was seen in the last half: nothing is extrapolated, and what is
  killed every few minutes says no more than its lives show.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_S = 180.0
"""In which a process loads and imports, and fills its pools, caches and allocators."""
LEVELS = 12
"""Of a life, evenly spaced: they show whether a growth was a step, a slope or a store that fills."""
POINTS_MIN = 12
"""Samples of a kind of process, below which a slope says nothing."""
MIB = float(1 << 20)
FIGURES = ("rss_mb", "fds", "shm_mb")


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one process. `rss_mb` is without shared memory, which is `shm_mb`."""

    at_s: float
    life_s: float
    rss_mb: float
    fds: float
    shm_mb: float


def sample(pid: int, at_s: float, life_s: float) -> Sample | None:
    """None for a process that is not there any more."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fds = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    memory = {
        key: float(value.split()[0]) / 1024
        for key, _, value in (line.partition(":") for line in lines)
        if key.startswith("Rss")
    }
    if not memory:  # a zombie
        return None
    return Sample(at_s, life_s, memory["RssAnon"] + memory["RssFile"], fds, memory["RssShmem"])


@dataclass
class Growth:
    """The samples of a run, by kind of process and by life (a name and a pid)."""

    _of: dict[str, dict[tuple[str, int], list[Sample]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, kind: str, name: str, pid: int, found: Sample | None) -> None:
        if found is not None:
            self._of[kind][name, pid].append(found)

    def forget_before(self, at_s: float) -> None:
        """What no later last half will have."""
        for lives in self._of.values():
            for life in list(lives):
                lives[life] = [found for found in lives[life] if found.at_s >= at_s]
                if not lives[life]:
                    del lives[life]

    def figures(self, now_s: float) -> dict[str, dict[str, float | None]]:
        """By kind of process and figure: the growth in the last half."""
        half_s = now_s / 2
        return {
            kind: {name: _growth(lives, name, half_s) for name in FIGURES} for kind, lives in sorted(self._of.items())
        }

    def longest_lives(self, now_s: float) -> dict[str, dict[str, Any]]:
        """By kind of process, the longest life of the last half: whose, its minutes, and levels of each figure."""
        found = {}
        for kind, lives in sorted(self._of.items()):
            (name, _), life = max(lives.items(), key=lambda item: len(_counted(item[1], now_s / 2)))
            if len(counted := _counted(life, now_s / 2)) >= 2:
                at = [counted[round(n * (len(counted) - 1) / (LEVELS - 1))] for n in range(LEVELS)]
                levels = {figure: [round(getattr(one, figure), 2) for one in at] for figure in FIGURES}
                minutes = round((counted[-1].at_s - counted[0].at_s) / 60, 1)
                found[kind] = {"process": name, "minutes": minutes, **levels}
        return found


def _counted(life: Iterable[Sample], half_s: float) -> list[Sample]:
    return [found for found in life if found.at_s >= half_s and found.life_s >= WARM_UP_S]


def _growth(lives: Mapping[tuple[str, int], list[Sample]], name: str, half_s: float) -> float | None:
    series = [[(at.at_s, float(getattr(at, name))) for at in _counted(life, half_s)] for life in lives.values()]
    slope = slope_within(series)
    longest_s = max((points[-1][0] - points[0][0] for points in series if points), default=0.0)
    return None if slope is None else round(slope * longest_s, 3)


def slope_within(series: Iterable[list[tuple[float, float]]]) -> float | None:
    """The slope of the least squares over all series, each with a level of its own; None for too few points."""
    above = below = 0.0
    num_points = 0
    for points in series:
        if len(points) < 2:
            continue
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        above += sum((x - mean_x) * (y - mean_y) for x, y in points)
        below += sum((x - mean_x) ** 2 for x, _ in points)
        num_points += len(points)
    return above / below if num_points >= POINTS_MIN and below > 0 else None


def largest(figures: Mapping[str, Mapping[str, float | None]], name: str) -> float | None:
    """Of all kinds of processes."""
    with contextlib.suppress(ValueError):
        return max(found for of in figures.values() if (found := of[name]) is not None)
    return None
