"""What a live session does now, in one word, for displays. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, TurnRecord

Phase = Literal["queue", "prefill", "decode", "move", "tool", "idle", "reward"]
"""`queue`: a turn waits for its first engine. `move`: a turn has left an engine and is not on the next yet. `prefill`:
an engine has the turn, and no token came from there yet. `decode`: tokens come. `tool`: no turn runs; the agent works.
`idle`: nor was there a request for long, and nothing says that its agent is alive. `reward`: it is finished but for its
reward."""
PHASES: tuple[Phase, ...] = ("decode", "prefill", "move", "queue", "tool", "idle", "reward")
"""In the order of precedence, for a session that runs several turns."""


class SessionRow(msgspec.Struct, frozen=True, array_like=True):
    """A session in the feed. `engine`: where it runs, or was last placed; "" before its first place. `since_unix_s`:
    when the phase began; 0: not recorded. `turns`: complete ones. `running`: turns now."""

    phase: Phase
    engine: str
    version: int | None
    since_unix_s: float
    turns: int
    running: int
    moves: int


def session_row(
    state: SessionState, running: Iterable[tuple[TurnRecord, EngineName | None]], *, idle: bool = False
) -> SessionRow:
    """`running`: the session's turns, each with the engine that streams it, if one does. `idle`: nothing keeps it
    (`gateway.core.admission.Keeper`)."""
    phase: Phase = "reward" if state.unrewarded is not None else "idle" if idle else "tool"
    engine, since = state.engine, state.touched_unix_s
    for record, at in running:
        found = _phase_of(record, at)
        if PHASES.index(found) < PHASES.index(phase):
            phase, engine, since = found, at or state.engine, _since(found, record, state)
    turns, num_running = len(state.tree), len(state.running)
    return SessionRow(phase, engine or "", state.version, round(since, 3), turns, num_running, state.moves)


def _phase_of(record: TurnRecord, engine: EngineName | None) -> Phase:
    if engine is None:
        return "move" if record.segments else "queue"
    return "decode" if len(record.token_ids) > record.segments[-1].start else "prefill"


def _since(phase: Phase, record: TurnRecord, state: SessionState) -> float:
    if phase == "prefill":
        return record.segments[-1].started_unix_s
    return state.touched_unix_s if phase == "queue" else 0.0
