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
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.core.packing.engine_views import EngineView
from gateway.core.packing.plans import Freed, Plan, RepackConfig, Route
from gateway.core.types import EngineName, Version

PART_SESSIONS = 256
"""Sessions that one part of a plan tries to move: about a millisecond to plan, and some five to start their moves."""


def past_peak(engine: EngineView) -> str:
    """Empty when the engine takes part in packing, else why it does not."""
    if engine.leaving:
        return "it is being emptied already"
    if engine.intake_open:
        return "its intake is open"
    if engine.queued:
        return f"{engine.queued} turns wait on it"
    if engine.weight.tokens >= engine.kv_max * engine.kv_capacity_tokens:
        return "its KV is full"
    if engine.weight.num_turns >= engine.batch_max:
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
    order = sorted(bins, key=lambda b: (b.view.weight.tokens, b.tie))
    destinations = _Destinations(order)
    taken = {b.view.name for b in order if b.view.inbound}  # others come to them: they are no sources
    part = _Part(version, config, reasons=[f"{name} stays: {why}" for name, why in past.items() if why])
    for source in order:
        if part.sessions >= PART_SESSIONS:
            yield part.plan()
            part = _Part(version, config)
        if source.view.name not in taken:
            taken |= _free(source, destinations, config, part)
    part.reasons += [f"{b.view.name} stays: others come to it" for b in order if b.view.inbound]
    yield part.plan()


def _free(source: _Bin, destinations: _Destinations, config: RepackConfig, part: _Part) -> set[EngineName]:
    """Plans to free one engine, if that pays and others have room for all of it. Returns where its sessions go."""
    view, freed = source.view, _freed(source.view, config)
    why_not = _unmoved(view, config) or _overpriced(freed)
    route = None if why_not else destinations.take(source)
    part.sessions += view.weight.num
    if route is None:
        why_not = why_not or "the engines of its version have no room for all of it"
        part.reasons.append(f"{view.name} stays: {why_not}")
        return set()
    there, weight = set(route.destinations), view.weight
    where = " and ".join(sorted(there))
    reason = f"{view.name} goes to {where}: {weight.num_turns} turns, {weight.tokens} tokens to prefill again"
    part.routes.append(route)
    part.freed.append(msgspec.structs.replace(freed, reason=reason))
    part.reasons.append(reason)
    return there


def _unmoved(source: EngineView, config: RepackConfig) -> str:
    """Why none of its sessions is to move, wherever to; empty if that is open."""
    weight = source.weight
    if not weight.num_turns:
        return "it is empty already"
    if weight.staying:
        return f"{weight.staying} of its turns have to end where they began"
    if weight.moves < config.moves_max:
        return ""
    tired = sum(load.moves >= config.moves_max for load in source.list_sessions())
    return f"{tired} of its sessions have moved {config.moves_max} times"


def _freed(source: EngineView, config: RepackConfig) -> Freed:
    """Gain: how long its longest session would hold it, times the share of its batch left empty."""
    weight = source.weight
    busy = weight.num_turns / source.batch_max
    return Freed(source.name, weight.tokens / config.prefill_tokens_per_s, weight.remaining_s * (1 - busy), busy)


def _overpriced(freed: Freed) -> str:
    if freed.gain_s > freed.price_s:
        return ""
    return f"prefilling again costs {freed.price_s:.2f} s and frees only {freed.gain_s:.2f} s"


@dataclass(slots=True)
class _Part:
    """What was decided since the last part, and of how many sessions."""

    version: Version
    config: RepackConfig
    routes: list[Route] = field(default_factory=list)
    freed: list[Freed] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    sessions: int = 0

    def plan(self) -> Plan:
        freed = sorted(self.freed, key=lambda f: f.engine)
        prefill_tokens_per_s = self.config.prefill_tokens_per_s
        return Plan(self.version, tuple(self.routes), tuple(freed), tuple(self.reasons), prefill_tokens_per_s)


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
        held = self.view.weight.plus(self.view.inbound)
        self.hold(held.kv_at, held.num)

    def take(self, kv_at: Sequence[int], num: int = 1) -> bool:
        """Adds `num` sessions with so much KV in all, if they fit at every time."""
        if self.sessions + num > self.view.batch_max:
            return False
        grown = list(map(operator.add, self.kv_at, kv_at))
        if max(grown) > self.limit:
            return False
        self.hold(grown, self.sessions + num)
        return True

    def hold(self, kv_at: Sequence[int], sessions: int) -> None:
        """Sets what it holds; also takes back what was added."""
        most = max(kv_at)
        self.kv_at, self.sessions = kv_at, sessions
        self.peak, self.room = kv_at.index(most), self.limit - most


_PLACE = operator.attrgetter("place")


class _Destinations:
    """Engines that sessions may go to, the fullest first. One without turns is none: it is free already.

    They stand in the order of the KV that they hold now, ties broken by chance; `place` is where one stands.
    """

    def __init__(self, bins: Iterable[_Bin]) -> None:
        self._fullest = [one for one in bins if one.view.weight.num_turns or one.view.inbound]
        for one in self._fullest:
            one.place = (-one.kv_at[0], one.tie)
        self._fullest.sort(key=_PLACE)
        self._limit_max = max((b.limit for b in self._fullest), default=0)

    def take(self, source: _Bin) -> Route | None:
        """Where the sessions of `source` go, which is no destination any more; None, and nothing changes, if there is
        no room for all of them.

        The fullest engine that takes all of it; else the largest session first, each to the fullest that takes it.
        """
        self._remove(source)
        there = self._whole(source)
        if there is not None:
            return Route(source.view.name, (there.view.name,), source.sessions, source.view.list_sessions)
        spread = self._spread(source)
        if spread is None:
            self._insert(source)
        return spread

    def _whole(self, source: _Bin) -> _Bin | None:
        kv_at, num = source.kv_at, source.sessions  # all of it: nobody moves to a source
        too_full = bisect.bisect_left(self._fullest, (kv_at[0] - self._limit_max,), key=_PLACE)
        for one in itertools.islice(self._fullest, too_full, None):
            if kv_at[one.peak] <= one.room and one.take(kv_at, num):
                self._reorder(one)
                return one
        return None

    def _spread(self, source: _Bin) -> Route | None:
        """Adds to the engines themselves, and takes it back if a session finds no room: a copy of every engine for each
        source took most of the time of a plan."""
        sessions = sorted(source.view.list_sessions(), key=lambda s: (-s.kv_at[0], s.key))
        least = list(map(min, zip(*[load.kv_at for load in sessions], strict=True)))
        able = [b for b in self._fullest if least[b.peak] <= b.room and b.sessions < b.view.batch_max]
        before: dict[_Bin, tuple[Sequence[int], int]] = {}
        chosen: list[_Bin] = []
        for load in sessions:
            kv_at = load.kv_at
            for one in able:
                if kv_at[one.peak] > one.room:
                    continue
                held = one.kv_at, one.sessions
                if one.take(kv_at):
                    before.setdefault(one, held)
                    chosen.append(one)
                    break
            else:
                for changed, original in before.items():
                    changed.hold(*original)
                return None
        for one in before:
            self._reorder(one)
        return Route(source.view.name, [one.view.name for one in chosen], len(sessions), lambda: sessions)

    def _insert(self, one: _Bin) -> None:
        one.place = (-one.kv_at[0], one.tie)
        bisect.insort(self._fullest, one, key=_PLACE)

    def _reorder(self, one: _Bin) -> None:
        """It holds more than when it was put in."""
        self._remove(one)
        self._insert(one)

    def _remove(self, one: _Bin) -> None:
        at = bisect.bisect_left(self._fullest, one.place, key=_PLACE)
        assert self._fullest[at] is one
        del self._fullest[at]
