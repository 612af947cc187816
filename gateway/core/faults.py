"""Faults that repeat: an engine on which turn after turn fails gets none for a while, and a turn that fails wherever it
goes is lost. Pure.

Invariants:
- one turn may be what is wrong itself, so an engine is out only after `FAULTS_MAX` different ones failed there, and
  none ended well in between;
- an engine that is out comes back by itself: its next turn decides, and each further failure doubles the time. Another
  incarnation, and another version, begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.core.types import EngineName, TurnId

FAULTS_MAX = 3
OUT_S, OUT_MAX_S = 1.0, 60.0
WAIT_MAX_S = 5.0
"""For an engine that is out, when all are: beyond it a turn that an engine has begun is lost at once, before its client
is sent anything but an error of its own status."""
CUTS_MAX = 20
"""Of one turn: another engine does not help against whatever is wrong."""
CUTS_IN_PLACE_MAX = 6
"""In a row, without a token in between."""


@dataclass(slots=True)
class Faults:
    """Of one engine. `turns`: those that failed since one ended well; `until`: it is out, by the monotonic clock.
    `why`: the failure that put it out last; empty once a turn has ended well."""

    turns: set[TurnId] = field(default_factory=set)
    times_out: int = 0
    until: float = 0.0
    why: str = ""

    def failed(self, turn_id: TurnId, now: float, why: str = "") -> float:
        """Notes a turn that failed here; returns for how long the engine is out from now on, or 0."""
        if now < self.until:
            return 0.0  # it began before
        if len(self.turns) < FAULTS_MAX:
            self.turns.add(turn_id)
        if len(self.turns) < FAULTS_MAX:
            return 0.0
        out_s = min(OUT_MAX_S, OUT_S * 2.0**self.times_out)
        self.times_out, self.until, self.why = min(self.times_out + 1, 10), now + out_s, why
        return out_s

    def ended_well(self) -> None:
        self.turns.clear()
        self.times_out, self.why = 0, ""

    def left_s(self, now: float) -> float:
        return max(0.0, self.until - now)


def soonest_s(faults: Iterable[Faults], now: float) -> float:
    """Until the first of these engines takes turns again; 0 if one is not out."""
    return min((one.left_s(now) for one in faults), default=0.0)


@dataclass(slots=True)
class Cuts:
    """Of one turn. `engines`: those that failed it since its last token, in order."""

    num: int = 0
    at: int = -1
    engines: list[EngineName] = field(default_factory=list)

    def add(self, engine: EngineName, num_tokens: int, *, full: bool = False) -> str:
        """Notes a cut after so many tokens; `full`: the engine had no room. Returns why the turn is lost; empty: it
        goes on."""
        if num_tokens != self.at:
            self.at, self.engines = num_tokens, []
        if not full:
            self.engines.append(engine)
        self.num += 1
        if len(self.engines) >= CUTS_IN_PLACE_MAX:
            where = ", ".join(sorted(set(self.engines)))
            return f"it failed {len(self.engines)} times in a row after {num_tokens} tokens, on {where}"
        return f"its stream was cut {self.num} times" if self.num >= CUTS_MAX else ""
