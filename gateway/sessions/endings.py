"""How sessions end: finished with a reward, now or later, or abandoned.

Invariants:
- a trajectory is in the experience buffer, on disk, before its session's finish is told; what an engine contradicts,
  an evaluation, and what is not for training never enter it;
- a session ends once, and only with its turns ended: a running turn of an abandoned one is aborted first;
- an end, or a reward, that began comes to its end whether or not its caller stays; a finish asked again is told again;
- what was told (an end, a reward) survives a power cut; what the disk refused has had no effect;
- children end with their parent, before its end is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from gateway.core.endings import Ended, Finish, Finished, How, Status, Unrewarded
from gateway.core.expiry import why_over
from gateway.core.groups import GiveUp, Resample
from gateway.core.lengths import SessionDurations
from gateway.core.rewards import Given, note, revised, turn_of
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import GroupId, SessionId
from gateway.experience import ExperienceBuffer
from gateway.runtime.clock import unix_s
from gateway.runtime.orders import Orders
from gateway.sessions.groups import GroupBook
from gateway.sessions.registry import environment
from gateway.sessions.service import TurnService
from gateway.sessions.trainer import Trainer, count
from gateway.store import PartialResponsePool, Timeline
from gateway.store.database import Operation
from gateway.store.groups import Group
from gateway.store.sessions import SessionStore
from protos.errors import Conflict, LaminarError
from protos.trajectories import Trajectory

log = logging.getLogger(__name__)

GROUPS_MAX = 10_000
EXPIRY_INTERVAL_S = 5.0

T = TypeVar("T")


class Endings:
    """How sessions end, and with the last member their groups."""

    def __init__(
        self,
        sessions: TurnService,
        trainer: Trainer,
        groups: GroupBook,
        durations: SessionDurations,
        *,
        pool: PartialResponsePool,
        buffer: ExperienceBuffer,
        store: SessionStore,
        timeline: Timeline,
    ) -> None:
        self._sessions, self._live, self._fleet, self._config = sessions, sessions.live, sessions.fleet, sessions.config
        self._trainer, self._groups, self._counters = trainer, groups, sessions.counters
        self._durations = durations
        self._pool, self._buffer, self._store, self._timeline = pool, buffer, store, timeline
        self._orders = Orders()
        self._finishing: dict[SessionId, tuple[Finish, asyncio.Task[Finished | None]]] = {}
        self._groups_done: OrderedDict[GroupId, int] = OrderedDict()

    # -- finished

    async def finish_once(self, session_id: SessionId, asked: Finish) -> Finished | None:
        """Ends the session as asked, also when who asked is gone; asked the same again, tells the same.

        None: it waits for its reward. Conflict when it ends, or has ended, otherwise; it says how.
        """
        ended = self._live.ended(session_id)
        if ended is not None and ended.told is not None and ended.asked == asked:
            await self._store.synced()
            return ended.told
        return await self._once(session_id, asked)

    async def _once(self, session_id: SessionId, asked: Finish) -> Finished | None:
        before, task = self._finishing.get(session_id, (asked, None))
        if before != asked:
            raise Conflict(f"session {session_id} is being finished with {_said(before)}, not with {_said(asked)}")
        if task is None:
            task = self._orders.begin(self._finish_as(session_id, asked), f"finish-{session_id}")
            self._finishing[session_id] = (asked, task)
            task.add_done_callback(lambda _: self._finishing.pop(session_id))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends that are under way come to their end."""
        await self._orders.done()

    async def _finish_as(self, session_id: SessionId, asked: Finish) -> Finished | None:
        state = self._live.get(session_id)
        await self._sessions.conclude(session_id)
        if asked.reward is None:
            await self.finish_unrewarded(session_id, asked)
            return None
        await self._note(state, Given(None, asked.turns, asked.leaves))
        await self.finish(session_id, asked.reward, asked.status, asked.metrics, asked)
        ended = self._live.ended(session_id)
        return None if ended is None else ended.told

    async def _note(self, state: SessionState, given: Given) -> None:
        names = {turn_of(name) for name in (*given.turns, *given.leaves)}
        before = [
            (t, t.reward, t.leaf_reward) for name in sorted(names) if (t := state.tree.turns.get(name)) is not None
        ]
        note(state, given)
        if not before:
            return
        try:
            await self._store.rewarded(state.session_id, [turn for turn, _, _ in before])
        except LaminarError:
            for turn, reward, leaf_reward in before:
                turn.reward, turn.leaf_reward = reward, leaf_reward
            raise

    async def finish(
        self,
        session_id: SessionId,
        reward: float,
        status: Status,
        metrics: Mapping[str, float],
        asked: Finish | None = None,
    ) -> list[Trajectory]:
        """Ends the session; its trajectories, one a leaf, are on disk in the experience buffer when this returns."""
        state = self._live.get(session_id)
        asked = asked or Finish(reward=reward, status=status, metrics=dict(metrics))
        if state.unrewarded is None:
            self._end(state)
        else:
            status, metrics = state.unrewarded.asked.status, {**state.unrewarded.asked.metrics, **metrics}
        try:
            await self._vouch(state)
            trajectories = state.trajectories(reward, status, metrics, unix_s())
            stored = self._to_be_stored(state)
            ended = Ended("finished", asked, _finished(state, reward, status, trajectories, stored=stored))
            if stored:
                await self._buffer.add(*trajectories, along=self._forgetting(state, ended))
        except Exception:
            if state.unrewarded is None:
                state.phase = "live"  # no place, no disk, or whatever it was: it can be finished again
            raise
        self._close(state, ended, reward=reward)
        self._counters.trajectories_finished += 1
        self._durations.ended(trajectories[0].finished_unix_s - trajectories[0].started_unix_s)
        await self._after(state, ended, is_written=stored)
        return trajectories

    def _to_be_stored(self, state: SessionState) -> bool:
        """Whether the experience buffer is for it: not for a session that is not for training."""
        if not state.vouched:
            log.error("session %s is not trained on: engines contradict its versions", state.session_id)
            return False
        return state.spec.trains

    def _forgetting(self, state: SessionState, ended: Ended) -> Operation[object]:
        """The end of a session with its trajectory: one commit instead of three."""
        end, forget = self._store.ending(state.session_id, ended), self._pool.forgetting(state.session_id)
        return lambda connection: (end(connection), forget(connection))

    async def finish_unrewarded(self, session_id: SessionId, asked: Finish) -> None:
        """Ends the session; its trajectories wait `reward_window_s` for their reward, also over a restart."""
        state = self._live.get(session_id)
        if state.unrewarded is not None:
            if state.unrewarded.asked == asked:
                return
            raise Conflict(
                f"session {session_id} was finished with {_said(state.unrewarded.asked)} and waits for its reward",
                hint="give it with POST /sessions/{id}/reward",
            )
        await self._note(state, Given(None, asked.turns, asked.leaves))
        self._end(state)
        state.unrewarded = Unrewarded(asked, unix_s() + self._config.reward_window_s)
        try:
            await self._store.unrewarded(session_id, state.unrewarded)
        except LaminarError:
            state.phase, state.unrewarded = "live", None
            raise
        await self._store.synced()
        await self._part(state)

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
        """Rewards of its turns and leaves, also after its finish, and when who gave them is gone.

        Returns how the session stands."""
        state = self._live.find(session_id)
        if given.session is None or state is None:
            return await self._orders.carry_out(self._reward(session_id, given), f"reward-{session_id}")
        if state.unrewarded is None:
            raise Conflict(f"session {session_id} is live", hint="give its reward with POST /sessions/{id}/finish")
        await self._once(session_id, Finish(given.session, dict(given.turns), dict(given.leaves)))
        return "finished"

    async def _reward(self, session_id: SessionId, given: Given) -> str:
        state = self._live.find(session_id)
        if state is None:
            ended = self._live.ended(session_id)
            if ended is None or ended.how != "finished":
                self._live.get(session_id)  # says why not
            await self._buffer.revise(session_id, lambda leaves: self._revised(leaves, given))
            return "finished"
        await self._note(state, given)
        await self._store.synced()
        return "live" if state.unrewarded is None else "unrewarded"

    def _revised(self, leaves: list[Trajectory], given: Given) -> list[Trajectory]:
        late_s = unix_s() - leaves[0].finished_unix_s - self._config.reward_window_s
        if late_s > 0:
            raise Conflict(f"the window for rewards of {leaves[0].session_id} ended {late_s:.0f} s ago")
        return revised(leaves, given)

    # -- abandoned

    async def abandon(self, session_id: SessionId, reason: str) -> None:
        """Ends the session without a trajectory, also when who asked is gone; a running turn of it is aborted."""
        await self._orders.carry_out(self._abandon(session_id, reason), f"abandon-{session_id}")

    async def _abandon(self, session_id: SessionId, reason: str) -> None:
        state = self._live.get(session_id)
        if session_id in self._finishing:
            raise Conflict(f"session {session_id} is being finished with {_said(self._finishing[session_id][0])}")
        if state.unrewarded is not None:
            state.unrewarded, state.phase = None, "live"
        state.end("abandoned")
        for run in self._sessions.known.of_session(session_id):
            await run.abort(f"its session was abandoned ({reason})")
        ended = Ended("abandoned")
        self._close(state, ended, reason=reason)
        self._counters.sessions_abandoned += 1
        await self._after(state, ended)

    async def expire(self) -> None:
        """Abandons sessions that are over, forgets turns that nobody may ask for any more; runs until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            await self._sessions.sweep()
            for state in list(self._live):
                await self._abandon_if_over(state)

    async def _abandon_if_over(self, state: SessionState) -> None:
        if not self._why_over(state):
            return
        try:
            await self._orders.carry_out(self._abandon_over(state), f"expire-{state.session_id}")
        except LaminarError as e:  # looked at again with the next round
            log.error("session %s is over, and cannot be ended: %s", state.session_id, e)

    async def _abandon_over(self, state: SessionState) -> None:
        """Asked again, since it may have gone on, or ended with another."""
        if why := self._why_over(state):
            await self._abandon(state.session_id, why)

    def _why_over(self, state: SessionState) -> str:
        if self._live.find(state.session_id) is not state:
            return ""
        return why_over(
            state,
            unix_s(),
            idle_s=self._config.session_idle_s,
            reward_window_s=self._config.reward_window_s,
            finishing=state.session_id in self._finishing,
            blocked=self._live.blocked(state.session_id),
            parent_ended=self._live.parent_ended(state.spec),
        )

    # -- both

    async def _part(self, state: SessionState) -> None:
        """Its parent waits for it no more, and its children end with it."""
        self._live.unblock(state)
        for child in self._live.children(state.session_id):
            await self._abandon_if_over(child)

    async def _after(self, state: SessionState, ended: Ended, *, is_written: bool = False) -> None:
        if not is_written:
            await self._pool.flush()  # of turns that were aborted
            await self._store.end(state.session_id, ended, along=self._pool.forgetting(state.session_id))
        await self._store.synced()
        await self._part(state)
        self._fleet.changed()
        if (group := self._groups.of(state)) is not None:
            if ended.how == "finished":
                group.state.sampled_under(state.sampled_versions)
            await self.member_ended(group, state.session_id, ended.how)

    async def member_ended(self, group: Group, session_id: SessionId, how: How) -> None:
        """What follows for the group: another member, its end with those it has, or the end of all the others."""
        left = await self._groups.member_ended(group, session_id, how)
        if isinstance(left, Resample):
            return
        if isinstance(left, GiveUp):
            await self.give_up_group(group, left.reason)
        await self._groups.save(group)

    async def give_up_group(self, group: Group, reason: str) -> None:
        """Member by member: one that cannot be ended now keeps no other, and ends by itself."""
        log.info("group %s is given up: %s", group.state.group_id, reason)
        for session_id in list(group.state.live):
            try:
                await self.abandon(session_id, f"its group is given up: {reason}")
            except LaminarError as e:
                log.warning("group %s: member %s is not abandoned: %s", group.state.group_id, session_id, e)
        await self._buffer.drop_group(group.state.group_id)

    def _close(self, state: SessionState, ended: Ended, **fields: object) -> None:
        newest = self._fleet.state.newest
        behind = max(0, newest - min(state.sampled_versions, default=int(newest)))
        if ended.how == "finished":
            count(self._trainer.staleness.finish, behind)
        self._timeline.add(
            "session",
            session_id=state.session_id,
            group_id=state.spec.group_id,
            state=ended.how,
            versions=list(state.sampled_versions),
            staleness=behind,
            turns=state.turns,
            moves=state.moves,
            branches=state.branches,
            **environment(state.spec),
            **fields,
        )
        self._sessions.forget(state, ended)
        self._forget_group(state.spec)

    def _forget_group(self, spec: SessionSpec) -> None:
        done = self._groups_done[spec.group_id] = self._groups_done.get(spec.group_id, 0) + 1
        if done >= spec.group_size:
            del self._groups_done[spec.group_id]
            self._fleet.state.forget_group(spec.group_id)
        while len(self._groups_done) > GROUPS_MAX:
            oldest, _ = self._groups_done.popitem(last=False)
            self._fleet.state.forget_group(oldest)


def _finished(
    state: SessionState, reward: float, status: str, leaves: Sequence[Trajectory], *, stored: bool
) -> Finished:
    return Finished(
        session_id=state.session_id,
        reward=reward,
        status=status,
        turns=state.turns,
        tokens=state.tokens,
        sampled_tokens=state.sampled_tokens,
        mixed=leaves[0].mixed,
        leaves=len(leaves),
        stored=stored,
        evidence=sorted({s.evidence for leaf in leaves for s in leaf.segments}),
    )


def _said(asked: Finish) -> str:
    return f"reward {'none' if asked.reward is None else format(asked.reward, 'g')}, {asked.status}"
