"""Repack: which sessions move where, so that whole engines become free for a newer version. Pure.

After the Laminar paper's Algorithm 1 (best fit within groups of one weight version), with what its listing misses:
a chosen destination never becomes a source in the same plan, planned inbound load counts, what does not fit one
destination whole may be spread over several, and every move has a price.

Invariants of a plan:
- source and destination serve the same version;
- no destination exceeds C_max at any horizon, or B: counting its turns, tool-waiting sessions, what is on its way from
  earlier plans, what this plan sends, and the growth expected of all turns;
- no engine is both source and destination; every session of a source moves, or none does;
- no session moves more often than `moves_max`.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.core.fleet import TurnLoad
from gateway.core.lengths import TurnLengths
from gateway.core.types import EngineName, SessionId, TurnId, Version

HORIZONS = (0.25, 0.5, 1.0, 2.0)
"""Times at which a plan has to fit, in typical turns' lengths."""


@dataclass(frozen=True, slots=True)
class RepackConfig:
    moves_max: int = 4  # of one session in its life
    prefill_tokens_per_s: float = 1000.0  # price of moving: every token of a moved session is computed again


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """What a turn, or (`turn_id` None) a session that waits for a tool, weighs on its engine."""

    session_id: SessionId
    turn_id: TurnId | None
    tokens: int
    growth: tuple[int, ...] = ()  # KV tokens more (or less) at each horizon; one length for all
    remaining_s: float = 0.0  # how long it will probably still hold its engine
    moves: int = 0
    stays: bool = False  # it has to end where it began

    @property
    def key(self) -> str:
        """Tells it from others: a session may run several turns at once."""
        return self.turn_id or self.session_id

    def kv_at(self, horizons: int) -> tuple[int, ...]:
        """Its KV tokens now and at each of so many horizons."""
        if not self.growth:
            return (self.tokens,) * (horizons + 1)
        return (self.tokens, *[self.tokens + more for more in self.growth])


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as the planner sees it. `batch_max` is B and `kv_max` C_max, as learnt."""

    name: EngineName
    version: Version
    kv_capacity_tokens: int
    batch_max: int
    kv_max: float
    intake_open: bool
    queued: int
    sessions: tuple[SessionLoad, ...]  # running or waiting for a tool
    inbound: tuple[SessionLoad, ...] = ()  # planned onto it, not there yet
    leaving: bool = False  # an earlier plan is emptying it

    @property
    def turns(self) -> list[SessionLoad]:
        return [s for s in self.sessions if s.turn_id is not None]

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.sessions)

    @property
    def expected(self) -> list[SessionLoad]:
        return [*self.sessions, *self.inbound]


@dataclass(frozen=True, slots=True)
class Move:
    turn_id: TurnId | None
    session_id: SessionId
    source: EngineName
    destination: EngineName
    tokens: int  # to prefill again, for a waiting session when it comes back
    price_s: float

    @property
    def key(self) -> str:
        return self.turn_id or self.session_id


@dataclass(frozen=True, slots=True)
class Freed:
    """One engine that the plan empties, with the price of its moves and the gain, in engine seconds."""

    engine: EngineName
    price_s: float
    gain_s: float
    busy: float  # share of B that it ran


@dataclass(frozen=True, slots=True)
class Plan:
    """`freed` engines are empty once the moves are done. `reasons` says, per engine looked at, why or why not."""

    version: Version
    moves: tuple[Move, ...]
    freed: tuple[Freed, ...]
    reasons: tuple[str, ...] = ()

    @property
    def price_s(self) -> float:
        return sum(f.price_s for f in self.freed)

    @property
    def gain_s(self) -> float:
        return sum(f.gain_s for f in self.freed)


@dataclass(slots=True, eq=False)
class _Bin:
    """What a destination will hold: grows as the plan does. `kv_at`: its KV tokens now and at each horizon.

    `each_at`: the same of each of its own sessions. `most_at`: the most that one which takes all of them, one by one in
    their order, holds more on the way; growth may be negative, so that is not what they come to in the end.
    """

    view: EngineView
    tie: float
    kv_at: tuple[int, ...]
    each_at: Sequence[tuple[int, ...]] = ()
    most_at: tuple[int, ...] = ()
    sessions: int = 0
    limit: float = field(init=False)
    most: int = field(init=False)  # of `kv_at`

    def __post_init__(self) -> None:
        self.limit, self.most = self.view.kv_max * self.view.kv_capacity_tokens, max(self.kv_at)

    def fits(self, kv_at: tuple[int, ...], num: int = 1) -> bool:
        """So much more, of so many sessions."""
        if self.sessions + num > self.view.batch_max:
            return False
        return all(kv + more <= self.limit for kv, more in zip(self.kv_at, kv_at, strict=True))

    def add(self, kv_at: tuple[int, ...]) -> None:
        self.kv_at, self.sessions = tuple(map(operator.add, self.kv_at, kv_at)), self.sessions + 1
        self.most = max(self.kv_at)

    def copy(self) -> _Bin:
        return _Bin(self.view, self.tie, self.kv_at, sessions=self.sessions)


Routes = Sequence[tuple[SessionLoad, _Bin]]


class _Destinations:
    """Engines that sessions may go to, the fullest first. One without turns is none: it is free already."""

    def __init__(self, bins: Iterable[_Bin]) -> None:
        self._fullest = sorted((b for b in bins if b.view.turns or b.view.inbound), key=_fullness)
        self._places = sum(self._free(b) for b in self._fullest)

    def remove(self, one: _Bin) -> None:
        if one in self._fullest:
            self._fullest.remove(one)
            self._places -= self._free(one)

    def take(self, routes: Routes) -> None:
        """The sessions are on their way there."""
        for one in dict.fromkeys(there for _, there in routes):
            self.remove(one)
            for load in (load for load, there in routes if there is one):
                one.add(load.kv_at(len(one.kv_at) - 1))
            bisect.insort(self._fullest, one, key=_fullness)
            self._places += self._free(one)

    def routes(self, source: _Bin) -> Routes:
        """A destination for every session of `source`, or nothing.

        The fullest engine that takes all of it; else the largest session first, each to the fullest that takes it.
        """
        num = len(source.each_at)
        if num > self._places - self._free(source):
            return []
        roomiest = max(one.limit for one in self._fullest) - source.most_at[0]
        begin = bisect.bisect_left(self._fullest, -roomiest, key=lambda one: -one.kv_at[0])  # those before are too full
        for one in itertools.islice(self._fullest, begin, None):
            if one is not source and one.fits(source.most_at, num):
                return [(load, one) for load in source.view.sessions]
        return self._spread(source)

    def _spread(self, source: _Bin) -> Routes:
        least = min(map(min, source.each_at))
        able = [
            b for b in self._fullest if b is not source and b.sessions < b.view.batch_max and b.most + least <= b.limit
        ]
        trial = [b.copy() for b in able]  # with what they take of this source
        found: list[tuple[SessionLoad, _Bin]] = []
        loads = zip(source.view.sessions, source.each_at, strict=True)
        for load, kv_at in sorted(loads, key=lambda of: (-of[0].tokens, of[0].key)):
            least = min(kv_at)  # where a destination holds the most, it comes to this at least
            at = next((i for i, b in enumerate(trial) if b.most + least <= b.limit and b.fits(kv_at)), None)
            if at is None:
                return []
            trial[at].add(kv_at)
            found.append((load, able[at]))
        return found

    @staticmethod
    def _free(one: _Bin) -> int:
        return max(0, one.view.batch_max - one.sessions)


def _fullness(one: _Bin) -> tuple[int, float]:
    return (-one.kv_at[0], one.tie)


def turn_load(
    turn: TurnLoad,
    *,
    generated: int,
    moves: int,
    ends_session: bool,
    lengths: TurnLengths,
    each_s: float,
    back_s: float,
    stays: bool = False,
    expected: int | None = None,
) -> SessionLoad:
    """What a running turn weighs and will weigh. `each_s`: seconds per token of its engine; `expected`: of its length.

    A call without session frees its KV at its end; any other session comes back for about `back_s`.
    """
    left = turn.tokens_max - turn.tokens
    remaining = lengths.remaining(generated, left, expected)
    mean = lengths.mean
    ahead = [round(share * mean) for share in HORIZONS] if lengths.known else [remaining] * len(HORIZONS)
    growth = lengths.growth(turn.tokens, generated, left, ahead, frees=ends_session, expected=expected)
    remaining_s = max(remaining * each_s, 0.0 if ends_session else back_s)
    return SessionLoad(turn.session_id, turn.turn_id, turn.tokens, growth, remaining_s, moves, stays)


def plan_repack(
    engines: Sequence[EngineView], newest: Version, config: RepackConfig, *, seed: int = 0
) -> tuple[Plan, ...]:
    """One plan per version that is behind `newest` and has more than one engine; may hold no moves, then says why."""
    counts = Counter(e.version for e in engines if e.version < newest)
    several = sorted(version for version, count in counts.items() if count > 1)
    named = sorted(engines, key=lambda e: e.name)  # whatever order they come in, a seed gives one plan
    return tuple(_plan_group([e for e in named if e.version == v], v, config, seed) for v in several)


def past_peak(engine: EngineView) -> str:
    """Empty when the engine takes part in packing, else why it does not."""
    if engine.leaving:
        return "it is being emptied already"
    if engine.intake_open:
        return "its intake is open"
    if engine.queued:
        return f"{engine.queued} turns wait on it"
    if engine.tokens >= engine.kv_max * engine.kv_capacity_tokens:
        return "its KV is full"
    if len(engine.turns) >= engine.batch_max:
        return "it runs a full batch"
    return ""


def _plan_group(group: Sequence[EngineView], version: Version, config: RepackConfig, seed: int) -> Plan:
    tie = random.Random(f"{seed}:{version}")
    past = {e.name: past_peak(e) for e in group}
    reasons = [f"{name} stays: {why}" for name, why in past.items() if why]
    horizons = max((len(s.growth) for e in group for s in e.expected), default=0)
    bins = [_bin(e, tie.random(), horizons) for e in group if not past[e.name]]
    order = sorted(bins, key=lambda b: (b.view.tokens, b.tie))
    destinations = _Destinations(order)
    taken = {b.view.name for b in order if b.view.inbound}
    moves, freed = list[Move](), list[Freed]()
    for one in order:
        source = one.view
        if source.name in taken:
            continue  # others come to it
        why_not = _why_not_at_all(source, config)
        routes = [] if why_not else destinations.routes(one)
        if not why_not:
            why_not = _why_not(source, routes, config)
        if why_not:
            reasons.append(f"{source.name} stays: {why_not}")
            continue
        destinations.take(routes)
        destinations.remove(one)
        taken |= {d.view.name for _, d in routes}
        moves += [_move(load, source, d, config) for load, d in routes]
        freed.append(_freed(source, config))
        reasons.append(_told(source, routes))
    reasons += [f"{b.view.name} stays: others come to it" for b in order if b.view.inbound]
    return Plan(version, tuple(moves), tuple(sorted(freed, key=lambda f: f.engine)), tuple(reasons))


def _bin(view: EngineView, tie: float, horizons: int) -> _Bin:
    none = (0,) * (horizons + 1)
    each_at = [load.kv_at(horizons) for load in view.sessions]
    on_the_way = [list(itertools.accumulate(kv)) for kv in zip(*each_at, strict=True)]
    kv_at = tuple(kv[-1] for kv in on_the_way) or none
    found = _Bin(view, tie, kv_at, each_at, tuple(map(max, on_the_way)) or none, len(each_at))
    for load in view.inbound:
        found.add(load.kv_at(horizons))
    return found


def _why_not_at_all(source: EngineView, config: RepackConfig) -> str:
    if not source.turns:
        return "it is empty already"
    staying = [s for s in source.sessions if s.stays]
    if staying:
        return f"{len(staying)} of its turns have to end where they began"
    tired = [s for s in source.sessions if s.moves >= config.moves_max]
    return f"{len(tired)} of its sessions have moved {config.moves_max} times" if tired else ""


def _why_not(source: EngineView, routes: Routes, config: RepackConfig) -> str:
    if not routes:
        return "the engines of its version have no room for all of it"
    found = _freed(source, config)
    if found.gain_s <= found.price_s:
        return f"prefilling again costs {found.price_s:.2f} s and frees only {found.gain_s:.2f} s"
    return ""


def _freed(source: EngineView, config: RepackConfig) -> Freed:
    """Gain: how long its longest session would hold it, times the share of its batch left empty."""
    busy = len(source.turns) / source.batch_max
    drain_s = max(s.remaining_s for s in source.sessions)
    return Freed(source.name, source.tokens / config.prefill_tokens_per_s, drain_s * (1 - busy), busy)


def _move(load: SessionLoad, source: EngineView, to: _Bin, config: RepackConfig) -> Move:
    price_s = load.tokens / config.prefill_tokens_per_s
    return Move(load.turn_id, load.session_id, source.name, to.view.name, load.tokens, price_s)


def _told(source: EngineView, routes: Routes) -> str:
    where = " and ".join(sorted({d.view.name for _, d in routes}))
    return f"{source.name} goes to {where}: {len(source.turns)} turns, {source.tokens} tokens to prefill again"
