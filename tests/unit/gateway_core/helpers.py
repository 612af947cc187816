"""Short ways to say a fleet, its engines and a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.state import EngineState, FleetState, TurnLoad
from gateway.core.placing.scheduler import Demand, Placement
from gateway.core.placing.text_requests import TextDemand
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import EngineName, GroupId, SessionId, TurnId, Version
from tests.support.watched_fleet import install

install()


def engine(name: str = "e0", version: int = 1, turns: Sequence[int] = (), **fields: Any) -> EngineState:
    """A serving engine with one turn of so many tokens for each of `turns`; its host has it and all before it."""
    state = EngineState(EngineName(name), "vllm", f"http://{name}")
    state.status, state.version, state.available, state.kv_capacity_tokens = "serving", Version(version), version, 1000  # type: ignore[assignment]
    for i, tokens in enumerate(turns):
        turn = TurnId(f"{name}-{i}")
        state.turns[turn] = TurnLoad(turn, SessionId(turn), tokens, tokens)
    for field, value in fields.items():
        assert hasattr(state, field), field
        setattr(state, field, value)
    if "loadable" not in fields:
        state.loadable = frozenset(Version(v) for v in range(1, state.available + 1))
    return state


def fleet(*engines: EngineState, newest: int | None = None, **config: Any) -> FleetState:
    """`newest` is the newest that any host has, unless it is said."""
    state = FleetState(FleetConfig(**config), {e.name: e for e in engines})
    state.newest = Version(max((e.available for e in engines), default=0) if newest is None else newest)
    return state


def admit(placement: Placement, demand: Demand | TextDemand, state: FleetState) -> None:
    """Books the placement."""
    booking = demand.booking(placement)
    if isinstance(demand, Demand):  # the tests say themselves which turns run
        booking = msgspec.structs.replace(booking, load=None)
    FleetMachine(state).handle(booking, 1000.0)


def session(name: str = "s", group: str = "", version: int | None = None, on: str = "", **spec: Any) -> SessionState:
    """A session that stays on `version` and whose prefix the engine `on` holds."""
    state = SessionState(SessionSpec(SessionId(name), GroupId(group or name), **spec), 100.0, 100.0)
    state.version = None if version is None else Version(version)
    state.engine = EngineName(on) if on else None
    return state
