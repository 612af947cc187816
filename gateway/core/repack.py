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

**Horizons.** A turn's KV grows while it decodes, and goes when a call ends, so a plan that fits now may not fit later.
KV is therefore compared now and at four later times, in typical turns' lengths: at a quarter and a half, since growth
comes before the first ends; at one, when most of today's turns are over; at two, when only the long tail decodes and
sessions hold what their next turn begins from. What happens after that, later plans decide.

**Prices.** To move a session costs its destination the prefill of all its tokens. To free an engine gains the time that
its longest session would still hold it, times the share of its batch that stays empty meanwhile. Both are seconds of an
engine; an engine whose gain is not above its price stays.

A plan is made in parts, each of bounded work: the event loop that plans also carries every token of the fleet.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from gateway.core.fleet import TurnLoad
from gateway.core.lengths import TurnLengths
from gateway.core.types import EngineName, SessionId, TurnId, Version

HORIZONS = (0.25, 0.5, 1.0, 2.0)
"""Times at which a plan has to fit, in typical turns' lengths."""
PART_SESSIONS = 256
"""Sessions that one part of a plan tries to move: about a millisecond to plan, and some five to start their moves."""


@dataclass(frozen=True, slots=True)
class RepackConfig:
    moves_max: int = 4  # of one session in its life
    prefill_tokens_per_s: float = 1000.0  # price of moving: every token of a moved session is computed again


class SessionLoad(msgspec.Struct, frozen=True, gc=False):
    """What a turn, or (`turn_id` None) a session that waits for a tool, weighs on its engine."""

    session_id: SessionId
    turn_id: TurnId | None
    kv_at: Sequence[int]  # KV tokens now and at each horizon; of one length in a plan, none below 0
    remaining_s: float = 0.0  # how long it will probably still hold its engine
    moves: int = 0
    stays: bool = False  # it has to end where it began

    @property
    def tokens(self) -> int:
        return self.kv_at[0]

    @property
    def key(self) -> str:
        """Tells it from others: a session may run several turns at once."""
        return self.turn_id or self.session_id


@dataclass(slots=True)
class EngineView:
    """One engine as the planner sees it; nobody changes it. `batch_max` is B and `kv_max` C_max, as learnt."""

    name: EngineName
    version: Version
    kv_capacity_tokens: int
    batch_max: int
    kv_max: float
    intake_open: bool
    queued: int
    sessions: Sequence[SessionLoad]  # running or waiting for a tool
    inbound: Sequence[SessionLoad] = ()  # planned onto it, not there yet
    leaving: bool = False  # an earlier plan is emptying it
    num_turns: int = field(init=False)
    tokens: int = field(init=False)  # of `sessions`, now
    kv_at: Sequence[int] = field(init=False)  # of sessions and inbound, now and at each horizon; empty without any

    def __post_init__(self) -> None:
        self.num_turns = sum([s.turn_id is not None for s in self.sessions])
        self.tokens = sum([s.kv_at[0] for s in self.sessions])
        self.kv_at = list(map(sum, zip(*[s.kv_at for s in (*self.sessions, *self.inbound)], strict=True)))


class Move(msgspec.Struct, frozen=True, gc=False):
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


# -- what turns weigh


def turn_loads(
    turns: Sequence[TurnLoad],
    *,
    generated: Sequence[int],
    moves: Sequence[int],
    ends_session: Sequence[bool],
    lengths: TurnLengths,
    each_s: Sequence[float],
    back_s: float,
    stays: Sequence[bool],
    expected: Sequence[int],
) -> list[SessionLoad]:
    """What running turns weigh and will weigh. `each_s`: an engine's seconds per token; `expected`: of `lengths`.

    A call without session frees its KV at its end; any other session comes back for about `back_s`.
    """
    if not turns:
        return []
    tokens, left = np.array([t.tokens for t in turns]), np.array([t.tokens_max - t.tokens for t in turns])
    made, guess, frees = np.array(generated), np.array(expected), np.array(ends_session)
    remaining = lengths.remaining(made, left, guess)
    ahead = np.rint(np.multiply(HORIZONS, lengths.mean)).astype(int) if lengths.known else remaining
    rows = np.broadcast_to(ahead[:, None] if lengths.known else ahead, (len(HORIZONS), len(turns)))
    growth = lengths.growth(tokens, made, left, rows, frees=frees, expected=guess)
    kv_at = np.vstack((tokens, tokens + growth)).T.tolist()
    remaining_s = np.maximum(remaining * np.array(each_s), np.where(frees, 0.0, back_s)).tolist()
    session_ids, turn_ids = [t.session_id for t in turns], [t.turn_id for t in turns]
    return list(map(SessionLoad, session_ids, turn_ids, kv_at, remaining_s, moves, stays))


def steady(tokens: int) -> Sequence[int]:
    """KV tokens now and at each horizon, of what does not grow."""
    return (tokens,) * (1 + len(HORIZONS))


# -- plans


def behind(versions: Iterable[Version], newest: Version) -> list[Version]:
    """Of the versions of all engines, the older ones that more than one engine serves: those that can be packed."""
    return sorted(version for version, count in Counter(versions).items() if count > 1 and version < newest)


def plan_repack(
    engines: Sequence[EngineView], newest: Version, config: RepackConfig, *, seed: int = 0
) -> tuple[Plan, ...]:
    """One plan for each of the versions `behind`; may hold no moves, then says why."""
    groups = {v: [e for e in engines if e.version == v] for v in behind((e.version for e in engines), newest)}
    return tuple(whole(list(plan_parts(group, v, config, seed=seed))) for v, group in groups.items())


def whole(parts: Sequence[Plan]) -> Plan:
    """The plan that was made in `parts`."""
    return Plan(
        parts[0].version,
        tuple(move for part in parts for move in part.moves),
        tuple(sorted((freed for part in parts for freed in part.freed), key=lambda f: f.engine)),
        tuple(reason for part in parts for reason in part.reasons),
    )


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
    if engine.num_turns >= engine.batch_max:
        return "it runs a full batch"
    return ""


def plan_parts(group: Sequence[EngineView], version: Version, config: RepackConfig, *, seed: int = 0) -> Iterator[Plan]:
    """The plan for the engines of one version, part after part; at least one, which may be empty.

    The moves of a part may begin before the next part is made: parts only ever add to what destinations will hold.
    """
    group = sorted(group, key=lambda e: e.name)  # whatever order they come in, a seed gives one plan
    tie = random.Random(f"{seed}:{version}")
    past = {e.name: past_peak(e) for e in group}
    bins = [_Bin(e, tie.random()) for e in group if not past[e.name]]
    order = sorted(bins, key=lambda b: (b.view.tokens, b.tie))
    destinations = _Destinations(order)
    taken = {b.view.name for b in order if b.view.inbound}  # others come to them: they are no sources
    part = _Part(version, reasons=[f"{name} stays: {why}" for name, why in past.items() if why])
    for source in order:
        if part.sessions >= PART_SESSIONS:
            yield part.plan()
            part = _Part(version)
        if source.view.name not in taken:
            taken |= _free(source, destinations, config, part)
    part.reasons += [f"{b.view.name} stays: others come to it" for b in order if b.view.inbound]
    yield part.plan()


def _free(source: _Bin, destinations: _Destinations, config: RepackConfig, part: _Part) -> set[EngineName]:
    """Plans to free one engine, if that pays and others have room for all of it. Returns where its sessions go."""
    view, freed = source.view, _freed(source.view, config)
    why_not = _unmoved(view, config) or _overpriced(freed)
    routes = () if why_not else destinations.take(source)
    part.sessions += len(view.sessions)
    if not routes:
        why_not = why_not or "the engines of its version have no room for all of it"
        part.reasons.append(f"{view.name} stays: {why_not}")
        return set()
    part.moves += [_move(load, view, b, config) for load, b in routes]
    part.freed.append(freed)
    there = {b.view.name for _, b in routes}
    where = " and ".join(sorted(there))
    part.reasons.append(f"{view.name} goes to {where}: {view.num_turns} turns, {view.tokens} tokens to prefill again")
    return there


def _unmoved(source: EngineView, config: RepackConfig) -> str:
    """Why none of its sessions is to move, wherever to; empty if that is open."""
    if not source.num_turns:
        return "it is empty already"
    if staying := sum([s.stays for s in source.sessions]):
        return f"{staying} of its turns have to end where they began"
    tired = sum([s.moves >= config.moves_max for s in source.sessions])
    return f"{tired} of its sessions have moved {config.moves_max} times" if tired else ""


def _freed(source: EngineView, config: RepackConfig) -> Freed:
    """Gain: how long its longest session would hold it, times the share of its batch left empty."""
    busy = source.num_turns / source.batch_max
    drain_s = max([s.remaining_s for s in source.sessions], default=0.0)
    return Freed(source.name, source.tokens / config.prefill_tokens_per_s, drain_s * (1 - busy), busy)


def _overpriced(freed: Freed) -> str:
    if freed.gain_s > freed.price_s:
        return ""
    return f"prefilling again costs {freed.price_s:.2f} s and frees only {freed.gain_s:.2f} s"


def _move(load: SessionLoad, source: EngineView, to: _Bin, config: RepackConfig) -> Move:
    tokens = load.kv_at[0]
    price_s = tokens / config.prefill_tokens_per_s
    return Move(load.turn_id, load.session_id, source.name, to.view.name, tokens, price_s)


@dataclass(slots=True)
class _Part:
    """What was decided since the last part, and of how many sessions."""

    version: Version
    moves: list[Move] = field(default_factory=list)
    freed: list[Freed] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    sessions: int = 0

    def plan(self) -> Plan:
        freed = sorted(self.freed, key=lambda f: f.engine)
        return Plan(self.version, tuple(self.moves), tuple(freed), tuple(self.reasons))


@dataclass(slots=True, eq=False)
class _Bin:
    """What an engine will hold: grows as the plan does.

    `peak`: the time at which it holds the most; `room`: what is left of C_max then. What is too much at the peak does
    not fit, so that one comparison rules most engines out.
    """

    view: EngineView
    tie: float
    limit: int = field(init=False)
    kv_at: Sequence[int] = field(init=False)
    sessions: int = field(init=False)
    peak: int = field(init=False)
    room: int = field(init=False)
    place: tuple[int, float] = field(init=False)  # in the order of destinations

    def __post_init__(self) -> None:
        self.limit = math.floor(self.view.kv_max * self.view.kv_capacity_tokens)
        self.hold(self.view.kv_at or (0,), len(self.view.sessions) + len(self.view.inbound))

    def fits(self, kv_at: Sequence[int], num: int = 1) -> bool:
        """Whether `num` sessions with so much KV in all fit, at every time."""
        if self.sessions + num > self.view.batch_max:
            return False
        most: int = max(map(operator.add, self.kv_at, kv_at))
        return most <= self.limit

    def add(self, kv_at: Sequence[int], num: int = 1) -> None:
        self.hold(list(map(operator.add, self.kv_at, kv_at)), self.sessions + num)

    def hold(self, kv_at: Sequence[int], sessions: int) -> None:
        """Sets what it holds; also takes back what was added."""
        most = max(kv_at)
        self.kv_at, self.sessions = kv_at, sessions
        self.peak, self.room = kv_at.index(most), self.limit - most


Routes = Sequence[tuple[SessionLoad, _Bin]]
_PLACE = operator.attrgetter("place")


class _Destinations:
    """Engines that sessions may go to, the fullest first. One without turns is none: it is free already.

    They stand in the order of the KV that they hold now, ties broken by chance; `place` is where one stands.
    """

    def __init__(self, bins: Iterable[_Bin]) -> None:
        self._fullest: list[_Bin] = []
        for one in bins:
            if one.view.num_turns or one.view.inbound:
                self._insert(one)
        self._limit_max = max((b.limit for b in self._fullest), default=0)

    def take(self, source: _Bin) -> Routes:
        """A destination for every session of `source`, which is none itself any more; or nothing, and nothing changes.

        The fullest engine that takes all of it; else the largest session first, each to the fullest that takes it.
        """
        self._remove(source)
        routes = self._whole(source) or self._spread(source)
        if not routes:
            self._insert(source)
        for one in dict.fromkeys(there for _, there in routes):
            self._remove(one)
            self._insert(one)
        return routes

    def _whole(self, source: _Bin) -> Routes:
        kv_at, num = source.kv_at, source.sessions  # all of it: nobody moves to a source
        too_full = bisect.bisect_left(self._fullest, (kv_at[0] - self._limit_max,), key=_PLACE)
        for one in itertools.islice(self._fullest, too_full, None):
            if kv_at[one.peak] <= one.room and one.fits(kv_at, num):
                one.add(kv_at, num)
                return [(load, one) for load in source.view.sessions]
        return ()

    def _spread(self, source: _Bin) -> Routes:
        """Adds to the engines themselves, and takes it back if a session finds no room: a copy of every engine for each
        source took most of the time of a plan."""
        sessions = sorted(source.view.sessions, key=lambda s: (-s.kv_at[0], s.key))
        least = list(map(min, zip(*[load.kv_at for load in sessions], strict=True)))
        able = [b for b in self._fullest if least[b.peak] <= b.room and b.sessions < b.view.batch_max]
        before: dict[_Bin, tuple[Sequence[int], int]] = {}
        routes: list[tuple[SessionLoad, _Bin]] = []
        for load in sessions:
            kv_at = load.kv_at
            one = next((b for b in able if kv_at[b.peak] <= b.room and b.fits(kv_at)), None)
            if one is None:
                for changed, held in before.items():
                    changed.hold(*held)
                return ()
            before.setdefault(one, (one.kv_at, one.sessions))
            one.add(kv_at)
            routes.append((load, one))
        return routes

    def _insert(self, one: _Bin) -> None:
        one.place = (-one.kv_at[0], one.tie)
        bisect.insort(self._fullest, one, key=_PLACE)

    def _remove(self, one: _Bin) -> None:
        at = bisect.bisect_left(self._fullest, one.place, key=_PLACE)
        assert self._fullest[at] is one
        del self._fullest[at]
