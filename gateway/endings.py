"""How sessions end: finished with a reward, now or later, or abandoned.

Invariants:
- a trajectory is in the experience buffer, on disk, before its session's finish is told; what an engine contradicts,
  an evaluation, and what is not for training never enter it;
- a session ends once, and only with its turns ended: a running turn of an abandoned one is aborted first.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping

from gateway.core.rewards import Given, note, revised
from gateway.core.sessions import SessionSpec, SessionState, Unrewarded
from gateway.core.types import GroupId, SessionId, Trajectory
from gateway.data import ExperienceBuffer, PartialResponsePool, Timeline
from gateway.data.sessions import SessionStore
from gateway.live import Ended, environment
from gateway.sessions import Sessions
from gateway.trainer import Trainer, count
from protos.errors import Conflict, LaminarError

log = logging.getLogger(__name__)

GROUPS_MAX = 10_000
DURATIONS_MAX = 128
"""Finished sessions from which the typical duration is read."""
EXPIRY_INTERVAL_S = 5.0

SessionEnded = Callable[[SessionState, Ended], Awaitable[None]]


class Endings:
    """`on_end` is told of every end, after it is on disk."""

    def __init__(
        self,
        sessions: Sessions,
        trainer: Trainer,
        *,
        pool: PartialResponsePool,
        buffer: ExperienceBuffer,
        store: SessionStore,
        timeline: Timeline,
    ) -> None:
        self.on_end: SessionEnded = _nobody_asks
        self._sessions, self._live, self._fleet, self._config = sessions, sessions.live, sessions.fleet, sessions.config
        self._trainer, self._counters = trainer, sessions.counters
        self._pool, self._buffer, self._store, self._timeline = pool, buffer, store, timeline
        self._groups_done: OrderedDict[GroupId, int] = OrderedDict()
        self._durations_s: deque[float] = deque(maxlen=DURATIONS_MAX)

    @property
    def typical_duration_s(self) -> float:
        """Median of recent sessions; 0 before the first has finished."""
        return statistics.median(self._durations_s) if self._durations_s else 0.0

    # -- finished

    async def finish(
        self, session_id: SessionId, reward: float, status: str, metrics: Mapping[str, float]
    ) -> list[Trajectory]:
        """Ends the session; its trajectories, one a leaf, are on disk in the experience buffer when this returns."""
        state = self._live.get(session_id)
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
        self._counters.trajectories_finished += 1
        self._durations_s.append(trajectories[0].finished_unix_s - trajectories[0].started_unix_s)
        await self._after(state, "finished")
        return trajectories

    def finish_unrewarded(self, session_id: SessionId, status: str, metrics: Mapping[str, float]) -> SessionState:
        """Ends the session; its trajectories wait `reward_window_s` for their reward."""
        state = self._live.get(session_id)
        if state.unrewarded is not None:
            raise Conflict(f"session {session_id} is finished and waits for its reward")
        self._end(state)
        state.unrewarded = Unrewarded(status, metrics, time.time() + self._config.reward_window_s)
        return state

    async def _vouch(self, state: SessionState) -> None:
        """All segments at once: an engine is looked at once, however many of them it made."""
        turns = list(state.tree.turns.values())
        vouched = iter(await self._fleet.vouching.vouch([s for turn in turns for s in turn.segments]))
        for turn in turns:
            turn.segments = [next(vouched) for _ in turn.segments]

    def _end(self, state: SessionState) -> None:
        if not state.turns:
            raise Conflict(f"session {state.session_id} has no turn to reward", hint="abandon it instead")
        state.end("finished")

    async def reward(self, session_id: SessionId, given: Given) -> str:
        """Rewards of its turns and leaves, also after its finish. Returns how the session stands."""
        state = self._live.find(session_id)
        if state is None:
            if self._live.how_ended(session_id) != "finished":
                self._live.get(session_id)  # says why not
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
        late_s = time.time() - leaves[0].finished_unix_s - self._config.reward_window_s
        if late_s > 0:
            raise Conflict(f"the window for rewards of {leaves[0].session_id} ended {late_s:.0f} s ago")
        return revised(leaves, given)

    # -- abandoned

    async def abandon(self, session_id: SessionId, reason: str) -> None:
        """Ends the session without a trajectory; a running turn of it is aborted."""
        state = self._live.get(session_id)
        if state.unrewarded is not None:
            state.unrewarded, state.phase = None, "live"
        state.end("abandoned")
        for run in self._sessions.known.of_session(session_id):
            await run.abort(f"its session was abandoned ({reason})")
        self._close(state, "abandoned", reason=reason)
        self._counters.sessions_abandoned += 1
        await self._after(state, "abandoned")

    async def expire(self) -> None:
        """Abandons sessions that nobody touched for `session_idle_s`, forgets turns that nobody may ask for any more;
        runs until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            await self._sessions.sweep()
            now, config = time.time(), self._config
            for state in [s for s in self._live if s.unrewarded and s.unrewarded.until_unix_s < now]:
                await self.abandon(state.session_id, f"no reward came within {config.reward_window_s:g} s")
            idle_since = now - config.session_idle_s
            for state in [s for s in self._live if not s.running and s.touched_unix_s < idle_since]:
                await self.abandon(state.session_id, f"idle for {config.session_idle_s:g} s")

    # -- both

    async def _after(self, state: SessionState, how: Ended) -> None:
        # The session first: turns without one are taken away at the next start.
        await self._store.forget(state.session_id)
        await self._pool.forget_session(state.session_id)
        self._fleet.changed()
        await self.on_end(state, how)

    def _close(self, state: SessionState, how: Ended, **fields: object) -> None:
        newest = self._fleet.state.newest
        behind = max(0, newest - min(state.sampled_versions, default=int(newest)))
        if how == "finished":
            count(self._trainer.staleness.finish, behind)
        self._timeline.add(
            "session",
            session_id=state.session_id,
            group_id=state.spec.group_id,
            state=how,
            versions=list(state.sampled_versions),
            staleness=behind,
            turns=state.turns,
            moves=state.moves,
            branches=state.branches,
            **environment(state.spec),
            **fields,
        )
        self._sessions.forget(state, how)
        self._forget_group(state.spec)

    def _forget_group(self, spec: SessionSpec) -> None:
        done = self._groups_done[spec.group_id] = self._groups_done.get(spec.group_id, 0) + 1
        if done >= spec.group_size:
            del self._groups_done[spec.group_id]
            self._fleet.state.group_versions.pop(spec.group_id, None)
        while len(self._groups_done) > GROUPS_MAX:
            oldest, _ = self._groups_done.popitem(last=False)
            self._fleet.state.group_versions.pop(oldest, None)


async def _nobody_asks(state: SessionState, how: Ended) -> None:
    return None
