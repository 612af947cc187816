"""After a restart: sessions as they were, and the turns in flight go on.

Invariants:
- a session's tree is built from the turns on disk, in the order in which they ended: nothing else is its record;
- before the first request is heard, every turn that a client may ask for again can be joined;
- a turn in flight waits `recovery_grace_s` for its client, who has to notice that the gateway is back; what nobody asks
  for again is then given up, as with any client that left.
"""

from __future__ import annotations

import logging
import time

from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import GroupId, SessionId, TurnId
from gateway.data import PartialResponsePool
from gateway.data.partial_store import KeptTurn
from gateway.data.sessions import KeptSession, SessionStore
from gateway.sessions import Sessions

log = logging.getLogger(__name__)


async def recover(sessions: Sessions, store: SessionStore, pool: PartialResponsePool) -> None:
    """To be called before the fleet looks at its engines: which versions are wanted depends on live sessions."""
    sessions.live.restore_ended(await store.ended())
    named = {kept.spec.session_id: kept for kept in await store.load()}
    gone: list[SessionId] = []
    turns = 0
    for kept in named.values():
        sessions.live.restore(kept.spec, kept.api_key, kept.created_unix_s)
    for session_id in await pool.sessions():
        found = sorted(await pool.kept_turns(session_id), key=lambda turn: turn.ended_unix_s or float("inf"))
        state = _state(sessions, session_id, named.get(session_id), found)
        if state is None:
            gone.append(session_id)
            continue
        turns += sum(_restore_turn(sessions, state, named.get(session_id), turn) for turn in found)
        if session_id in named:
            _restore_rewards(state, named[session_id])
    await pool.forget_sessions(gone)
    if named or turns:
        log.info("recovered %d sessions; %d turns in flight go on", len(named), turns)


def _state(
    sessions: Sessions, session_id: SessionId, kept: KeptSession | None, turns: list[KeptTurn]
) -> SessionState | None:
    """A session's state, or one for calls without a session that may be asked for again; None: nobody can."""
    if kept is not None:
        return sessions.live.get(session_id)
    since = time.time() - sessions.config.idempotency_window_s
    if all(not t.record.request.origin.unnamed or (t.ended_unix_s or since + 1) < since for t in turns):
        return None
    return sessions.live.restore(SessionSpec(session_id, GroupId(session_id), ephemeral=True, train=False))


def _restore_turn(sessions: Sessions, state: SessionState, kept: KeptSession | None, turn: KeptTurn) -> bool:
    """Whether the turn is in flight."""
    if turn.outcome in ("stop", "length"):
        state.restore_turn(turn.record)
        if kept is not None and (told := kept.messages.get(turn.record.request.turn_id)) is not None:
            state.tell(turn.record.request.turn_id, *told)
    if turn.ended_unix_s is not None:
        sessions.keep(state, turn.record, turn.ended_unix_s)
        return False
    sessions.resume(state, turn.record)
    return True


def _restore_rewards(state: SessionState, kept: KeptSession) -> None:
    for turn_id, (own, leaf) in kept.rewards.items():
        turn = state.tree.turns.get(TurnId(turn_id))
        if turn is not None:
            turn.reward, turn.leaf_reward = own, leaf
    if kept.unrewarded is not None:
        state.end("finished")
        state.unrewarded = kept.unrewarded
