"""When an engine takes new sessions: its intake opens after a refresh, and closes again. Pure.

Invariants:
- an intake is open on a `serving` engine alone;
- a closed engine with a newer version at hand is below `min_util` for at most `drain_max_s`: then it takes a batch
  more, or, beyond the staleness bound, its stragglers leave it. (Not in mode `barrier`, which is there to wait.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.core.fleet.modes import mode_of
from gateway.core.fleet.state import EngineState, FleetState
from gateway.core.types import EngineName


@dataclass(frozen=True, slots=True)
class IntakeChange:
    engine: EngineName
    open: bool
    reason: str


def intake_changes(fleet: FleetState, now: float, engines: Sequence[EngineState] | None = None) -> list[IntakeChange]:
    """Applies and returns what has to open or close now, of `engines` or of all."""
    engines = fleet.sorted_engines() if engines is None else engines
    for engine in engines:
        engine.note_use(now, below=_below(fleet, engine))
    changes = [c for engine in engines if engine.status == "serving" for c in _intake(fleet, engine, now)]
    for change in changes:
        engine = fleet.engines[change.engine]
        engine.open_intake(now) if change.open else engine.close_intake(now)
    return changes


def _intake(fleet: FleetState, engine: EngineState, now: float) -> Iterable[IntakeChange]:
    c, mode, newer = fleet.config, mode_of(fleet.config), engine.newer
    if mode.mixes:
        if not engine.intake_open:
            yield IntakeChange(engine.name, True, "a newer version interrupts no turn")
    elif engine.intake_open:
        if newer and not engine.reopened and engine.admitted >= mode.intake_min(c):
            yield IntakeChange(engine.name, False, f"version {engine.available} is here; {engine.admitted} admitted")
        elif newer and not engine.turns:
            yield IntakeChange(engine.name, False, f"version {engine.available} is here and nothing runs")
        elif engine.admitted >= c.intake_batch:
            yield IntakeChange(engine.name, False, f"batch of {c.intake_batch} admitted")
        elif now - engine.intake_opened_at >= c.intake_age_s and engine.admitted:
            yield IntakeChange(engine.name, False, f"open for {c.intake_age_s:g} s")
    elif not newer and len(engine.turns) < c.max_running:
        yield IntakeChange(engine.name, True, f"nothing newer than version {engine.version}")
    elif newer and straggling(fleet, engine, now) and fresh(fleet, engine):
        yield IntakeChange(engine.name, True, f"{stragglers(fleet, engine)}; within the staleness bound")


def _below(fleet: FleetState, engine: EngineState) -> bool:
    """It is closed, runs few turns, and a newer version waits for it."""
    closed = engine.status == "serving" and not engine.intake_open and engine.newer
    return closed and len(engine.turns) < fleet.config.min_util * fleet.config.max_running


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
