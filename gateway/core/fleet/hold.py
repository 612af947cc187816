"""Holds: an empty engine stays on its version for live sessions that no other engine could continue. Pure.

An agent may need minutes for a tool call; without a hold its next turn would find no engine of its version. With one,
an engine is idle meanwhile. Invariants:
- a hold ends `version_hold_s` after the intake closed, in any case;
- it ends sooner where turns wait and no other engine takes new sessions: once they have waited, all together, as long
  as the sessions are worth by their policies (`HOLD_WORTH_S`). The sessions then follow their policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.core.fleet.modes import mode_of
from gateway.core.fleet.order import Pool
from gateway.core.fleet.state import EngineState, FleetState
from gateway.core.types import SessionId, VersionPolicy

HOLD_WORTH_S: Mapping[VersionPolicy, float] = {"segment": 5.0, "strict": 30.0, "fail": 60.0}
"""The worth of one session, in seconds that one turn waits: a record of two versions is a small loss, a version that is
loaded again for it costs two loads, and a session that fails is lost with all that was computed for it."""
NAMED_MAX = 4
"""Sessions that a sentence names."""


@dataclass(frozen=True, slots=True)
class Hold:
    """`left_s`: until the clock ends it. `waited_s`: by turns that no engine takes meanwhile, of `worth_s` at most."""

    sessions: tuple[SessionId, ...]
    left_s: float
    waited_s: float
    worth_s: float

    @property
    def over(self) -> bool:
        return self.left_s <= 0 or self.waited_s >= self.worth_s

    @property
    def who(self) -> str:
        return named(self.sessions)


def named(sessions: tuple[SessionId, ...]) -> str:
    """Their names, for a sentence."""
    more = f" and {len(sessions) - NAMED_MAX} more" if len(sessions) > NAMED_MAX else ""
    return f"session{'s' * (len(sessions) > 1)} {', '.join(sessions[:NAMED_MAX])}{more}"


def hold(fleet: FleetState, engine: EngineState, now: float) -> Hold | None:
    """The hold that keeps the engine from the newer version that it could load; None: there is none."""
    empty = not engine.turns and not engine.intake_open and engine.status == "serving" and engine.newer
    if not empty or mode_of(fleet.config).mixes or fleet.num_serving(Pool(engine.version)) > 1:
        return None
    if not fleet.needed(engine.version):
        return None
    sessions = fleet.live_sessions(engine.version)
    worth_s = sum(HOLD_WORTH_S[fleet.policies.get(session, "segment")] for session in sessions)
    left_s = fleet.config.version_hold_s - (now - engine.intake_closed_at)
    return Hold(sessions, left_s, _waited(fleet, engine, now), worth_s)


def note_holds(fleet: FleetState, now: float, engines: Iterable[EngineState] | None = None) -> None:
    """Measures how long each of `engines`, or of all, has been held since its intake closed; call it after every
    change."""
    for engine in fleet.engines.values() if engines is None else engines:
        if engine.intake_open or engine.status != "serving":
            if engine.held_since is not None or engine.held_before_s:
                engine.held_since, engine.held_before_s = None, 0.0
        elif engine.turns or hold(fleet, engine, now) is None:
            if engine.held_since is not None:
                engine.held_before_s, engine.held_since = held_s(engine, now), None
        elif engine.held_since is None:
            engine.held_since = now
        (fleet.held.discard if engine.held_since is None else fleet.held.add)(engine.name)


def held_s(engine: EngineState, now: float) -> float:
    """How long the engine has been held, without the time in which a turn of such a session ran in between."""
    return engine.held_before_s + (0.0 if engine.held_since is None else now - engine.held_since)


def _waited(fleet: FleetState, engine: EngineState, now: float) -> float:
    """Seconds that all turns in the queue waited while the engine was held; 0 if another engine may take them."""
    if any(e.intake_open or e.status == "refreshing" for e in fleet.engines.values() if e is not engine):
        return 0.0
    held = held_s(engine, now)
    return sum(min(held, now - since) for since in fleet.waiting_since)
