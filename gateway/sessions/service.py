"""The turns of sessions: begun, joined by who asks again, taken up after a restart. Implements `gateway.ports.Turns`.

Invariants:
- a turn is known from its beginning until its window is over, so that a retry can join it;
- a call without a session is a session for its turns alone, and goes with the last of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from gateway.config import GatewayConfig
from gateway.core.endings import Ended
from gateway.core.event_size import tokens_per_event
from gateway.core.fleet import staleness_histogram
from gateway.core.lengths import TurnLengths
from gateway.core.retries import Attention, Call, attempt_of
from gateway.core.sessions import SessionState
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
from protos.errors import LaminarError, Unavailable

CONCLUDE_PATIENCE_S = 1.0
"""For a client that has left, or is just being answered, when its session is finished."""


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
        context_tokens: Callable[[], int],
        eos_ids: frozenset[int] = frozenset(),
        vocab_size: int = 1 << 31,
    ) -> None:
        self.config, self.live, self.fleet = config, live, fleet
        self.counters = Counters()
        self.eos_ids, self.vocab_size = eos_ids, vocab_size
        self.known = JoinableTurns(config.idempotency_window_s)
        self.lengths = TurnLengths()
        self._trainer, self._pool, self._timeline = trainer, pool, timeline
        self._context_tokens = context_tokens
        self._started_unix_s = int(time.time())

    # -- gateway.ports.Turns

    def models(self) -> Sequence[ModelInfo]:
        config = self.config
        kinds = frozenset(engine.kind for engine in self.fleet.state.engines.values())
        return [ModelInfo(config.model, self._context_tokens(), self._started_unix_s, config.penalties_move, kinds)]

    def tokens_per_event(self, *, streamed: bool) -> int:
        running, token_s = len(self.known.running), self.fleet.state.token_s
        return tokens_per_event(running, token_s, streamed=streamed, configured=self.config.tokens_per_event)

    def session_of_key(self, api_key: str) -> SessionId | None:
        return self.live.of_key(api_key)

    async def open_session(self, identity: SessionIdentity, turns: int = 1) -> SessionView:
        if self.live.draining:
            raise Unavailable("the gateway is shutting down", hint="ask again soon")
        state = self.live.named_by(identity)
        state.check_open(turns)
        spec = state.spec
        return SessionView(
            state.session_id,
            state.tree,
            spec.ephemeral,
            spec.history,
            trains=spec.trains,
            logprobs_kind=self.config.logprobs_kind,
            max_context_tokens=spec.max_context_tokens,
        )

    def start(self, request: TurnRequest) -> RunningTurn:
        return RunningTurn(request, owner=self, fleet=self.fleet, pool=self._pool, timeline=self._timeline)

    async def join(self, call: Call, choices: int, *, again: bool = False) -> Sequence[RunningTurn] | None:
        """All or none: what is left of a request's choices would be another sample than the one it asks for.

        What was found is looked for again after every wait: another request may have joined it meanwhile, or taken it
        up again. Between the last look and the claim nothing waits, so no two requests claim one turn.
        """
        while True:
            found = self.known.find(call, choices)
            ending = [run for run in found or () if run.ending]
            if not ending:
                break
            await ending[0].settled()
        if found is None or any(run.came_to_nothing and run.request.sampling.in_place for run in found):
            if not again:
                self.known.came_again(call)
            return None
        joined = self._taken_up(found)
        for run in joined:
            run.claim(attempt_of(call))
        self.counters.turns_joined += choices
        return joined

    def _taken_up(self, runs: Sequence[RunningTurn]) -> list[RunningTurn]:
        """Those that came to nothing go on, all of them or none."""
        taken: list[RunningTurn] = []
        try:
            for run in runs:
                taken.append(self._revived(run) if run.came_to_nothing else run)  # noqa: PERF401 (kept if one fails)
        except LaminarError:
            for run in taken:
                if run not in runs:
                    run.orphan(self.config.disconnect_grace_s)
            raise
        return taken

    def refused(self, call: Call) -> None:
        self.known.refused(call)

    def _revived(self, run: RunningTurn) -> RunningTurn:
        """A turn that came to nothing, under way again with the tokens it had. Raises Conflict as a new turn would."""
        if run.session.spec.ephemeral:
            self.live.revive(run.session)
        again = RunningTurn(
            run.request, owner=self, fleet=self.fleet, pool=self._pool, timeline=self._timeline, record=run.record
        )
        again.attempt = run.attempt
        again.begin()
        return again

    async def record_turn(self, request: TurnRequest, head: Message, messages: Sequence[Message]) -> None:
        state = self.live.find(request.session_id)
        if state is not None:
            state.tell(request.turn_id, head, messages)
            await self._pool.tell(request.session_id, request.turn_id, head, messages)

    # -- gateway.sessions.recovery

    def keep(self, state: SessionState, record: TurnRecord, ended_unix_s: float) -> None:
        """A turn that was over before: nobody knows whether its client got the answer."""
        self._want_version(state)
        run = self._restored_run(state, record, "unknown")
        age_s = max(0.0, time.time() - ended_unix_s)
        self.known.end(run, time.monotonic() - age_s)

    def give_up(self, session_id: SessionId) -> None:
        """A session of an earlier life that cannot be restored: its name is used, and nothing goes on."""
        ended = Ended("abandoned")
        state = self.live.find(session_id)
        if state is None:
            self.live.restore_ended([(session_id, ended)])
        else:
            self.forget(state, ended)

    def resume(self, state: SessionState, record: TurnRecord) -> None:
        """A turn in flight goes on, without a client yet."""
        self.live.revive(state)
        if record.segments:
            state.version, state.engine = Version(record.segments[-1].version), EngineName(record.segments[-1].engine)
        self._want_version(state)
        self.counters.turns_recovered += 1
        run = self._restored_run(state, record, "unread")
        run.sent(0)  # as far as is known now: its client has not seen its end
        run.begin()
        run.orphan(self.config.recovery_grace_s)

    def _restored_run(self, state: SessionState, record: TurnRecord, attention: Attention) -> RunningTurn:
        run = RunningTurn(
            record.request,
            owner=self,
            fleet=self.fleet,
            pool=self._pool,
            timeline=self._timeline,
            record=record,
            attention=attention,
            over=attention == "unknown",
        )
        run.session = state
        return run

    def _want_version(self, state: SessionState) -> None:
        if state.version is not None and not state.spec.ephemeral:
            self.fleet.state.note_session(state.session_id, state.version, state.spec.on_version_loss)
            if state.spec.group_id not in self.fleet.state.group_versions:
                self.fleet.state.note_group(state.spec.group_id, state.version)
            self.fleet.state.kept.note(state.session_id, state.version if state.insists else None)

    # -- gateway.turns.running.TurnOwner

    def turn_began(self, run: RunningTurn) -> SessionState:
        state = self.live.get(run.request.session_id)
        state.begin_turn(run.request, unix_s())
        run.session = state
        self.known.begin(run)
        self.counters.turns_started += 1
        return state

    def turn_ended(self, run: RunningTurn) -> None:
        self.known.end(run, time.monotonic())
        run.session.end_turn(run.record, unix_s())
        self.counters.turns_completed += 1
        self.lengths.ended(len(run.record.token_ids))
        if self.lengths.known:
            self.fleet.state.turn_tokens = self.lengths.mean
        sampled = [segment for segment in run.record.segments if segment.end > segment.start]
        self.counters.turns_mixed_version += len({segment.version for segment in sampled}) > 1
        self.counters.turns_mixed_dtype += len({segment.dtype for segment in sampled if segment.dtype}) > 1
        newest = self.fleet.state.newest
        for segment in run.record.segments:
            count(self._trainer.staleness.generation, newest - segment.version, segment.end - segment.start)
        if run.session.spec.ephemeral and not run.session.running:
            self.forget(run.session)

    def turn_dropped(self, run: RunningTurn, why: Exception) -> None:
        self.known.end(run, time.monotonic())
        run.session.drop_turn(run.request.turn_id, unix_s())
        run.session.last_dropped = f"turn {run.request.turn_index}: {why}; {len(run.record.token_ids)} tokens kept"
        if run.session.spec.ephemeral and not run.session.running:
            self.forget(run.session)

    async def conclude(self, session_id: SessionId) -> None:
        """Its turns that nobody reads any more are over when this returns."""
        for run in [run for run in self.runs.values() if run.request.session_id == session_id]:
            await run.conclude(CONCLUDE_PATIENCE_S)

    async def suspend(self) -> None:
        """Leaves turns under way to the next life of this gateway."""
        for run in list(self.known.running.values()):
            await run.suspend()

    # -- leaving nothing behind

    def forget(self, state: SessionState, ended: Ended | None = None) -> None:
        """The session is live no more."""
        self.live.forget(state, ended)
        if state.spec.ephemeral:
            self.fleet.state.forget_group(state.spec.group_id)  # its turns may be asked for again
        else:
            self.known.forget_session(state.session_id)

    async def sweep(self) -> None:
        """Turns that nobody may ask for any more are forgotten, those of calls without a session on disk, too, with the
        last of their request's."""
        gone = [run.session for run in self.known.sweep(time.monotonic())]
        calls = {s.session_id for s in gone if s.spec.ephemeral}
        await self._pool.forget_sessions(sorted(calls))

    # -- what others ask

    @property
    def runs(self) -> Mapping[TurnId, RunningTurn]:
        """Turns under way."""
        return self.known.running

    def waiting(self) -> Mapping[tuple[EngineName, Version], Sequence[SessionState]]:
        """Sessions that wait for a tool, by the engine that they will come back to and their version."""
        found: defaultdict[tuple[EngineName, Version], list[SessionState]] = defaultdict(list)
        for state in self.live:
            if state.engine is not None and state.version is not None and not state.running and state.tokens:
                found[state.engine, state.version].append(state)
        return found

    def version_histogram(self) -> Mapping[int, int]:
        versions = self.fleet.state.session_versions.values()
        return staleness_histogram(versions, Version(self.fleet.state.newest))
