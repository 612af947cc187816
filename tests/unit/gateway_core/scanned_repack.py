"""The planner as it was before destinations stood in an order: each source copies, sorts and tries every engine.

The reference of `test_repack`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gateway.core.packing.engine_views import EngineView, SessionLoad
from gateway.core.packing.plans import Freed, Move, RepackConfig
from gateway.core.packing.repack import past_peak
from gateway.core.types import Version


class Reference(NamedTuple):
    version: Version
    moves: tuple[Move, ...]
    freed: tuple[Freed, ...]
    reasons: tuple[str, ...]


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
        return tuple(kv + more for kv, more in zip(self.kv_at, load.kv_at, strict=True))


def plan_group(group: Sequence[EngineView], version: Version, config: RepackConfig, seed: int) -> Reference:
    tie = random.Random(f"{seed}:{version}")
    reasons = [f"{e.name} stays: {why}" for e in group if (why := past_peak(e))]
    times = max((len(s.kv_at) for e in group for s in (*e.list_sessions(), *e.inbound)), default=1)
    bins = [_bin(e, tie.random(), times) for e in group if not past_peak(e)]
    order = sorted(bins, key=lambda b: (b.view.weight.tokens, b.tie))
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
        reasons.append(_told(source, routes))
        freed.append(msgspec.structs.replace(_freed(source, config), reason=reasons[-1]))
    reasons += [f"{b.view.name} stays: others come to it" for b in order if b.view.inbound]
    return Reference(version, tuple(moves), tuple(sorted(freed, key=lambda f: f.engine)), tuple(reasons))


def _bin(view: EngineView, tie: float, times: int) -> _Bin:
    found = _Bin(view, tie, (0,) * times)
    for load in (*view.list_sessions(), *view.inbound):
        found.add(load)
    return found


def _routes(source: EngineView, others: Sequence[_Bin]) -> list[tuple[SessionLoad, _Bin]]:
    """A destination for every session of `source`, or nothing.

    The fullest engine that takes all of it; else the largest session first, each to the fullest that takes it. An
    engine without turns is no destination: it is free already.
    """
    real = {b.view.name: b for b in others}
    fullest = sorted((b.copy() for b in others if _turns(b.view) or b.view.inbound), key=lambda b: (-b.kv_at[0], b.tie))
    for one in fullest:
        whole = one.copy()
        if all(_take(load, [whole]) is not None for load in source.list_sessions()):
            return [(load, real[one.view.name]) for load in source.list_sessions()]
    routes = []
    for load in sorted(source.list_sessions(), key=lambda s: (-s.tokens, s.key)):
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


def _turns(view: EngineView) -> list[SessionLoad]:
    return [s for s in view.list_sessions() if s.turn_id is not None]


def _why_not_at_all(source: EngineView, config: RepackConfig) -> str:
    if not _turns(source):
        return "it is empty already"
    staying = [s for s in source.list_sessions() if s.stays]
    if staying:
        return f"{len(staying)} of its turns have to end where they began"
    tired = [s for s in source.list_sessions() if s.moves >= config.moves_max]
    return f"{len(tired)} of its sessions have moved {config.moves_max} times" if tired else ""


def _why_not(source: EngineView, routes: Sequence[object], config: RepackConfig) -> str:
    if not routes:
        return "the engines of its version have no room for all of it"
    found = _freed(source, config)
    if found.gain_s <= found.price_s:
        return f"prefilling again costs {found.price_s:.2f} s and frees only {found.gain_s:.2f} s"
    return ""


def _freed(source: EngineView, config: RepackConfig) -> Freed:
    busy = len(_turns(source)) / source.batch_max
    drain_s = max(s.remaining_s for s in source.list_sessions())
    tokens = sum(s.tokens for s in source.list_sessions())
    return Freed(source.name, tokens / config.prefill_tokens_per_s, drain_s * (1 - busy), busy)


def _move(load: SessionLoad, source: EngineView, to: _Bin, config: RepackConfig) -> Move:
    price_s = load.tokens / config.prefill_tokens_per_s
    return Move(load.turn_id, load.session_id, source.name, to.view.name, load.tokens, price_s)


def _told(source: EngineView, routes: Sequence[tuple[SessionLoad, _Bin]]) -> str:
    where = " and ".join(sorted({d.view.name for _, d in routes}))
    tokens = sum(s.tokens for s in source.list_sessions())
    return f"{source.name} goes to {where}: {len(_turns(source))} turns, {tokens} tokens to prefill again"
