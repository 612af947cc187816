"""Recovery after a restart: restores sessions, and resumes the turns in flight.

Invariants:
- a session's tree is built from the turns on disk, in the order in which they ended: nothing else is its record;
- every turn that a retry may request can be joined before the gateway listens;
- a session with a row that cannot be read is logged by name and counts as abandoned; its rows stay as they are. The
  others go on;
- a turn in flight waits `recovery_grace_s` for its client, which has to notice that the gateway is back. It is then
  aborted, as after any client that left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from gateway.core.fleet.events import SessionEnded
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import GroupId, SessionId, TurnId
from gateway.sessions.turn_service import TurnService
from gateway.store import PartialResponsePool
from gateway.store.partial_rows import KeptTurn
from gateway.store.sessions import KeptSession, SessionStore
from protos.errors import Corrupt
from protos.foreign_text import quoted
from protos.telemetry.logs import about

log = logging.getLogger(__name__)


async def recover(sessions: TurnService, store: SessionStore, pool: PartialResponsePool) -> None:
    """Call it before the fleet polls its engines: which versions are wanted depends on the live sessions."""
    sessions.live.restore_ended(await store.ended())
    named = dict(await store.load())
    gone: list[SessionId] = []
    turns = 0
    for kept in named.values():
        if kept is not None:
            sessions.live.restore(kept.spec, kept.api_key, kept.created_unix_s)
    for session_id in await pool.sessions():
        kept = named.get(session_id)
        try:
            if session_id in named and kept is None:
                raise Corrupt("its own row is damaged")
            found = await pool.kept_turns(session_id)
            state = _state(sessions, session_id, kept, found)
            if state is None:
                gone.append(session_id)
                continue
            turns += _restore_turns(sessions, state, kept, found)
        except (Corrupt, ValueError) as e:
            log.error(
                "session %s cannot go on: %s; it counts as abandoned, and its rows stay as they are",
                quoted(session_id),
                e,
                extra=about(session=session_id),
            )
            sessions.give_up(session_id)
    for session_id, kept in named.items():
        if kept is None:
            sessions.give_up(session_id)
    await pool.forget_sessions(gone)
    if named or turns:
        log.info("recovered %d sessions; %d turns in flight go on", len(sessions.live), turns)


def _state(
    sessions: TurnService, session_id: SessionId, kept: KeptSession | None, turns: list[KeptTurn]
) -> SessionState | None:
    """A session's state, or one for a call without a session that a retry may still join; None: its window is over."""
    if kept is not None:
        return sessions.live.get(session_id)
    since = time.time() - sessions.config.idempotency_window_s
    if all(not t.record.request.origin.unnamed or (t.ended_unix_s or since + 1) < since for t in turns):
        return None
    trace = turns[0].record.request.origin.trace
    return sessions.live.restore(SessionSpec(session_id, GroupId(session_id), ephemeral=True, train=False, trace=trace))


def _restore_turns(
    sessions: TurnService, state: SessionState, kept: KeptSession | None, turns: Sequence[KeptTurn]
) -> int:
    """Returns how many are in flight. Everything that may raise Corrupt comes before the first turn is resumed."""
    for turn in turns:
        _restore_record(state, kept, turn)
    for turn in turns:
        parent = turn.record.request.parent
        if turn.outcome is None and parent is not None and parent not in state.tree:
            raise Corrupt(f"turn {turn.record.request.turn_id} goes on from {parent}, which is not there")
    in_flight = [_restore_turn(sessions, state, turn) for turn in turns]
    if kept is not None:
        _restore_rewards(sessions, state, kept)
    return sum(in_flight)


def _restore_record(state: SessionState, kept: KeptSession | None, turn: KeptTurn) -> None:
    if turn.outcome in ("stop", "length"):
        state.restore_turn(turn.record)
        state.seen(turn.record.request.turn_id, turn.seen)
        if kept is not None and (messages := kept.messages.get(turn.record.request.turn_id)) is not None:
            state.note_messages(turn.record.request.turn_id, *messages)


def _restore_turn(sessions: TurnService, state: SessionState, turn: KeptTurn) -> bool:
    """Returns whether the turn is in flight."""
    if turn.outcome is None:
        sessions.resume(state, turn.record)
        return True
    sessions.restore_turn(state, turn.record, turn.ended_unix_s or time.time())
    return False


def _restore_rewards(sessions: TurnService, state: SessionState, kept: KeptSession) -> None:
    for turn_id, (own, leaf) in kept.rewards.items():
        turn = state.tree.turns.get(TurnId(turn_id))
        if turn is not None:
            turn.reward, turn.leaf_reward = own, leaf
    if kept.unrewarded is not None:
        state.end("finished")
        state.unrewarded = kept.unrewarded
        sessions.fleet.send(SessionEnded(state))
