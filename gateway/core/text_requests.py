"""Requests that are relayed as text: which engines could take one, which does, and what that books. Pure.

Such a request has no session, record or token ids: it is a running turn of the engine that it was given to, and nothing
else. So it ends where it began; a refresh waits for it, or cuts it, as the mode has it.

Invariants:
- it goes where a new session might: to an engine whose intake is open, of the newest version of which one has room;
- one whose client was told a version goes on under no other;
- it counts as admitted, so that an intake closes for a newer version though nothing but such requests come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.core.fleet import EngineState, FleetState, TurnLoad
from gateway.core.scheduler import Placement, Wait
from gateway.core.types import EngineName, SessionId, TurnId, Version

TextApi = Literal["chat", "completion"]
TEXT_ROUTES: Mapping[str, Mapping[TextApi, str]] = {
    "vllm": {"chat": "/v1/chat/completions", "completion": "/v1/completions"},
    "sglang": {"chat": "/v1/chat/completions", "completion": "/v1/completions"},
    "embedded": {"completion": "/v1/completions"},  # no chat template there
}
"""By kind of engine: where it takes text."""
TRIES_MAX = 3
"""Engines that one request may fail on: it may be the request that breaks them."""
BYTES_PER_TOKEN = 4
"""Of a body: English text has about as many, and nobody counts here."""


@dataclass(frozen=True, slots=True)
class TextDemand:
    """What a relayed request needs. `tokens` is an estimate; `avoid`: engines that just failed it; `version`: what its
    client was told, if it was told already."""

    turn_id: TurnId
    api: TextApi
    tokens: int
    avoid: frozenset[EngineName] = frozenset()
    version: Version | None = None
    reserved: frozenset[EngineName] = frozenset()  # engines whose next room is another's, who waited for it long

    @property
    def load(self) -> TurnLoad:
        return TurnLoad(self.turn_id, SessionId(""), self.tokens, self.tokens, relayed=True)


@dataclass(frozen=True, slots=True)
class Unable:
    """No engine of this fleet ever could."""

    reason: str
    hint: str


def place_text(demand: TextDemand, fleet: FleetState) -> Placement | Wait | Unable:
    """The least loaded engine of the newest version that has room."""
    able = [e for e in fleet.engines.values() if demand.api in TEXT_ROUTES[e.kind]]
    if not able:
        return _unable(demand.api, fleet)
    if demand.version is not None:
        able = [e for e in able if e.version == demand.version]
    if not able:
        return Unable(f"no engine has version {demand.version} any more", "send the request again")

    def order(engine: EngineState) -> tuple[bool, int, int, int, str]:
        """Engines as loaded as each other take turns."""
        return (engine.name in demand.avoid, -engine.version, len(engine.turns), engine.relayed, engine.name)

    for engine in sorted(able, key=order):
        if engine.name not in demand.reserved and engine.intake_open and fleet.has_room(engine, demand.tokens):
            return Placement(engine.name, f"least loaded of version {engine.version}")
    return Wait("engines that take text are full, or load a version")


def admit_text(placement: Placement, demand: TextDemand, fleet: FleetState) -> None:
    """Books a placement."""
    engine = fleet.engines[placement.engine]
    engine.admitted += 1
    engine.relayed += 1
    engine.enter(demand.load)


def _unable(api: TextApi, fleet: FleetState) -> Unable:
    kinds = sorted({e.kind for e in fleet.engines.values()})
    if not kinds:
        return Unable("no engine is known here", "name one with --engine, or add it with POST /admin/engines")
    takers = sorted(kind for kind, routes in TEXT_ROUTES.items() if api in routes)
    return Unable(
        f"no engine here takes a {api} as text: there are only engines of kind {', '.join(kinds)}",
        f"add one of kind {' or '.join(takers)}, name a session, or run the gateway without --relay-text",
    )
