"""What a plan of moves is, whichever planner made it. Pure.

A plan says where the sessions of an engine go (`Route`); its moves are listed when they begin, or somebody reads them.
It is made in parts, each of bounded work: the event loop that plans also carries every token of the fleet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from gateway.core.packing.engine_views import SessionLoad
from gateway.core.types import EngineName, SessionId, TurnId, Version


@dataclass(frozen=True, slots=True)
class RepackConfig:
    moves_max: int = 4  # of one session in its life
    prefill_tokens_per_s: float = 1000.0  # price of moving: every token of a moved session is computed again


class Move(msgspec.Struct, frozen=True, gc=False):
    turn_id: TurnId | None
    session_id: SessionId
    source: EngineName
    destination: EngineName
    tokens: int  # to prefill again, for a waiting session when it comes back
    price_s: float

    @property
    def key(self) -> str:
        return self.turn_id or self.session_id


class Freed(msgspec.Struct, frozen=True):
    """One engine that the plan empties, with the price of its moves and the gain, in engine seconds."""

    engine: EngineName
    price_s: float
    gain_s: float
    busy: float  # share of B that it ran
    reason: str = ""  # where its sessions go, in a sentence


class Route(msgspec.Struct, frozen=True):
    """Where the sessions of one engine go: all to the only destination, or each to its own."""

    source: EngineName
    destinations: Sequence[EngineName]
    num_sessions: int
    list_sessions: Callable[[], Sequence[SessionLoad]]


@dataclass(frozen=True)
class Plan:
    """`freed` engines are empty once the moves are done. `reasons` says, per engine looked at, why or why not."""

    version: Version
    routes: tuple[Route, ...] = field(compare=False)
    freed: tuple[Freed, ...]
    reasons: tuple[str, ...]
    prefill_tokens_per_s: float

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves in the order in which they were planned, with the tokens of that moment."""
        return tuple(
            Move(s.turn_id, s.session_id, route.source, there, s.tokens, s.tokens / self.prefill_tokens_per_s)
            for route in self.routes
            for s, there in zip(route.list_sessions(), itertools.cycle(route.destinations), strict=False)
        )

    @property
    def num_moves(self) -> int:
        return sum(route.num_sessions for route in self.routes)

    @property
    def price_s(self) -> float:
        return sum(f.price_s for f in self.freed)

    @property
    def gain_s(self) -> float:
        return sum(f.gain_s for f in self.freed)


def whole(parts: Sequence[Plan]) -> Plan:
    """The plan that was made in `parts`."""
    return Plan(
        parts[0].version,
        tuple(route for part in parts for route in part.routes),
        tuple(sorted((freed for part in parts for freed in part.freed), key=lambda f: f.engine)),
        tuple(reason for part in parts for reason in part.reasons),
        parts[0].prefill_tokens_per_s,
    )
