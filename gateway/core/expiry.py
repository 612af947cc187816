"""When a session is over without a word of its client. Pure.

Invariants:
- a running turn, or a child that blocks its parent, keeps a session from being idle; a deadline spares nobody;
- one that has had no turn, because no engine took its first one, is over soon: nobody may come back to it;
- one that is being finished is left alone, and so is one that waits for its reward, until its window ends.
"""

from __future__ import annotations

from gateway.core.sessions import SessionState

REFUSED_IDLE_S = 240.0
"""Of a session whose first turn was refused: twice the longest Retry-After that it was told."""


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
    """Why it is to be abandoned now; empty: it goes on. `blocked`: a child lives that it waits for."""
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
