"""When a session expires without a request of its client. Pure.

Invariants:
- a session is not idle while a turn runs, or a child that blocks its parent lives; a deadline has no exception;
- a session without a turn, because no engine took its first one, expires sooner: its client may never come back;
- of calls that named no session, only so many are kept for others to continue;
- a session that is being finished does not expire, nor one that waits for its reward, until its window ends.
"""

from __future__ import annotations

from collections.abc import Collection

from gateway.core.sessions import SessionState

REFUSED_IDLE_S = 240.0
"""Idle time of a session whose first turn was refused: twice the longest Retry-After in a response."""

UNNAMED_MAX = 10_000
"""Idle sessions of calls that named none: clients that never come back make one with each call."""


def crowding(states: Collection[SessionState], most: int) -> list[SessionState]:
    """The idle sessions of unnamed calls beyond `most`, the longest idle first."""
    if len(states) <= most:
        return []
    idle = sorted(
        (state for state in states if state.spec.unnamed and state.phase == "live" and not state.running),
        key=lambda state: (state.touched_unix_s, state.session_id),
    )
    return idle[: max(0, len(idle) - most)]


def why_over(
    state: SessionState,
    now: float,
    *,
    idle_s: float,
    reward_window_s: float,
    finishing: bool = False,
    blocked: bool = False,
    parent_ended: bool = False,
) -> str:
    """Why the session is to be abandoned now; empty: it is not. `blocked`: a child lives that it waits for."""
    if state.unrewarded is not None:
        late = state.unrewarded.until_unix_s < now
        return f"no reward came within {reward_window_s:g} s" if late else ""
    if state.phase != "live" or finishing:
        return ""
    deadline = state.spec.deadline_unix_s
    if deadline is not None and deadline < now:
        return "its deadline is over"
    if parent_ended:
        return f"its parent {state.spec.parent_session_id} has ended"
    if state.running or blocked:
        return ""
    refused = not state.turns and state.engine is None and bool(state.last_dropped)
    idle_s = min(idle_s, REFUSED_IDLE_S) if refused else idle_s
    why = f"no engine took its first turn, and it was idle for {idle_s:g} s" if refused else f"idle for {idle_s:g} s"
    return why if state.touched_unix_s < now - idle_s else ""
