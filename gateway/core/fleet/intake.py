"""When an engine takes new sessions: its intake opens after a refresh, and closes again. Pure.

Invariants:
- an intake is open on a `serving` engine alone;
- a closed engine with a newer version at hand is below `min_util` for at most `drain_max_s`: then it takes a batch
  more, or, beyond the staleness bound, its stragglers leave it. (Not in mode `barrier`, which is there to wait.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.fleet.modes import Drain, mode_of
from gateway.core.fleet.state import EngineState, FleetState
from gateway.core.types import EngineName


@dataclass(frozen=True, slots=True)
class IntakeChange:
    engine: EngineName
    open: bool
    reason: str


def intake_changes(fleet: FleetState, now: float, engines: Sequence[EngineState] | None = None) -> list[IntakeChange]:
    """Applies and returns what has to open or close now, of `engines` or of all."""
    mode, changes = mode_of(fleet.config), list[IntakeChange]()
    for engine in fleet.sorted_engines() if engines is None else engines:
        serves, newer = engine.status == "serving", engine.newer
        engine.note_use(now, below=serves and newer and _below(fleet, engine))
        if serves and (why := _why(fleet, mode, engine, now, newer=newer)):
            changes.append(IntakeChange(engine.name, not engine.intake_open, why))
            engine.close_intake(now) if engine.intake_open else engine.open_intake(now)
    return changes


def _why(fleet: FleetState, mode: Drain, engine: EngineState, now: float, *, newer: bool) -> str:
    """Why a serving engine's intake opens or closes now; empty if it does not."""
    c = fleet.config
    if mode.mixes:
        return "" if engine.intake_open else "a newer version interrupts no turn"
    if engine.intake_open:
        if newer and not engine.reopened and engine.admitted >= mode.intake_min(c):
            return f"version {engine.available} is here; {engine.admitted} admitted"
        if newer and not engine.turns:
            return f"version {engine.available} is here and nothing runs"
        if engine.admitted >= c.intake_batch:
            return f"batch of {c.intake_batch} admitted"
        aged = now - engine.intake_opened_at >= c.intake_age_s and engine.admitted
        return f"open for {c.intake_age_s:g} s" if aged else ""
    if not newer:
        return f"nothing newer than version {engine.version}" if len(engine.turns) < c.max_running else ""
    if straggling(fleet, engine, now) and fresh(fleet, engine):
        return f"{stragglers(fleet, engine)}; within the staleness bound"
    return ""


def _below(fleet: FleetState, engine: EngineState) -> bool:
    """Its intake is closed, and it runs few turns."""
    return not engine.intake_open and len(engine.turns) < fleet.config.min_util * fleet.config.max_running


def straggling(fleet: FleetState, engine: EngineState, now: float) -> bool:
    """Few turns have kept the engine from its refresh for too long."""
    since = engine.below_since
    if since is None or not engine.turns:
        return False
    return now - since >= mode_of(fleet.config).patience_s(fleet.config)


def fresh(fleet: FleetState, engine: EngineState) -> bool:
    """A batch admitted now would be within the staleness bound."""
    return fleet.newest - engine.version < fleet.config.staleness_max


def stragglers(fleet: FleetState, engine: EngineState) -> str:
    """For the reason of a decision."""
    held = f"{len(engine.turns)} turns of {engine.tokens} tokens"
    return f"stragglers held it for {fleet.config.drain_max_s:g} s ({held})"
