"""The fleet's machine under test: `install` checks its invariants after every event, and that nobody else writes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from gateway.core.fleet.events import Effect, EngineEvent, Event, RoundBegan
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.state import EngineState, FleetState

CORE = "gateway.core.fleet."


def check_engine(fleet: FleetState, engine: EngineState) -> None:
    name, serves = engine.name, engine.status == "serving"
    assert fleet.engines[name] is engine
    assert serves or not (engine.intake_open or engine.suspected or engine.suspicion or not engine.ready), name
    assert engine.suspected or not engine.suspicion, name
    assert name in fleet.beside[engine.relay], name
    assert (engine.held_since is not None) == (name in fleet.held), name
    assert all(turn_id == load.turn_id for turn_id, load in engine.turns.items()), name
    if name not in fleet._displaced:
        kept, pools = fleet._order._of.get(name, (engine.load, ()))
        assert (tuple(pools), kept.admitted) == (tuple(engine.pools), engine.admitted), f"{name} is out of order"
        assert (kept.turns, kept.tokens <= engine.tokens) == (len(engine.turns), True), f"{name} is out of order"


def check_free(fleet: FleetState) -> None:
    """No engine that could take a turn has more room than its pools say."""
    for name, (kept, pools) in fleet._order._of.items():
        if name not in fleet._displaced and kept.turns < fleet.config.max_running:
            free = fleet._free(fleet.engines[name], kept)
            assert all(fleet._order.free[pool] >= free for pool in pools), f"{name} has more room than its pools"


def check(fleet: FleetState) -> None:
    check_free(fleet)
    for engine in fleet.engines.values():
        check_engine(fleet, engine)
    assert sum(map(len, fleet.beside.values())) == len(fleet.engines)
    assert fleet.held <= fleet.engines.keys()
    assert sum(map(len, fleet._on.values())) == len(fleet.session_versions)


def _writer() -> str:
    """The module outside of `CORE` that writes, or nothing: the machine does, or an object is just made."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(CORE):
        if frame.f_code is _handle.__code__ or frame.f_code.co_name == "__init__":
            return ""
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _set(self: object, name: str, value: object) -> None:
    writer = _writer()
    assert not writer.startswith("gateway."), f"{writer} writes {name}: only the machine may"
    object.__setattr__(self, name, value)


_handle = FleetMachine.handle


@functools.wraps(_handle)
def _checked(self: FleetMachine, event: Event, now: float) -> Sequence[Effect]:
    effects = _handle(self, event, now)
    if isinstance(event, RoundBegan):
        check(self.state)
    elif isinstance(event, EngineEvent) and (engine := self.state.engines.get(event.engine)) is not None:
        check_engine(self.state, engine)
    return effects


def install() -> None:
    """For the rest of the process, however often it is called."""
    watched: Any = FleetMachine
    watched.handle = _checked
    for state in (EngineState, FleetState):
        state.__setattr__ = _set  # type: ignore[method-assign, assignment]
