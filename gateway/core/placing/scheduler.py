"""Which engine runs a turn: the session's version first, then the engine that holds its prefix, then load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from gateway.core.fleet.events import Placed
from gateway.core.fleet.modes import mode_of
from gateway.core.fleet.order import Load, Pool
from gateway.core.fleet.state import EngineState, FleetState, TurnLoad, Wanted
from gateway.core.placing.retry_after import UNKNOWN_S
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import EngineName, SessionId, TurnId, Version

LEAD_MAX = 0.25
"""Share of B that an engine may run more than the least loaded one for the sake of a prefix: below B decoding is bound
by memory, so such a lead costs little, but what was learnt of that may be wrong."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`version_changed`: the session's version is gone, and it goes on under this engine's."""

    engine: EngineName
    reason: str
    version_changed: bool = False


WaitCause = Literal["room", "trainer", "version"]
"""What a turn waits for: room on any engine, the trainer, or a version that it may be on."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No engine may take the turn now. `retry_after_s`: for the client, where the reason is not capacity."""

    reason: str
    retry_after_s: float | None = None
    cause: WaitCause = "room"


@dataclass(frozen=True, slots=True)
class Lost:
    """No version that the session may be on can be served any more."""

    reason: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a turn needs of an engine."""

    session: SessionState
    prompt_tokens: int
    avoid: frozenset[EngineName] = frozenset()  # engines that just cut it
    turn_id: TurnId | None = None
    prefix: Sequence[int] = ()  # the prompt's blocks, of a session that no engine holds yet
    kinds: frozenset[str] | None = None  # of engines that support it; None: all
    tokens_max: int = 0  # prompt and the most it may still generate; 0: not known
    reserved: frozenset[EngineName] = frozenset()  # engines whose next room is reserved for a turn that has waited long

    def takes(self, engine: EngineState) -> bool:
        return self.kinds is None or engine.kind in self.kinds

    def fits(self, engine: EngineState) -> bool:
        """The engine's context holds all of it, as far as both are known."""
        return not engine.context_tokens or self.tokens_max <= engine.context_tokens

    def suits(self, engine: EngineState) -> bool:
        """Whether the turn may go to the engine at all, once there is room."""
        return self.takes(engine) and self.fits(engine) and engine.name not in self.reserved

    def booking(self, placement: Placement) -> Placed:
        turn_id, session, tokens = self.turn_id, self.session, self.prompt_tokens
        load = None if turn_id is None else TurnLoad(turn_id, session.session_id, tokens, tokens)
        return Placed(placement.engine, session, load, self.prefix, turn_id, placement.reason)


@dataclass(frozen=True, slots=True)
class Admission:
    """New sessions against what the trainer will use: (bound + 1) batches, running or buffered. `silent`: of the
    running ones, those without a request for `idle_after_s`; `idle`: further ones that do not count for that reason."""

    running: int
    buffered: int
    reader_batch: int | None  # trajectories per batch, once a reader declared it
    staleness_max: int
    next_batch_s: float = UNKNOWN_S  # until the trainer takes one
    silent: int = 0
    idle: int = 0
    idle_after_s: float = 0.0

    @property
    def full(self) -> bool:
        return self.over >= 0

    @property
    def over(self) -> int:
        """How many there are beyond the bound; below 0: so many more may begin."""
        if self.reader_batch is None:
            return -1
        return self.running + self.buffered - (self.staleness_max + 1) * self.reader_batch

    @property
    def reason(self) -> str:
        """Why new sessions wait: who holds the places, and what ends those of crashed agents."""
        bound = (self.staleness_max + 1) * (self.reader_batch or 0)
        found = f"{self.running} running and {self.buffered} buffered trajectories reach the bound of {bound}"
        if self.idle or self.silent:
            begun, command = self.running + self.idle, f"`gateway sessions --idle-s {self.idle_after_s:g}"
            found += f"; {self.silent + self.idle} of {begun} sessions had no request for {self.idle_after_s:g} s: "
            found += f"{self.idle} do not count ({command} --abandon` ends them)" if self.idle else ""
            found += ", " if self.idle and self.silent else ""
            found += (
                f"{self.silent} count for a runner, a child or their reward ({command}` lists them)"
                if self.silent
                else ""
            )
        return found


_Kind = tuple[bool, bool, int, int | None, frozenset[str] | None]


@dataclass(slots=True)
class Refusals:
    """Refusals of new sessions in one round through the queue: others of their kind would be refused likewise, if they
    need at least as much, of an engine's free memory now and of its context in all.

    Without it a queue of n costs n decisions whenever anything changes.
    """

    _refused: dict[_Kind, tuple[int, int, Wait]] = field(default_factory=dict)

    def find(self, demand: Demand, fleet: FleetState) -> Wait | None:
        """The refusal that holds for this one, too; None when it has to be decided."""
        spec = demand.session.spec
        if demand.session.version is not None or fleet.group_versions.get(spec.group_id) is not None:
            return None
        prompt_tokens, tokens_max, wait = self._refused.get(_kind(demand), (0, 0, None))
        return wait if demand.prompt_tokens >= prompt_tokens and demand.tokens_max >= tokens_max else None

    def note(self, demand: Demand, fleet: FleetState, wait: Wait) -> None:
        spec = demand.session.spec
        if demand.session.version is None and fleet.group_versions.get(spec.group_id) is None:
            self._refused[_kind(demand)] = (demand.prompt_tokens, demand.tokens_max, wait)


def _kind(demand: Demand) -> _Kind:
    """All of a new session that its refusal may depend on, but for its lengths."""
    spec = demand.session.spec
    return _awaits_trainer(spec), demand.session.insists, spec.min_version, spec.max_version, demand.kinds


def _awaits_trainer(spec: SessionSpec) -> bool:
    """The trainer's bound applies to it. Not to a child that blocks its parent: the parent could never end."""
    return spec.split == "train" and spec.train and not spec.blocks_parent


def place(demand: Demand, fleet: FleetState, admission: Admission) -> Placement | Wait | Lost:
    """The engine for this turn, or why it has to wait, or cannot be."""
    if demand.session.version is not None:
        return _place_known(demand, fleet, demand.session.version)
    return _place_new(demand, fleet, admission)


def _place_known(demand: Demand, fleet: FleetState, version: Version) -> Placement | Wait | Lost:
    own = fleet.engines.get(demand.session.engine) if demand.session.engine is not None else None
    if mode_of(fleet.config).mixes and own is not None and own.name not in demand.avoid:
        if own.status == "refreshing":
            return Wait(f"engine {own.name} loads a version", cause="version")
        allowed = demand.session.spec.allows(own.version) and demand.suits(own)
        fits = allowed and fleet.has_room(own, demand.prompt_tokens)
        if own.status == "serving" and fits:
            return Placement(own.name, "holds its place", version_changed=own.version != version)
    pool = Pool(version)
    if not any(demand.fits(e) for e in fleet.serving(pool)):
        return _place_lost(demand, fleet, version)
    avoid = _avoid(demand, (e for e in fleet.serving(pool) if demand.fits(e)))
    chosen = _choose(pool, demand, fleet, lambda e: e.name not in avoid and not e.leaving)
    chosen = chosen or _choose(pool, demand, fleet, lambda e: e.name not in avoid)
    if chosen is not None:
        return chosen
    return Wait(f"engines of version {version} {_why(lambda: filter(demand.fits, fleet.serving(pool)), demand)}")


def _avoid(demand: Demand, engines: Iterable[EngineState]) -> frozenset[EngineName]:
    """Engines that just cut it, unless there are no others."""
    return demand.avoid if any(e.name not in demand.avoid for e in engines) else frozenset()


def _place_lost(demand: Demand, fleet: FleetState, version: Version) -> Placement | Wait | Lost:
    """No engine serves the session's version: its policy says what follows."""
    spec, lost = demand.session.spec, f"no engine serves version {version}"
    if _insists(demand.session, fleet):
        if fleet.gone(version):
            hint = "" if demand.session.insists else f"it may be on no version newer than {spec.max_version}"
            return Lost(f"{lost}, and no relay holds it any more", hint)
        return Wait(f"{lost}: it is loaded once an engine is free whose relay holds it", cause="version")
    if spec.on_version_loss == "fail":
        return Lost(f"{lost} any more, and the session is to fail then")
    served = fleet.served()
    pools = [Pool(v) for v in served if spec.allows(v)]
    avoid = _avoid(demand, (e for pool in pools for e in fleet.serving(pool)))
    for pool in pools:
        chosen = _choose(pool, demand, fleet, lambda e: e.name not in avoid)
        if chosen is not None:
            reason = f"{lost} any more; going on under version {pool.version}"
            return Placement(chosen.engine, reason, version_changed=True)
    if pools:
        return Wait(f"{lost} any more, and no other engine has room")
    return Wait(f"no engine serves {_bounds(spec)}", cause="version") if served else Wait("no engine serves")


def _insists(session: SessionState, fleet: FleetState) -> bool:
    """It continues under its version or not at all: by its policy, or because it may be on no other that is served.

    Engines do not go back by themselves, so one with a `max_version` would wait in vain for another.
    """
    spec = session.spec
    if session.insists or spec.max_version is None or spec.on_version_loss == "fail":
        return session.insists
    return not any(spec.allows(version) for version in fleet.served())


def _bounds(spec: SessionSpec) -> str:
    if spec.max_version is None:
        return f"version {spec.min_version} or a newer one"
    if not spec.min_version:
        return f"version {spec.max_version} or an older one"
    return f"a version from {spec.min_version} to {spec.max_version}"


def wanted_versions(waiting: Iterable[Demand], fleet: FleetState) -> dict[Version, Wanted]:
    """Versions that waiting turns insist on."""
    sessions: dict[Version, dict[SessionId, int]] = {}
    for demand in waiting:
        session, version = demand.session, demand.session.version
        if version is not None and _insists(session, fleet):
            sessions.setdefault(version, {})[session.session_id] = demand.prompt_tokens
    return {version: Wanted(len(of), sum(of.values())) for version, of in sessions.items()}


def _place_new(demand: Demand, fleet: FleetState, admission: Admission) -> Placement | Wait | Lost:
    spec = demand.session.spec
    group_version = fleet.group_versions.get(spec.group_id)
    if group_version is not None and spec.allows(group_version) and fleet.num_serving(Pool(group_version)):
        same = Pool(group_version)
        chosen = _choose(same, demand, fleet)
        if chosen is not None:
            return chosen
        return Wait(f"engines of its group's version {group_version} {_why(lambda: fleet.serving(same), demand)}")
    if spec.max_version is not None and fleet.past(spec.max_version, spec.min_version):
        reason = f"every engine is past version {spec.max_version}, the newest that it may be on"
        return Lost(reason, "a higher `max_version`; or name a `version`, which is loaded again")
    begun = group_version is not None and spec.group_size > 1  # what it lacks, its group's trajectories wait for
    if admission.full and _awaits_trainer(spec) and not begun:
        return Wait(admission.reason, admission.next_batch_s, "trainer")
    pools = [Pool(version, True) for version in fleet.served(opened=True)]
    if spec.min_version or spec.max_version is not None:
        pools = [pool for pool in pools if spec.allows(pool.version)]
        if not pools:
            return Wait(f"no engine with an open intake serves {_bounds(spec)}")
    if demand.session.insists:
        full, pools = bool(pools), [pool for pool in pools if fleet.pinned.room_for(pool.version)]
        if full and not pools:
            return Wait(fleet.pinned.full, cause="version")
    for pool in pools:
        chosen = _choose(pool, demand, fleet)
        if chosen is not None:
            return chosen
    if not pools:
        return Wait("every intake is closed")
    return Wait(f"open intakes {_why(lambda: chain.from_iterable(map(fleet.serving, pools)), demand)}")


def _why(engines: Callable[[], Iterable[EngineState]], demand: Demand) -> str:
    """Why none of the engines takes the turn."""
    if any(map(demand.suits, engines())):
        return "are full"
    able = list(filter(demand.takes, engines()))
    if not able:
        return "cannot sample or constrain an answer so"
    if any(demand.fits(e) for e in able):
        return "are kept for a prompt that has waited long for their room"
    longest = max(e.context_tokens for e in able)
    return f"have contexts of {longest} tokens at most, and it may come to {demand.tokens_max}"


def reservable(demand: Demand, fleet: FleetState) -> EngineState | None:
    """The engine that will have room for it soonest, if what comes free there is reserved."""
    version, spec = demand.session.version, demand.session.spec
    if version is not None:
        pools = [Pool(version)]
    else:
        pools = [Pool(v, True) for v in fleet.served(opened=True) if spec.allows(v)]
    able = [e for pool in pools for e in fleet.serving(pool) if demand.suits(e)]
    return min(able, key=lambda e: (e.tokens, len(e.turns), e.name), default=None)


def _anyone(engine: EngineState) -> bool:
    return True


def _choose(
    pool: Pool, demand: Demand, fleet: FleetState, may: Callable[[EngineState], bool] = _anyone
) -> Placement | None:
    """Chooses from a pool: the session's own engine if it has room, else the one that holds its prompt's prefix, if
    that pays, else the least loaded."""
    session = demand.session

    def suits(engine: EngineState) -> bool:
        return demand.suits(engine) and may(engine)

    own = None if session.engine is None else fleet.engines.get(session.engine)
    own = own if own is not None and own.within(pool) and own.version == session.version else None
    if own is not None and suits(own) and fleet.has_room(own, demand.prompt_tokens):
        return Placement(own.name, "holds its prefix")
    least = fleet.least_loaded(pool, demand.prompt_tokens, suits)
    if least is None:
        return None
    holder = _holder(pool, least, demand, fleet, suits) if demand.prefix else None
    return holder or Placement(least.name, f"least loaded of {fleet.num_serving(pool)}")


def _holder(
    pool: Pool, least: EngineState, demand: Demand, fleet: FleetState, suits: Callable[[EngineState], bool]
) -> Placement | None:
    """The engine where the prefix that need not be computed again is worth most more than the larger batch costs.

    Only one that holds more of it than the least loaded: its batch is no smaller.
    """
    blocks, turn_tokens = demand.prefix, demand.session.spec.expected_output_tokens or fleet.turn_tokens
    least_held = fleet.prefixes.held(blocks, least.name, least.holding)
    turns_max = len(least.turns) + fleet.config.max_running * LEAD_MAX
    found: list[tuple[float, Load, int]] = []
    for name, holding in fleet.prefixes.holders(blocks, least_held).items():
        engine = fleet.engines.get(name)
        if engine is None or engine.holding != holding or len(engine.turns) > turns_max or not engine.within(pool):
            continue
        if not suits(engine) or not fleet.has_room(engine, demand.prompt_tokens):
            continue
        held = fleet.prefixes.held(blocks, name, holding)
        more = len(engine.turns) - len(least.turns)
        slower_s = engine.curve.seconds_per_turn(fleet.config.max_running) * more * turn_tokens
        gain_s = (held - least_held) / fleet.prefill_tokens_per_s - slower_s
        if gain_s > 0:
            found.append((-gain_s, engine.load, held))
    if not found:
        return None
    _, load, held = min(found)
    more = load.turns - len(least.turns)
    return Placement(load.name, f"holds {held} tokens of its prompt, with {more} turns more than {least.name}")
