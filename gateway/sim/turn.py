"""One turn under virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.fleet import TurnLoad
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, TurnId


@dataclass(slots=True, eq=False)
class SimTurn:
    """`left`: tokens still to come, known to the simulation only."""

    load: TurnLoad
    session: SessionState
    length: int
    started_at: float
    left: float
    generated: float = 0.0
    engine: EngineName | None = None
    asked_at: float = 0.0  # by its client
    left_at: float = 0.0  # when it last left an engine

    @property
    def turn_id(self) -> TurnId:
        return self.load.turn_id

    def grow(self, tokens: float) -> None:
        before = int(self.generated)
        self.generated += tokens
        self.left -= tokens
        self.load.tokens += int(self.generated) - before
