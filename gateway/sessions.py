"""The sessions of this gateway: makes them, runs their turns, ends them into the experience buffer.

Implements `gateway.ports.Turns`. Owner of every `SessionState`; one event loop, no locks.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.config import GatewayConfig
from gateway.core.fleet import staleness_histogram
from gateway.core.joining import Attention, Call
from gateway.core.lengths import TurnLengths
from gateway.core.pacing import tokens_per_event
from gateway.core.rewards import Given, note, revised
from gateway.core.scheduler import Admission
from gateway.core.sessions import SessionSpec, SessionState, Unrewarded
from gateway.core.types import EngineName, GroupId, SessionId, Trajectory, TurnId, TurnRecord, TurnRequest, Version
from gateway.core.waiting import Pace, retry_for_a_batch
from gateway.data import ExperienceBuffer, PartialResponsePool, Timeline
from gateway.data.sessions import SessionStore
from gateway.fleet import Fleet
from gateway.known import KnownTurns
from gateway.ports import Message, ModelInfo, SessionIdentity, SessionView
from gateway.turns import Counters, Run
from protos.errors import (
    Conflict,
    InvalidRequest,
    LaminarError,
    NotFound,
    OutOfCapacity,
    Unavailable,
    UnsupportedField,
)

log = logging.getLogger(__name__)

ENDED_MAX = 10_000
"""Ended sessions remembered, so that a second finish is told what happened."""
GROUPS_MAX = 10_000
DURATIONS_MAX = 128
"""Finished sessions from which the typical duration is read."""
EXPIRY_INTERVAL_S = 5.0
SESSION_NAME = re.compile(r"[^\s/]{1,256}")


SessionEnded = Callable[[SessionState, Literal["finished", "abandoned"]], Awaitable[None]]


@dataclass(slots=True)
class Staleness:
    """Tokens (generation) and trajectories (finish, use) by how many versions they were behind."""

    generation: dict[int, int] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    use: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Reader:
    """What the trainer last told by sampling."""

    batch: int | None = None
    trainer_version: int = 0
    staleness_max: int | None = None
    took: Pace = field(default_factory=Pace)


class Sessions:
    """`fleet` is given after construction, since both need each other."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        pool: PartialResponsePool,
        buffer: ExperienceBuffer,
        store: SessionStore,
        timeline: Timeline,
        context_tokens: Callable[[], int],
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.config = config
        self.counters = Counters()
        self.eos_ids = eos_ids
        self.staleness = Staleness()
        self.reader = Reader()
        self.draining = False  # the process is about to end: nothing new begins
        self.known = KnownTurns(config.idempotency_window_s)
        self.lengths = TurnLengths()
        self.fleet: Fleet
        self._pool, self._buffer, self._store, self._timeline = pool, buffer, store, timeline
        self._context_tokens = context_tokens
        self._live: dict[SessionId, SessionState] = {}
        self._keys: dict[str, SessionId] = {}
        self._ended: OrderedDict[SessionId, str] = OrderedDict()
        self.on_end: SessionEnded = _nobody_asks
        self._groups_done: OrderedDict[GroupId, int] = OrderedDict()
        self._durations_s: deque[float] = deque(maxlen=DURATIONS_MAX)
        self._started_unix_s = int(time.time())

    # -- gateway.ports.Turns

    def models(self) -> Sequence[ModelInfo]:
        config = self.config
        return [ModelInfo(config.model, self._context_tokens(), self._started_unix_s, config.penalties_move)]

    def tokens_per_event(self, *, streamed: bool) -> int:
        return tokens_per_event(len(self.known.running), streamed=streamed, configured=self.config.tokens_per_event)

    def session_of_key(self, api_key: str) -> SessionId | None:
        return self._keys.get(api_key)

    async def open_session(self, identity: SessionIdentity) -> SessionView:
        if self.draining:
            raise Unavailable("the gateway is shutting down", hint="ask again soon")
        state = self._find_or_make(identity)
        state.check_open()
        spec = state.spec
        return SessionView(
            state.session_id,
            state.tree,
            spec.ephemeral,
            spec.history,
            trains=spec.train and spec.split == "train",
            logprobs_kind=self.config.logprobs_kind,
        )

    def start(self, request: TurnRequest) -> Run:
        return Run(request, owner=self, fleet=self.fleet, pool=self._pool, timeline=self._timeline)

    async def join(self, call: Call, choices: int) -> Sequence[Run] | None:
        """All or none: what is left of a request's choices would be another sample than the one it asks for."""
        found = [self.known.find(call, choice) for choice in range(choices)]
        runs = [run for run in found if run is not None]
        if len(runs) < choices or any(run.came_to_nothing and run.request.sampling.in_place for run in runs):
            return None
        joined: list[Run] = []
        for run in runs:
            await run.settled()
            joined.append(self._revived(run) if run.came_to_nothing else run)
        self.counters.turns_joined += choices
        return joined

    def _revived(self, run: Run) -> Run:
        """A turn that came to nothing, under way again with the tokens it had. Raises Conflict as a new turn would."""
        if run.session.spec.ephemeral:
            self._live[run.session.session_id] = run.session
        again = Run(
            run.request, owner=self, fleet=self.fleet, pool=self._pool, timeline=self._timeline, record=run.record
        )
        again.begin()
        return again

    async def record_turn(self, request: TurnRequest, head: Message, messages: Sequence[Message]) -> None:
        state = self._live.get(request.session_id)
        if state is not None:
            state.tell(request.turn_id, head, messages)
            await self._store.told(request.session_id, request.turn_id, head, messages)

    # -- gateway.recovery

    def restore(self, spec: SessionSpec, api_key: str = "", created_unix_s: float | None = None) -> SessionState:
        """A session of an earlier life; its turns come after it."""
        now = time.time()
        state = SessionState(spec, now if created_unix_s is None else created_unix_s, now, version=spec.version)
        if not spec.ephemeral:
            self._live[spec.session_id] = state
            self._keys[api_key] = spec.session_id
        return state

    def keep(self, state: SessionState, record: TurnRecord, ended_unix_s: float) -> None:
        """A turn that was over before: nobody knows whether its client got the answer."""
        self._want_version(state)
        run = self._restored_run(state, record, "unknown")
        self.known.end(run, ended_unix_s)

    def resume(self, state: SessionState, record: TurnRecord) -> None:
        """A turn in flight goes on, without a client yet."""
        self._live[state.session_id] = state
        if record.segments:
            state.version, state.engine = Version(record.segments[-1].version), EngineName(record.segments[-1].engine)
        self._want_version(state)
        self.counters.turns_recovered += 1
        run = self._restored_run(state, record, "unread")
        run.begin()
        run.orphan(self.config.recovery_grace_s)

    def _restored_run(self, state: SessionState, record: TurnRecord, attention: Attention) -> Run:
        run = Run(
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
            self.fleet.state.session_versions[state.session_id] = state.version
            self.fleet.state.group_versions.setdefault(state.spec.group_id, state.version)

    # -- gateway.turns.TurnOwner

    def turn_began(self, run: Run) -> SessionState:
        state = self._get(run.request.session_id)
        state.begin_turn(run.request, time.time())
        run.session = state
        self.known.begin(run)
        self.counters.turns_started += 1
        return state

    def turn_ended(self, run: Run) -> None:
        self.known.end(run, time.time())
        run.session.end_turn(run.record, time.time())
        self.counters.turns_completed += 1
        self.lengths.ended(len(run.record.token_ids))
        versions = {segment.version for segment in run.record.segments if segment.end > segment.start}
        self.counters.turns_mixed_version += len(versions) > 1
        newest = self.fleet.state.newest
        for segment in run.record.segments:
            _count(self.staleness.generation, max(0, newest - segment.version), segment.end - segment.start)
        if run.session.spec.ephemeral and not run.session.running:
            self._forget(run.session)

    def turn_dropped(self, run: Run, why: Exception) -> None:
        self.known.end(run, time.time())
        run.session.drop_turn(run.request.turn_id, time.time())
        run.session.last_dropped = f"turn {run.request.turn_index}: {why}; {len(run.record.token_ids)} tokens kept"
        if run.session.spec.ephemeral and not run.session.running:
            self._forget(run.session)

    # -- making and ending

    def create(self, spec: SessionSpec) -> tuple[SessionState, str]:
        """A new session and its API key. Conflict for a name in use, OutOfCapacity beyond `sessions_max`.

        It is on disk once `saved` returns, and before any turn of it.
        """
        if not SESSION_NAME.fullmatch(spec.session_id):
            raise InvalidRequest(
                f"{spec.session_id[:40]!r} is no session id", hint="1 to 256 characters without spaces and slashes"
            )
        if self.draining:
            raise Unavailable("the gateway is shutting down", hint="ask again soon")
        if spec.session_id in self._live or spec.session_id in self._ended:
            raise Conflict(
                f"there was already a session {spec.session_id!r}", hint="leave session_id out to get a new one"
            )
        if self.config.fleet.mode == "inflight" and (spec.version is not None or spec.on_version_loss != "segment"):
            raise UnsupportedField(
                f"session {spec.session_id} insists on its version, and mode `inflight` changes it under running turns",
                hint="leave `version` and `on_version_loss` out, or run the gateway with --mode repack",
            )
        if len(self._live) >= self.config.sessions_max:
            raise OutOfCapacity(
                f"{len(self._live)} sessions are live", hint="finish or abandon some", retry_after_s=5.0
            )
        now = time.time()
        state = self._live[spec.session_id] = SessionState(spec, now, now, version=spec.version)
        key = f"sk-session-{secrets.token_hex(12)}"
        if not spec.ephemeral:
            self._keys[key] = spec.session_id
            self._store.add(spec, key, now)
            self._timeline.add(
                "session", session_id=spec.session_id, group_id=spec.group_id, state="started", **_environment(spec)
            )
        return state, key

    async def saved(self) -> None:
        """Every session made so far is on disk."""
        await self._store.written()

    async def suspend(self) -> None:
        """Leaves turns under way to the next life of this gateway."""
        for run in list(self.known.running.values()):
            await run.suspend()

    def get(self, session_id: SessionId) -> SessionState:
        return self._get(session_id)

    async def finish(
        self, session_id: SessionId, reward: float, status: str, metrics: Mapping[str, float]
    ) -> list[Trajectory]:
        """Ends the session; its trajectories, one a leaf, are on disk in the experience buffer when this returns."""
        state = self._get(session_id)
        if state.unrewarded is None:
            self._end(state)
        else:
            status, metrics = state.unrewarded.status, {**state.unrewarded.metrics, **metrics}
        await self._vouch(state)
        trajectories = state.trajectories(reward, status, metrics, time.time())
        if not state.vouched:
            log.error("session %s is not trained on: engines contradict its versions", session_id)
        elif state.spec.train and state.spec.split == "train":
            try:
                await self._buffer.add(*trajectories)
            except LaminarError:
                if state.unrewarded is None:
                    state.phase = "live"  # no place, or no disk: it can be finished again
                raise
        self._close(state, "finished", reward=reward)
        self.counters.trajectories_finished += 1
        self._durations_s.append(trajectories[0].finished_unix_s - trajectories[0].started_unix_s)
        await self._forget_on_disk(session_id)
        self.fleet.changed()
        await self.on_end(state, "finished")
        return trajectories

    def finish_unrewarded(self, session_id: SessionId, status: str, metrics: Mapping[str, float]) -> SessionState:
        """Ends the session; its trajectories wait `reward_window_s` for their reward."""
        state = self._get(session_id)
        if state.unrewarded is not None:
            raise Conflict(f"session {session_id} is finished and waits for its reward")
        self._end(state)
        state.unrewarded = Unrewarded(status, metrics, time.time() + self.config.reward_window_s)
        return state

    async def _vouch(self, state: SessionState) -> None:
        """All segments at once: an engine is looked at once, however many of them it made."""
        turns = list(state.tree.turns.values())
        vouched = iter(await self.fleet.vouching.vouch([s for turn in turns for s in turn.segments]))
        for turn in turns:
            turn.segments = [next(vouched) for _ in turn.segments]

    def _end(self, state: SessionState) -> None:
        if not state.turns:
            raise Conflict(f"session {state.session_id} has no turn to reward", hint="abandon it instead")
        state.end("finished")

    async def reward(self, session_id: SessionId, given: Given) -> str:
        """Rewards of its turns and leaves, also after its finish. Returns how the session stands."""
        state = self._live.get(session_id)
        if state is None:
            if self._ended.get(session_id) != "finished":
                self._get(session_id)  # says why not
            await self._buffer.revise(session_id, lambda leaves: self._revised(leaves, given))
            return "finished"
        if given.session is not None and state.unrewarded is None:
            raise Conflict(f"session {session_id} is live", hint="give its reward with POST /sessions/{id}/finish")
        note(state, given)
        if given.session is None:
            return "live" if state.unrewarded is None else "unrewarded"
        await self.finish(session_id, given.session, "completed", {})
        return "finished"

    def _revised(self, leaves: list[Trajectory], given: Given) -> list[Trajectory]:
        late_s = time.time() - leaves[0].finished_unix_s - self.config.reward_window_s
        if late_s > 0:
            raise Conflict(f"the window for rewards of {leaves[0].session_id} ended {late_s:.0f} s ago")
        return revised(leaves, given)

    async def abandon(self, session_id: SessionId, reason: str) -> None:
        """Ends the session without a trajectory; a running turn of it is aborted."""
        state = self._get(session_id)
        if state.unrewarded is not None:
            state.unrewarded, state.phase = None, "live"
        state.end("abandoned")
        for run in self.known.of_session(session_id):
            await run.abort(f"its session was abandoned ({reason})")
        self._close(state, "abandoned", reason=reason)
        self.counters.sessions_abandoned += 1
        await self._forget_on_disk(session_id)
        self.fleet.changed()
        await self.on_end(state, "abandoned")

    async def _forget_on_disk(self, session_id: SessionId) -> None:
        """The session first: turns without one are taken away at the next start."""
        await self._store.forget(session_id)
        await self._pool.forget_session(session_id)

    async def expire(self) -> None:
        """Abandons sessions that nobody touched for `session_idle_s`, forgets turns that nobody may ask for any more;
        runs until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            limit = time.time() - self.config.session_idle_s
            gone = [run.session for run in self.known.sweep(time.time())]
            await self._pool.forget_sessions([s.session_id for s in gone if s.spec.ephemeral])
            now = time.time()
            for state in [s for s in self._live.values() if s.unrewarded and s.unrewarded.until_unix_s < now]:
                await self.abandon(state.session_id, f"no reward came within {self.config.reward_window_s:g} s")
            for state in [s for s in self._live.values() if not s.running and s.touched_unix_s < limit]:
                await self.abandon(state.session_id, f"idle for {self.config.session_idle_s:g} s")

    # -- what others ask

    def admission(self) -> Admission:
        buffered = self._buffer.statistics().trajectories
        running = sum(
            1 for s in self._live.values() if s.version is not None and s.spec.train and s.spec.split == "train"
        )
        bound = self.reader.staleness_max
        return Admission(
            running,
            buffered,
            self.reader.batch,
            self.config.fleet.staleness_max if bound is None else bound,
            retry_for_a_batch(self.reader.took, time.monotonic()),
        )

    def heard(self, batch: int, trainer_version: int, staleness_max: int | None) -> None:
        """A reader asked for a batch."""
        self.reader.batch, self.reader.staleness_max = batch, staleness_max
        self.reader.trainer_version = max(self.reader.trainer_version, trainer_version)
        self.fleet.changed()

    def used(self, trainer_version: int, trajectories: Sequence[Trajectory]) -> None:
        """A reader got trajectories: staleness at use, by each one's oldest version."""
        if trajectories:
            self.reader.took.happened(time.monotonic())
        for trajectory in trajectories:
            oldest = min((v for v in trajectory.versions if v >= 0), default=trainer_version)
            _count(self.staleness.use, max(0, trainer_version - oldest))

    @property
    def runs(self) -> Mapping[TurnId, Run]:
        """Turns under way."""
        return self.known.running

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def typical_duration_s(self) -> float:
        """Median of recent sessions; 0 before the first has finished."""
        return statistics.median(self._durations_s) if self._durations_s else 0.0

    def waiting_at(self, engine: EngineName, version: Version) -> list[SessionState]:
        """Sessions that wait for a tool and will come back to this engine."""
        return [
            s for s in self._live.values() if s.engine == engine and not s.running and s.version == version and s.tokens
        ]

    def interrupt(self, turn_id: TurnId) -> None:
        """Its engine is needed: the turn pauses and goes on where the scheduler puts it."""
        run = self.runs.get(turn_id)
        if run is not None:
            run.release()

    def find(self, session_id: SessionId) -> SessionState | None:
        """A live session."""
        return self._live.get(session_id)

    def _find_or_make(self, identity: SessionIdentity) -> SessionState:
        if identity.session_id is None:
            name = SessionId(f"call-{secrets.token_hex(8)}")
            return self.create(SessionSpec(name, GroupId(name), ephemeral=True, train=False))[0]
        if identity.session_id not in self._live and identity.session_id not in self._ended:
            return self.create(SessionSpec(identity.session_id, GroupId(identity.session_id)))[0]
        return self._get(identity.session_id)

    def _get(self, session_id: SessionId) -> SessionState:
        state = self._live.get(session_id)
        if state is not None:
            return state
        if session_id in self._ended:
            raise Conflict(
                f"session {session_id} is already {self._ended[session_id]}", hint="make a new one with POST /sessions"
            )
        raise NotFound(f"no session {session_id!r}", hint="make it with POST /sessions")

    def _close(self, state: SessionState, how: Literal["finished", "abandoned"], **fields: object) -> None:
        newest = self.fleet.state.newest
        oldest = min(state.sampled_versions, default=int(newest))
        if how == "finished":
            _count(self.staleness.finish, max(0, newest - oldest))
        self._timeline.add(
            "session",
            session_id=state.session_id,
            group_id=state.spec.group_id,
            state=how,
            versions=list(state.sampled_versions),
            staleness=max(0, newest - oldest),
            turns=state.turns,
            moves=state.moves,
            branches=state.branches,
            **_environment(state.spec),
            **fields,
        )
        self._ended[state.session_id] = how
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self._forget(state)
        self.known.forget_session(state.session_id)
        self._forget_group(state.spec)

    def _forget(self, state: SessionState) -> None:
        self._live.pop(state.session_id, None)
        self.fleet.state.session_versions.pop(state.session_id, None)
        if state.spec.ephemeral:
            self.fleet.state.group_versions.pop(state.spec.group_id, None)
        for key in [k for k, s in self._keys.items() if s == state.session_id]:
            del self._keys[key]

    def _forget_group(self, spec: SessionSpec) -> None:
        done = self._groups_done[spec.group_id] = self._groups_done.get(spec.group_id, 0) + 1
        if done >= spec.group_size:
            del self._groups_done[spec.group_id]
            self.fleet.state.group_versions.pop(spec.group_id, None)
        while len(self._groups_done) > GROUPS_MAX:
            oldest, _ = self._groups_done.popitem(last=False)
            self.fleet.state.group_versions.pop(oldest, None)

    def version_histogram(self) -> Mapping[int, int]:
        versions = self.fleet.state.session_versions.values()
        return staleness_histogram(versions, Version(self.fleet.state.newest))


async def _nobody_asks(state: SessionState, how: str) -> None:
    return None


def _count(histogram: dict[int, int], key: int, by: int = 1) -> None:
    histogram[key] = histogram.get(key, 0) + by


def _environment(spec: SessionSpec) -> dict[str, str]:
    return {"environment": spec.tags["environment"]} if "environment" in spec.tags else {}
