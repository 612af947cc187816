"""When an engine loads another version, and which. Pure.

Invariants:
- an engine loads only when it is empty, or is emptied for it (`interrupted`); one whose kind loads no versions never;
- the last engine of a version does not leave it while a live session needs it, until its hold is over
  (`gateway.core.fleet.hold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.core.fleet.hold import hold, note_holds
from gateway.core.fleet.intake import fresh, stragglers, straggling
from gateway.core.fleet.modes import mode_of
from gateway.core.fleet.order import Pool
from gateway.core.fleet.state import EngineState, FleetState
from gateway.core.types import NO_VERSION, EngineName, SessionId, TurnId, Version

LOAD_TRIES = 2
"""Loads of one version before it is given up: a second failure is hardly an accident."""
RETRY_S = 1.0
RETRY_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class RefreshDecision:
    engine: EngineName
    to_version: Version
    reason: str
    forced_sessions: tuple[SessionId, ...] = ()  # live sessions that lose their version by it
    interrupted: tuple[TurnId, ...] = ()  # turns that must leave, or pause, before it loads
    before: bool = False  # not `to_version`, but the newest before it
    served: bool = False  # until now
    again: bool = False  # an older version, for sessions that insist on it


def refresh_decisions(
    fleet: FleetState, now: float, engines: Sequence[EngineState] | None = None
) -> list[RefreshDecision]:
    """Which of `engines`, or of all, may load their host's newest now; and one for each version that waiting sessions
    insist on.

    Each is marked `refreshing`.
    """
    decisions: list[RefreshDecision] = []
    for version in sorted(fleet.insisted):
        decision = _reload(fleet, version, now)
        if decision is not None:
            decisions.append(_decided(fleet, decision, now))
    mode = mode_of(fleet.config)
    barred = mode.together and _others_run(fleet)  # engines that begin to load change nothing of it
    engines = fleet.sorted_engines() if engines is None else engines
    for engine in engines:
        if engine.turns and not mode.mixes and engine.below_since is None:
            continue  # no straggler holds it
        decision = _refresh(fleet, engine, now, barred=barred)
        if decision is not None:
            decisions.append(_decided(fleet, decision, now))
    note_holds(fleet, now, engines)
    return decisions


def _decided(fleet: FleetState, decision: RefreshDecision, now: float) -> RefreshDecision:
    engine = fleet.engines[decision.engine]
    decision = replace(decision, served=engine.status == "serving")
    engine.to("refreshing")
    engine.loading, engine.status_since = decision.to_version, now
    return decision


def _reload(fleet: FleetState, version: Version, now: float) -> RefreshDecision | None:
    """Loads an older version again, on the free engine that serves others least."""
    need, c = fleet.insisted[version], fleet.config
    coming = any(e.status == "refreshing" and e.loading == version for e in fleet.engines.values())
    pays = need.sessions >= c.strict_sessions_min or need.tokens >= c.strict_tokens_min
    if coming or not pays or fleet.num_serving(Pool(version)):
        return None
    free = [
        e
        for e in fleet.sorted_engines()
        if e.status == "serving" and version in (e.loadable or ()) and not e.turns and now >= e.refresh_not_before
    ]
    free = [e for e in free if e.loads and not _held(fleet, e, now)]
    if not free:
        return None
    engine = min(free, key=lambda e: (e.intake_open, e.version, e.name))
    reason = f"{need.sessions} sessions with {need.tokens} tokens insist on version {version}"
    return RefreshDecision(engine.name, version, reason, again=True)


def _held(fleet: FleetState, engine: EngineState, now: float) -> bool:
    """Live sessions need its version, no other engine serves it, and the hold is not over."""
    last = fleet.num_serving(Pool(engine.version)) == 1 and fleet.needed(engine.version)
    return last and (engine.intake_open or now - engine.intake_closed_at < fleet.config.version_hold_s)


def _refresh(fleet: FleetState, engine: EngineState, now: float, *, barred: bool) -> RefreshDecision | None:
    if engine.available == 0 or not engine.loads or _waits(engine, now):
        return None
    if engine.turns:
        return _interrupting(fleet, engine, now)
    if engine.status in ("joining", "fenced"):
        return _needed(fleet, engine)
    if engine.status != "serving" or not engine.newer:
        return None
    if engine.version in fleet.insisted:
        return None  # turns that wait for this version are placed here next, or give up at their deadline
    if mode_of(fleet.config).mixes:
        return RefreshDecision(engine.name, engine.available, "a newer version is here")
    if engine.intake_open or barred:
        return None
    held = hold(fleet, engine, now)
    if held is None:
        return RefreshDecision(engine.name, engine.available, "empty")
    if not held.over:
        return None
    how_long = f"held version {engine.version} for {now - engine.intake_closed_at:.3g} s"
    reason = f"{how_long} for {len(held.sessions)} sessions"
    if held.left_s > 0:
        reason = f"{reason}, until {len(fleet.waiting_since)} turns had waited {held.waited_s:.0f} s for an engine"
    return RefreshDecision(engine.name, engine.available, reason, held.sessions)


def _waits(engine: EngineState, now: float) -> bool:
    """Whether the engine waits before it retries a failed load. A version that came since is tried at once, and so is
    the one before a version that was given up."""
    early = now < engine.refresh_not_before
    return early and engine.available <= engine.tried and engine.available != engine.given_up


def _needed(fleet: FleetState, engine: EngineState) -> RefreshDecision | None:
    """The load that an engine needs before it may serve."""
    if engine.available == engine.given_up:
        reason = f"version {engine.given_up} failed {LOAD_TRIES} times: back to what it held before"
        return RefreshDecision(engine.name, engine.available, reason, before=True)
    if engine.status == "joining" and fleet.wanted(engine):
        return None
    return RefreshDecision(engine.name, engine.available, f"{engine.status}: needs a wanted version")


def _interrupting(fleet: FleetState, engine: EngineState, now: float) -> RefreshDecision | None:
    """A refresh although turns run: in a mode that mixes versions, or when stragglers have no other end."""
    if engine.status != "serving" or not engine.newer:
        return None
    if mode_of(fleet.config).mixes:
        return RefreshDecision(
            engine.name, engine.available, "a newer version is here", (), tuple(sorted(engine.turns))
        )
    if engine.intake_open or not straggling(fleet, engine, now) or fresh(fleet, engine):
        return None
    alone = fleet.num_serving(Pool(engine.version)) == 1
    stranded = fleet.live_sessions(engine.version) if alone else ()
    reason = f"{stragglers(fleet, engine)}; beyond the staleness bound"
    return RefreshDecision(engine.name, engine.available, reason, stranded, tuple(sorted(engine.turns)))


def _others_run(fleet: FleetState) -> bool:
    """Whether an engine at the barrier still runs a turn or takes sessions."""
    at_it = [e for e in fleet.engines.values() if e.status == "serving" and e.newer]
    return any(e.turns or e.intake_open for e in at_it)


def retry_s(failures: int) -> float:
    """Until the next try, after so many loads that failed in a row."""
    return min(RETRY_MAX_S, RETRY_S * 2.0 ** (failures - 1))


def load_failed(engine: EngineState, decision: RefreshDecision, error: str, *, by_engine: bool) -> None:
    """After `LOAD_TRIES` of one version an earlier one is wanted; if that fails too, the newest once more.

    `by_engine`: the engine or the snapshot was at fault, not the relay or the network.
    """
    engine.load_error = f"{engine.load_error}; then: {error}" if decision.before and engine.load_error else error
    if engine.tried != decision.to_version:
        engine.load_failures = 0
    engine.tried = decision.to_version
    if decision.before:
        engine.given_up = NO_VERSION
    elif by_engine:
        engine.load_failures += 1
        if engine.load_failures >= LOAD_TRIES:
            engine.give_up(decision.to_version)
