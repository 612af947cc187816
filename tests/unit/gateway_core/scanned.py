"""The scheduler as it was before engines stood in an order: every question answered by a look at all engines.

The reference of `test_order`. It differs from the old code in one number alone: `least loaded of N` counts the engines
that serve the version (for a new session: with an open intake), not those that have room, whom nobody counts any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gateway.core.fleet.order import Pool
from gateway.core.fleet.prefixes import BLOCK_TOKENS, Holding
from gateway.core.fleet.state import EngineState, FleetState
from gateway.core.placing.scheduler import LEAD_MAX, Admission, Demand, Lost, Placement, Wait, _awaits_trainer, _bounds
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, SessionId, Version


class ScannedFleet(FleetState):
    """A fleet that keeps no order: the rest of the core asks it, too."""

    def served(self, *, opened: bool = False) -> list[Version]:
        open_ = [e for e in self.engines.values() if e.status == "serving" and (e.intake_open or not opened)]
        return sorted({e.version for e in open_}, reverse=True)

    def num_serving(self, pool: Pool) -> int:
        return len(list(self.serving(pool)))

    def serving(self, pool: Pool) -> Iterator[EngineState]:
        return (e for e in _serving(self, pool.version) if e.intake_open or not pool.opened)

    def needed(self, version: Version) -> bool:
        return bool(self.live_sessions(version))

    def live_sessions(self, version: Version) -> tuple[SessionId, ...]:
        return tuple(sorted(s for s, v in self.session_versions.items() if v == version))


def _serving(fleet: FleetState, version: Version) -> list[EngineState]:
    return [e for e in fleet.sorted_engines() if e.status == "serving" and e.version == version]


def _held(fleet: FleetState, blocks: Sequence[int], engines: Mapping[EngineName, Holding]) -> dict[EngineName, int]:
    """Tokens of the prompt that each engine holds from its beginning on; engines that hold none are left out."""
    tokens: dict[EngineName, int] = {}
    holders = dict(engines)
    for count, block in enumerate(blocks):
        known = fleet.prefixes._blocks.get(block, {})
        for name in [name for name, holding in holders.items() if known.get(name) != holding]:
            tokens[name] = count * BLOCK_TOKENS
            del holders[name]
        if not holders:
            break
    tokens |= dict.fromkeys(holders, len(blocks) * BLOCK_TOKENS)
    return {name: held for name, held in tokens.items() if held}


def has_room(engine: EngineState, fleet: FleetState, prompt_tokens: int) -> bool:
    if engine.status != "serving" or engine.suspected or len(engine.turns) >= fleet.config.max_running:
        return False
    if not engine.turns or not engine.kv_capacity_tokens:
        return True
    return engine.tokens + prompt_tokens <= fleet.config.kv_max * engine.kv_capacity_tokens


def place(demand: Demand, fleet: FleetState, admission: Admission) -> Placement | Wait | Lost:
    if demand.session.version is not None:
        return _place_known(demand, fleet, demand.session.version)
    return _place_new(demand, fleet, admission)


def _place_known(demand: Demand, fleet: FleetState, version: Version) -> Placement | Wait | Lost:
    own = fleet.engines.get(demand.session.engine) if demand.session.engine is not None else None
    if fleet.config.mode == "inflight" and own is not None and own.name not in demand.avoid:
        if own.status == "refreshing":
            return Wait(f"engine {own.name} loads a version", cause="version")
        usable = demand.takes(own) and demand.fits(own) and own.name not in demand.reserved
        fits = usable and demand.session.spec.allows(own.version) and has_room(own, fleet, demand.prompt_tokens)
        if own.status == "serving" and fits:
            return Placement(own.name, "holds its place", version_changed=own.version != version)
    having = _serving(fleet, version)
    same = [e for e in having if demand.fits(e)]
    if same:
        usable = [e for e in same if e.name not in demand.avoid] or same
        staying = [e for e in usable if not e.leaving]
        chosen = _choose(staying, demand, fleet, len(having)) or _choose(usable, demand, fleet, len(having))
        return chosen or Wait(f"engines of version {version} {_why(same, demand)}")
    return _place_lost(demand, fleet, version)


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
    serving = [e for e in fleet.sorted_engines() if e.status == "serving"]
    allowed = [e for e in serving if spec.allows(e.version)]
    others = [e for e in allowed if e.name not in demand.avoid] or allowed
    for newest in sorted({e.version for e in others}, reverse=True):
        chosen = _choose([e for e in others if e.version == newest], demand, fleet)
        if chosen is not None:
            return Placement(chosen.engine, f"{lost} any more; going on under version {newest}", version_changed=True)
    if others:
        return Wait(f"{lost} any more, and no other engine has room")
    return Wait(f"no engine serves {_bounds(spec)}", cause="version") if serving else Wait("no engine serves")


def _insists(session: SessionState, fleet: FleetState) -> bool:
    """It goes on under its version or not at all: by its policy, or since no other that is served is one it may be on.

    Engines do not go back by themselves, so one with a `max_version` would wait in vain for another.
    """
    spec = session.spec
    if session.insists or spec.max_version is None or spec.on_version_loss == "fail":
        return session.insists
    return not any(e.status == "serving" and spec.allows(e.version) for e in fleet.engines.values())


def _place_new(demand: Demand, fleet: FleetState, admission: Admission) -> Placement | Wait | Lost:
    spec = demand.session.spec
    group_version = fleet.group_versions.get(spec.group_id)
    if group_version is not None and spec.allows(group_version) and _serving(fleet, group_version):
        same = _serving(fleet, group_version)
        chosen = _choose(same, demand, fleet)
        return chosen or Wait(f"engines of its group's version {group_version} {_why(same, demand)}")
    if spec.max_version is not None and fleet.past(spec.max_version):
        reason = f"every engine is past version {spec.max_version}, the newest that it may be on"
        return Lost(reason, "a higher `max_version`; or name a `version`, which is loaded again")
    begun = group_version is not None and spec.group_size > 1  # what it lacks, its group's trajectories wait for
    if admission.full and _awaits_trainer(spec) and not begun:
        reason = admission.reason
        return Wait(reason, admission.next_batch_s, "trainer")
    open_ = [e for e in fleet.sorted_engines() if e.status == "serving" and e.intake_open]
    if spec.min_version or spec.max_version is not None:
        open_ = [e for e in open_ if spec.allows(e.version)]
        if not open_:
            return Wait(f"no engine with an open intake serves {_bounds(spec)}")
    if demand.session.insists:
        full, open_ = bool(open_), [e for e in open_ if fleet.pinned.room_for(e.version)]
        if full and not open_:
            return Wait(fleet.pinned.full, cause="version")
    for version in sorted({e.version for e in open_}, reverse=True):
        chosen = _choose([e for e in open_ if e.version == version], demand, fleet)
        if chosen is not None:
            return chosen
    return Wait(f"open intakes {_why(open_, demand)}" if open_ else "every intake is closed")


def _why(engines: Sequence[EngineState], demand: Demand) -> str:
    """None of them has a place."""
    able = [e for e in engines if demand.takes(e)]
    if not able:
        return "cannot sample or constrain an answer so"
    if not any(demand.fits(e) for e in able):
        longest = max(e.context_tokens for e in able)
        return f"have contexts of {longest} tokens at most, and it may come to {demand.tokens_max}"
    if all(e.name in demand.reserved for e in able if demand.fits(e)):
        return "are kept for a prompt that has waited long for their room"
    return "are full"


def reservable(demand: Demand, fleet: FleetState) -> EngineState | None:
    """The engine that will have room for it soonest, if nobody else is given what comes free there."""
    version = demand.session.version
    if version is not None:
        able = _serving(fleet, version)
    else:
        spec = demand.session.spec
        able = [e for e in fleet.sorted_engines() if e.status == "serving" and e.intake_open and spec.allows(e.version)]
    able = [e for e in able if demand.takes(e) and demand.fits(e) and e.name not in demand.reserved]
    return min(able, key=lambda e: (e.tokens, len(e.turns), e.name), default=None)


def _choose(
    engines: Sequence[EngineState], demand: Demand, fleet: FleetState, of: int | None = None
) -> Placement | None:
    """Among engines of one version: the session's own if it has room, else who holds its prompt's prefix, if that pays,
    else the least loaded."""
    able = [e for e in engines if demand.takes(e) and demand.fits(e) and e.name not in demand.reserved]
    roomy = [e for e in able if has_room(e, fleet, demand.prompt_tokens)]
    if not roomy:
        return None
    for engine in roomy:
        if engine.name == demand.session.engine and engine.version == demand.session.version:
            return Placement(engine.name, "holds its prefix")
    least = min(roomy, key=_load)
    holder = _holder(roomy, least, demand, fleet) if demand.prefix else None
    return holder or Placement(least.name, f"least loaded of {len(engines) if of is None else of}")


def _load(engine: EngineState) -> tuple[int, int, int, str]:
    """Idle engines take sessions in turn: else the first would hold all that come one by one, and stay with it."""
    return (len(engine.turns), engine.tokens, engine.admitted, engine.name)


def _holder(engines: Sequence[EngineState], least: EngineState, demand: Demand, fleet: FleetState) -> Placement | None:
    """The engine where the prefix that need not be computed again is worth most more than the larger batch costs."""
    held = _held(fleet, demand.prefix, {e.name: e.holding for e in engines})
    if not held:
        return None
    turn_tokens = demand.session.spec.expected_output_tokens or fleet.turn_tokens

    def gain_s(engine: EngineState) -> float:
        saved = held.get(engine.name, 0) - held.get(least.name, 0)
        more = len(engine.turns) - len(least.turns)
        slower_s = engine.curve.seconds_per_turn(fleet.config.max_running) * more * turn_tokens
        return saved / fleet.prefill_tokens_per_s - slower_s

    lead_max = len(least.turns) + fleet.config.max_running * LEAD_MAX
    bearable = [e for e in engines if e.name in held and len(e.turns) <= lead_max]
    best = max(sorted(bearable, key=_load), key=gain_s, default=least)
    if best is least or gain_s(best) <= 0:
        return None
    more = len(best.turns) - len(least.turns)
    return Placement(
        best.name, f"holds {held[best.name]} tokens of its prompt, with {more} turns more than {least.name}"
    )
