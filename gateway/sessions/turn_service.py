"""The turns of sessions: started, joined by retries, resumed after a restart. Implements `gateway.ports.Turns`.

Invariants:
- a turn can be joined from its beginning until the end of its idempotency window;
- a call without a session is a session for its turns alone, and is forgotten with the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gateway.config import GatewayConfig
from gateway.core.endings import Ended
from gateway.core.fleet.events import Learnt, SessionRestored
from gateway.core.fleet.state import staleness_histogram
from gateway.core.packing.lengths import TurnLengths
from gateway.core.placing.event_size import tokens_per_event
from gateway.core.placing.reasons import closed_reasons
from gateway.core.retries import Attention, Call, attempt_of
from gateway.core.sessions import SessionState
from gateway.core.spans import turn_span
from gateway.core.types import EngineName, SessionId, TurnId, TurnRecord, TurnRequest, Version
from gateway.fleet.fleet import Fleet
from gateway.ports import Message, ModelInfo, SessionIdentity, SessionView
from gateway.runtime.clock import unix_s
from gateway.runtime.counters import Counters
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.trainer import Trainer, count
from gateway.store import PartialResponsePool, Timeline
from gateway.turns.joinable import JoinableTurns
from gateway.turns.running import RunningTurn
from protos.errors import Conflict, LaminarError, Unavailable

CONCLUDE_PATIENCE_S = 1.0
"""For a client that has left, or is just receiving its answer, when its session is finished."""


class TurnService:
    def __init__(
        self,
        config: GatewayConfig,
        live: SessionRegistry,
        fleet: Fleet,
        trainer: Trainer,
        *,
        pool: PartialResponsePool,
        timeline: Timeline,
        eos_ids: frozenset[int] = frozenset(),
        vocab_size: int = 1 << 31,
    ) -> None:
        self.config, self.live, self.fleet = config, live, fleet
        self.tracer = live.tracer
        self.counters = Counters()
        self.eos_ids, self.vocab_size = eos_ids, vocab_size
        self.joinable = JoinableTurns(config.idempotency_window_s)
        self.lengths = TurnLengths()
        self._trainer, self._pool, self._timeline = trainer, pool, timeline
        self._started_unix_s = int(time.time())

    # -- gateway.ports.Turns

    def models(self) -> Sequence[ModelInfo]:
        """Also from another thread, while engines come and go."""
        config = self.config
        kinds = frozenset(engine.kind for engine in list(self.fleet.state.engines.values()))
        context = self.fleet.context_tokens
        away = "" if context else closed_reasons(self.fleet.state, time.monotonic())
        return [ModelInfo(config.model, context, self._started_unix_s, config.penalties_move, kinds, away)]

    def tokens_per_event(self, *, streamed: bool) -> int:
        running, token_s = len(self.joinable.running), self.fleet.state.token_s
        return tokens_per_event(running, token_s, streamed=streamed, configured=self.config.tokens_per_event)

    def session_of_key(self, api_key: str) -> SessionId | None:
        return self.live.of_key(api_key)

    async def open_session(self, identity: SessionIdentity, turns: int = 1) -> SessionView:
        if self.live.draining:
            raise Unavailable("the gateway is shutting down", hint="send the request again soon")
        async with self.live.reserved(identity.session_id):
            self.live.bounds.check_turns(self.live.owner_for(identity), turns)
            state = self.live.named_by(identity)
        state.check_open(turns)
        return self._view(state)

    def session_of_turn(self, turn_id: TurnId) -> SessionView | None:
        state = self.live.of_turn(turn_id)
        return None if state is None else self._view(state)

    def find_session(self, session_id: SessionId) -> SessionView | None:
        state = self.live.find(session_id)
        return None if state is None else self._view(state)

    def _view(self, state: SessionState) -> SessionView:
        spec = state.spec
        return SessionView(
            state.session_id,
            state.tree,
            spec.ephemeral,
            spec.history,
            trains=spec.trains,
            logprobs_kind=self.config.logprobs_kind,
            max_context_tokens=spec.max_context_tokens,
            owner=spec.owner,
        )

    def start(self, request: TurnRequest) -> RunningTurn:
        return RunningTurn(request, owner=self, fleet=self.fleet, pool=self._pool, timeline=self._timeline)

    async def join(self, call: Call, choices: int, *, again: bool = False) -> Sequence[RunningTurn] | None:
        """The turns of an earlier request that this one repeats, all of its choices or none: what is left of them would
        be another sample than the one requested.

        The race: two retries of one request, or a retry while the turn is being aborted. The turns are looked up again
        after every wait, since another request may have joined or revived them meanwhile. Between the last lookup and
        the claim there is no await, so no two requests claim one turn; and no turn is joined whose end is in progress,
        since its outcome is not known yet.
        """
        while True:
            found = self.joinable.find(call, choices)
            ending = [turn for turn in found or () if turn.ending]
            if not ending:
                break
            await ending[0].settled()
        if found is None or any(turn.dropped and turn.request.sampling.in_place for turn in found):
            if not again:
                self.joinable.came_again(call)
            return None
        joined = self._revived(found)
        for turn in joined:
            turn.claim(attempt_of(call))
        self.counters.turns_joined += choices
        return joined

    def _revived(self, turns: Sequence[RunningTurn]) -> list[RunningTurn]:
        """Turns that were dropped go on, all of them or none. Raises Conflict as new turns would."""
        revived: list[RunningTurn] = []
        try:
            for turn in turns:
                revived.append(self._revive(turn) if turn.dropped else turn)  # noqa: PERF401 (used if one fails)
        except LaminarError:
            for turn in revived:
                if turn not in turns:
                    turn.orphan(self.config.disconnect_grace_s)
            raise
        return revived

    def refused(self, call: Call) -> None:
        self.joinable.refused(call)

    def _revive(self, turn: RunningTurn) -> RunningTurn:
        """A dropped turn, running again with the tokens it had."""
        if turn.session.spec.ephemeral:
            self.live.revive(turn.session)
        again = RunningTurn(
            turn.request, owner=self, fleet=self.fleet, pool=self._pool, timeline=self._timeline, record=turn.record
        )
        again.attempt = turn.attempt
        again.begin()
        return again

    async def record_turn(self, request: TurnRequest, head: Message, messages: Sequence[Message]) -> None:
        state = self.live.find(request.session_id)
        if state is not None:
            state.note_messages(request.turn_id, head, messages)
            await self._pool.note_messages(request.session_id, request.turn_id, head, messages)

    # -- gateway.sessions.recovery

    def restore_turn(self, state: SessionState, record: TurnRecord, ended_unix_s: float) -> None:
        """A turn that ended before the restart: whether its client got the answer is not known."""
        self.fleet.send(SessionRestored(state))
        turn = self._restored_run(state, record, "unknown")
        age_s = max(0.0, time.time() - ended_unix_s)
        self.joinable.end(turn, time.monotonic() - age_s)

    def give_up(self, session_id: SessionId) -> None:
        """A session that cannot be restored: its name stays in use, and none of its turns goes on."""
        state = self.live.find(session_id)
        if state is None:
            self.live.restore_ended([(session_id, Ended("abandoned"))])
        else:
            self.forget(state, Ended("abandoned", owner=state.spec.owner))

    def resume(self, state: SessionState, record: TurnRecord) -> None:
        """A turn in flight goes on, without a client yet."""
        self.live.revive(state)
        if record.segments:
            state.version, state.engine = Version(record.segments[-1].version), EngineName(record.segments[-1].engine)
        self.fleet.send(SessionRestored(state))
        self.counters.turns_recovered += 1
        turn = self._restored_run(state, record, "unread")
        turn.sent(0)  # as far as is known: its client has not seen its end
        turn.begin()
        turn.orphan(self.config.recovery_grace_s)

    def _restored_run(self, state: SessionState, record: TurnRecord, attention: Attention) -> RunningTurn:
        turn = RunningTurn(
            record.request,
            owner=self,
            fleet=self.fleet,
            pool=self._pool,
            timeline=self._timeline,
            record=record,
            attention=attention,
            over=attention == "unknown",
        )
        turn.session = state
        return turn

    # -- gateway.turns.running.TurnOwner

    def turn_began(self, turn: RunningTurn) -> SessionState:
        state = self.live.get(turn.request.session_id)
        turn.began_unix_s = unix_s()
        state.begin_turn(turn.request, turn.began_unix_s)
        self.live.presence.woke(state, turn.began_unix_s)
        turn.session = state
        self.joinable.begin(turn)
        self.live.bounds.turn_began(state.spec.owner)
        self.counters.turns_started += 1
        return state

    def turn_ended(self, turn: RunningTurn) -> None:
        self._left(turn)
        turn.session.end_turn(turn.record, unix_s())
        self.counters.turns_completed += 1
        self.lengths.ended(len(turn.record.token_ids))
        if self.lengths.known:
            self.fleet.send(Learnt(self.lengths.mean))
        sampled = [segment for segment in turn.record.segments if segment.end > segment.start]
        self.counters.turns_mixed_version += len({segment.version for segment in sampled}) > 1
        self.counters.turns_mixed_dtype += len({segment.dtype for segment in sampled if segment.dtype}) > 1
        newest = self.fleet.state.newest
        for segment in turn.record.segments:
            count(self._trainer.staleness.generation, newest - segment.version, segment.end - segment.start)
        if self.tracer is not None:
            self._record_span(turn, turn.record.finish_reason or "")
        if turn.session.spec.ephemeral and not turn.session.running:
            self.forget(turn.session)

    def _left(self, turn: RunningTurn) -> None:
        self.joinable.end(turn, time.monotonic())
        self.live.bounds.turn_ended(turn.session.spec.owner)

    def turn_dropped(self, turn: RunningTurn, why: Exception) -> None:
        self._left(turn)
        turn.session.drop_turn(turn.request.turn_id, unix_s())
        if self.tracer is not None:
            self._record_span(turn, "aborted" if isinstance(why, Conflict) else "lost", str(why))
        turn.session.last_dropped = f"turn {turn.request.turn_index}: {why}; {len(turn.record.token_ids)} tokens kept"
        if turn.session.spec.ephemeral and not turn.session.running:
            self.forget(turn.session)

    def turn_suspended(self, turn: RunningTurn) -> None:
        if self.tracer is not None:
            self._record_span(turn, "suspended")

    def _record_span(self, turn: RunningTurn, outcome: str, error: str = "") -> None:
        spec = turn.session.spec
        if self.tracer is not None and spec.trace is not None and spec.trace.sampled:
            self.tracer.record(turn_span(spec, spec.trace, turn.record, turn.began_unix_s, unix_s(), outcome, error))

    async def conclude(self, session_id: SessionId) -> None:
        """Ends the session's turns that nobody reads any more."""
        for turn in [turn for turn in self.running.values() if turn.request.session_id == session_id]:
            await turn.conclude(CONCLUDE_PATIENCE_S)

    async def suspend(self) -> None:
        """Leaves running turns to the next life of this gateway."""
        for turn in list(self.running.values()):
            await turn.suspend()

    # -- leaving nothing behind

    def forget(self, state: SessionState, ended: Ended | None = None) -> None:
        """Takes the session out of the live ones. Turns of a call without a session can still be joined."""
        self.live.forget(state, ended)
        if not state.spec.ephemeral:
            self.joinable.forget_session(state.session_id)

    async def sweep(self) -> None:
        """Forgets turns whose window is over; those of calls without a session on disk, too, with the last turn of
        their request."""
        gone = [turn.session for turn in self.joinable.sweep(time.monotonic())]
        calls = {s.session_id for s in gone if s.spec.ephemeral}
        await self._pool.forget_sessions(sorted(calls))

    # -- for the repacker and the status

    @property
    def running(self) -> Mapping[TurnId, RunningTurn]:
        """The turns in flight; the mapping changes with them."""
        return self.joinable.running

    def version_histogram(self) -> Mapping[int, int]:
        return staleness_histogram(self.fleet.state.num_sessions(), self.fleet.state.newest)
