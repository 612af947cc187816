"""The planner as it was before destinations stood in an order: each source copies, sorts and tries every engine.

The reference of `test_repack`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.repack import (
    EngineView,
    Freed,
    Move,
    Plan,
    RepackConfig,
    SessionLoad,
    _freed,
    _move,
    _told,
    _why_not,
    _why_not_at_all,
    past_peak,
)
from gateway.core.types import Version


@dataclass(slots=True)
class _Bin:
    """What a destination will hold: grows as the plan does. `kv_at`: its KV tokens now and at each horizon."""

    view: EngineView
    tie: float
    kv_at: tuple[int, ...]
    sessions: int = 0

    def fits(self, load: SessionLoad) -> bool:
        limit = self.view.kv_max * self.view.kv_capacity_tokens
        return self.sessions < self.view.batch_max and max(self._with(load)) <= limit

    def add(self, load: SessionLoad) -> None:
        self.kv_at, self.sessions = self._with(load), self.sessions + 1

    def copy(self) -> _Bin:
        return _Bin(self.view, self.tie, self.kv_at, self.sessions)

    def _with(self, load: SessionLoad) -> tuple[int, ...]:
        growth = load.growth or (0,) * (len(self.kv_at) - 1)
        return tuple(kv + load.tokens + more for kv, more in zip(self.kv_at, (0, *growth), strict=True))


def plan_group(group: Sequence[EngineView], version: Version, config: RepackConfig, seed: int) -> Plan:
    tie = random.Random(f"{seed}:{version}")
    reasons = [f"{e.name} stays: {why}" for e in group if (why := past_peak(e))]
    horizons = max((len(s.growth) for e in group for s in e.expected), default=0)
    bins = [_bin(e, tie.random(), horizons) for e in group if not past_peak(e)]
    order = sorted(bins, key=lambda b: (b.view.tokens, b.tie))
    taken = {b.view.name for b in order if b.view.inbound}
    moves, freed = list[Move](), list[Freed]()
    for source in (b.view for b in order):
        if source.name in taken:
            continue  # others come to it
        why_not = _why_not_at_all(source, config)
        routes = [] if why_not else _routes(source, [b for b in order if b.view.name != source.name])
        if not why_not:
            why_not = _why_not(source, routes, config)
        if why_not:
            reasons.append(f"{source.name} stays: {why_not}")
            continue
        for load, destination in routes:
            destination.add(load)
        order = [b for b in order if b.view.name != source.name]
        taken |= {d.view.name for _, d in routes}
        moves += [_move(load, source, d, config) for load, d in routes]
        freed.append(_freed(source, config))
        reasons.append(_told(source, routes))
    reasons += [f"{b.view.name} stays: others come to it" for b in order if b.view.inbound]
    return Plan(version, tuple(moves), tuple(sorted(freed, key=lambda f: f.engine)), tuple(reasons))


def _bin(view: EngineView, tie: float, horizons: int) -> _Bin:
    found = _Bin(view, tie, (0,) * (horizons + 1))
    for load in view.expected:
        found.add(load)
    return found


def _routes(source: EngineView, others: Sequence[_Bin]) -> list[tuple[SessionLoad, _Bin]]:
    """A destination for every session of `source`, or nothing.

    The fullest engine that takes all of it; else the largest session first, each to the fullest that takes it. An
    engine without turns is no destination: it is free already.
    """
    real = {b.view.name: b for b in others}
    fullest = sorted((b.copy() for b in others if b.view.turns or b.view.inbound), key=lambda b: (-b.kv_at[0], b.tie))
    for one in fullest:
        whole = one.copy()
        if all(_take(load, [whole]) is not None for load in source.sessions):
            return [(load, real[one.view.name]) for load in source.sessions]
    routes = []
    for load in sorted(source.sessions, key=lambda s: (-s.tokens, s.key)):
        destination = _take(load, fullest)
        if destination is None:
            return []
        routes.append((load, real[destination.view.name]))
    return routes


def _take(load: SessionLoad, bins: Sequence[_Bin]) -> _Bin | None:
    for one in bins:
        if one.fits(load):
            one.add(load)
            return one
    return None
