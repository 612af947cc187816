"""Requests that are forwarded as text: which engines could take one, which does, and what that books. Pure.

Such a request has no session, record or token ids: it is a running turn of its engine, and nothing else. So it ends
where it began; a refresh waits for it, or cuts it, depending on the mode.

Invariants:
- it goes where a new session might: to the least loaded engine with an open intake, of the newest version that has
  room;
- once its client has received a version, it continues under no other;
- it counts as admitted, so that an intake closes for a newer version even if only such requests come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.core.fleet.events import Placed
from gateway.core.fleet.order import Pool
from gateway.core.fleet.state import EngineState, FleetState, TurnLoad
from gateway.core.placing.scheduler import Placement, Wait
from gateway.core.types import EngineName, SessionId, TurnId, Version
from protos.engines import ENGINE_KINDS

TextApi = Literal["chat", "completion"]
TEXT_ROUTES: Mapping[str, Mapping[str, str]] = {name: kind.text_routes for name, kind in ENGINE_KINDS.items()}
"""By kind of engine: the paths of its text routes."""
TRIES_MAX = 3
"""Engines that one request is tried on: it may be the request that breaks them."""
BYTES_PER_TOKEN = 4
"""Bytes of a body for each token, as an estimate: English text has about as many."""


@dataclass(frozen=True, slots=True)
class TextDemand:
    """What a forwarded request needs. `tokens` is an estimate; `avoid`: engines that just failed it; `version`: the one
    that its client has received, if any."""

    turn_id: TurnId
    api: TextApi
    tokens: int
    avoid: frozenset[EngineName] = frozenset()
    version: Version | None = None
    reserved: frozenset[EngineName] = frozenset()  # engines whose next room is another's, who waited for it long

    def booking(self, placement: Placement) -> Placed:
        load = TurnLoad(self.turn_id, SessionId(""), self.tokens, self.tokens, relayed=True)
        return Placed(placement.engine, None, load)


@dataclass(frozen=True, slots=True)
class Unable:
    """No engine of this fleet ever could."""

    reason: str
    hint: str


def place_text(demand: TextDemand, fleet: FleetState) -> Placement | Wait | Unable:
    """The least loaded engine of the newest version that has room."""

    def able(engine: EngineState) -> bool:
        return demand.api in TEXT_ROUTES[engine.kind] and engine.name not in demand.reserved

    def preferred(engine: EngineState) -> bool:
        return engine.name not in demand.avoid and able(engine)

    versions = fleet.served(opened=True) if demand.version is None else [demand.version]
    for suits in (preferred, able) if demand.avoid else (able,):
        for version in versions:
            engine = fleet.least_loaded(Pool(version, True), demand.tokens, suits)
            if engine is not None:
                return Placement(engine.name, f"least loaded of version {version}")
    return _refusal(demand, fleet)


def _refusal(demand: TextDemand, fleet: FleetState) -> Wait | Unable:
    able = [e for e in fleet.engines.values() if demand.api in TEXT_ROUTES[e.kind]]
    if not able:
        return _unable(demand.api, fleet)
    if demand.version is not None and not any(e.version == demand.version for e in able):
        return Unable(f"no engine has version {demand.version} any more", "send the request again")
    return Wait("engines that take text are full, or load a version")


def _unable(api: TextApi, fleet: FleetState) -> Unable:
    kinds = sorted({e.kind for e in fleet.engines.values()})
    if not kinds:
        return Unable("this gateway has no engine", "name one with --engine, or add it with POST /admin/engines")
    takers = sorted(kind for kind, routes in TEXT_ROUTES.items() if api in routes)
    return Unable(
        f"no engine here takes a {api} as text: there are only engines of kind {', '.join(kinds)}",
        f"add one of kind {' or '.join(takers)}, name a session, or run the gateway without --relay-text",
    )
