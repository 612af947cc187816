"""How sessions end: finished with a reward, now or later, or abandoned; and with the last member their groups.

A finish goes down through the rooms once: turns (those that nobody reads are concluded), fleet (evidence for the
versions), core (the trajectories), experience and store (one commit), then the registry, the children and the group.

Invariants:
- a trajectory is in the experience buffer, on disk unless that keeps it in memory (`--experience-store`), before its
  session's finish is answered. Sessions whose versions an engine contradicts, evaluations, and sessions that are not
  for training never enter it;
- a session ends once, and only after its turns: a running turn of an abandoned session is aborted first;
- where gateways share the buffer, the session ends here first, in one commit with what is to be sent; its finish is
  answered once the trajectory landed there, and a repeated one waits for the same;
- an end or a reward that has begun is completed whether or not its caller stays; a repeated finish gets the same
  answer;
- an end or a reward that was answered survives a power cut, as far as it is on disk; one that the disk refused has had
  no effect;
- children end with their parent, before its end is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gateway.core.endings import Ended, Finish, Finished, How, Unrewarded, check_place, placed
from gateway.core.expiry import UNNAMED_MAX, crowding, why_over
from gateway.core.groups import GiveUp, Resample
from gateway.core.packing.lengths import SessionDurations
from gateway.core.rewards import Given, is_recorded, note, revised, turn_of, with_given
from gateway.core.sessions import SessionState
from gateway.core.spans import session_span
from gateway.core.types import GroupId, SessionId
from gateway.experience import ExperienceBuffer
from gateway.experience.buffer import AT_ONCE_TOKENS
from gateway.experience.stores import Undelivered
from gateway.runtime.aside import aside, let_go
from gateway.runtime.clock import unix_s
from gateway.runtime.shielded import ShieldedTasks
from gateway.sessions.group_registry import GroupRegistry
from gateway.sessions.registry import environment
from gateway.sessions.trainer import Trainer, count
from gateway.sessions.turn_service import TurnService
from gateway.store import PartialResponsePool, Timeline
from gateway.store.database import Operation
from gateway.store.groups import Group
from gateway.store.sessions import SessionStore
from protos.errors import Conflict, LaminarError, NotFound
from protos.foreign_text import quoted
from protos.telemetry.logs import about
from protos.trajectories import Trajectory

log = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 5.0
EXPIRED_AT_ONCE = 1000
"""Sessions looked at without a pause: some two milliseconds."""


class Endings:
    """Ends sessions and groups. Owner of the finishes in progress."""

    def __init__(
        self,
        sessions: TurnService,
        trainer: Trainer,
        groups: GroupRegistry,
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
        self._shielded = ShieldedTasks()
        self._finishing: dict[SessionId, tuple[Finish, asyncio.Task[Finished | None]]] = {}

    async def close(self) -> None:
        """Waits for the ends in progress."""
        await self._shielded.drain()

    # -- finished

    async def finish(self, session_id: SessionId, request: Finish) -> Finished | None:
        """Ends the session as requested, also when the caller leaves. The same request again gets the same answer.

        None: the session waits for its reward. Raises Conflict when it is ending, or has ended, in another way.
        """
        ended = self._live.ended(session_id)
        if ended is not None and ended.told is not None and request in (ended.asked, ended.first):
            await self._store.synced()
            await self._buffer.delivered(session_id)
            return ended.told
        return await self._finish_once(session_id, request)

    async def _finish_once(self, session_id: SessionId, request: Finish) -> Finished | None:
        """One task for all callers with the same request: a client's retry may come while the first is in progress."""
        before, task = self._finishing.get(session_id, (request, None))
        if before != request:
            raise Conflict(
                f"session {session_id} is being finished with {_described(before)}, not with {_described(request)}"
            )
        if task is None:
            task = self._shielded.start(self._finish(session_id, request), f"finish-{session_id}")
            self._finishing[session_id] = (request, task)
            task.add_done_callback(lambda _: self._finishing.pop(session_id))
        return await asyncio.shield(task)

    async def _finish(self, session_id: SessionId, request: Finish) -> Finished | None:
        state = self._live.get(session_id)
        named = None if request.group_id is None else self._groups.find(GroupId(request.group_id))
        check_place(session_id, state.spec.group_id, request, made=named is not None)
        await self._sessions.conclude(session_id)
        if request.reward is None:
            await self.finish_unrewarded(session_id, request)
            return None
        await self._note(state, Given(None, request.turns, request.leaves))
        finished, trajectories = await self.finish_rewarded(session_id, request)
        await aside(lambda: let_go(trajectories), long=state.tree.path_tokens > AT_ONCE_TOKENS)
        return finished

    async def _note(self, state: SessionState, given: Given) -> None:
        """Rewards of turns and leaves, in the tree and on disk."""
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

    async def finish_rewarded(self, session_id: SessionId, request: Finish) -> tuple[Finished, list[Trajectory]]:
        """Ends the session. Its trajectories, one a leaf, are in the experience buffer when this returns."""
        state, reward = self._live.get(session_id), request.reward
        assert reward is not None
        undelivered: Undelivered | None = None
        first = request if state.unrewarded is None else state.unrewarded.asked
        if state.unrewarded is None:
            self._end(state)  # before the first await: no turn may begin while evidence is collected
        try:
            await self._collect_evidence(state)
            metrics = {**first.metrics, **request.metrics}
            leaves = placed(state.trajectories(reward, first.status, metrics, unix_s()), first, request)
            trajectories = await aside(lambda: list(leaves), long=state.tree.path_tokens > AT_ONCE_TOKENS)
            stored = self._to_be_stored(state)
            finished = _finished(state, reward, first.status, trajectories, stored=stored)
            ended = Ended("finished", request, finished, state.spec.owner, None if first is request else first)
            if stored:
                try:
                    await self._buffer.add(*trajectories, along=self._ending(state, ended))
                except Undelivered as e:  # the end is committed, and only its report has to wait
                    undelivered = e
        except Exception:
            if state.unrewarded is None:
                state.phase = "live"  # whatever it was, such as a full disk: the session can be finished again
            raise
        self._close(state, ended, reward=reward)
        self._counters.trajectories_finished += 1
        self._durations.ended(trajectories[0].finished_unix_s - trajectories[0].started_unix_s)
        if state.spec.trains:
            self._trainer.rewards.add(unix_s(), sum(leaf.reward / len(trajectories) for leaf in trajectories))
        await self._after(state, ended, is_written=stored)
        if undelivered is not None:
            raise undelivered
        return finished, trajectories

    def _to_be_stored(self, state: SessionState) -> bool:
        """Whether the trajectories enter the experience buffer."""
        if state.contradicted:
            extra = about(state.spec.trace, session=state.session_id)
            log.error(
                "session %s is not trained on: engines contradict its versions", quoted(state.session_id), extra=extra
            )
            return False
        return state.spec.trains

    def _ending(self, state: SessionState, ended: Ended) -> Operation[object]:
        """The session's end, to be written in one commit with its trajectories: a crash leaves both or none. Those in
        memory are there only after it, and a crash loses them."""
        end, forget = self._store.ending(state.session_id, ended), self._pool.forgetting(state.session_id)
        return lambda connection: (end(connection), forget(connection))

    async def finish_unrewarded(self, session_id: SessionId, request: Finish) -> None:
        """Ends the session. Its trajectories wait `reward_window_s` for their reward, also over a restart."""
        state = self._live.get(session_id)
        if state.unrewarded is not None:
            if state.unrewarded.asked == request:
                return
            raise Conflict(
                f"session {session_id} was finished with {_described(state.unrewarded.asked)} and waits for its reward",
                hint="give it with POST /sessions/{id}/reward",
            )
        await self._note(state, Given(None, request.turns, request.leaves))
        self._end(state)
        state.unrewarded = Unrewarded(request, unix_s() + self._config.reward_window_s)
        self._live.presence.look_again(state, unix_s())
        try:
            await self._store.unrewarded(session_id, state.unrewarded)
        except LaminarError:
            state.phase, state.unrewarded = "live", None
            self._live.presence.look_again(state, unix_s())
            raise
        await self._store.synced()
        await self._part(state)

    async def _collect_evidence(self, state: SessionState) -> None:
        """For all segments at once: an engine is checked once, however many of them it made."""
        turns = list(state.tree.turns.values())
        checked = iter(await self._fleet.evidence.collect([s for turn in turns for s in turn.segments]))
        for turn in turns:
            turn.segments = [next(checked) for _ in turn.segments]

    def _end(self, state: SessionState) -> None:
        if not state.turns:
            raise Conflict(f"session {state.session_id} has no turn to reward", hint="abandon it instead")
        state.end("finished")

    async def reward(self, session_id: SessionId, given: Given) -> str:
        """Rewards of the session, its turns and leaves, also after its finish, and when the caller leaves.

        Returns the session's state: "live", "unrewarded" or "finished".
        """
        state = self._live.find(session_id)
        if given.session is None or state is None:
            return await self._shielded.run(self._reward(session_id, given), f"reward-{session_id}")
        if state.unrewarded is None:
            raise Conflict(f"session {session_id} is live", hint="give its reward with POST /sessions/{id}/finish")
        await self._finish_once(session_id, Finish(given.session, dict(given.turns), dict(given.leaves)))
        return "finished"

    async def _reward(self, session_id: SessionId, given: Given) -> str:
        state = self._live.find(session_id)
        if state is None:
            ended = self._live.ended(session_id)
            if ended is None or ended.how != "finished":
                self._live.get(session_id)  # raises
            else:
                await self._revise(session_id, ended, given)
            return "finished"
        await self._note(state, given)
        await self._store.synced()
        return "live" if state.unrewarded is None else "unrewarded"

    async def _revise(self, session_id: SessionId, ended: Ended, given: Given) -> None:
        """Rewards of a session that has ended. The same again are answered again, also once a trainer has used it."""
        await self._buffer.delivered(session_id)
        if not is_recorded(ended, given):
            try:
                await self._buffer.revise(session_id, lambda leaves: self._revised(leaves, given))
            except (Conflict, NotFound) as e:
                why = f"session {session_id} is already {ended}, and other rewards come too late: {e.message}"
                raise Conflict(why, hint=e.hint) from e
            self._live.revise_ended(session_id, ended := with_given(ended, given))
            await self._store.end(session_id, ended)
        await self._store.synced()

    def _revised(self, leaves: list[Trajectory], given: Given) -> list[Trajectory]:
        late_s = unix_s() - leaves[0].finished_unix_s - self._config.reward_window_s
        if late_s > 0:
            raise Conflict(f"the window for rewards of {leaves[0].session_id} ended {late_s:.0f} s ago")
        return revised(leaves, given)

    # -- abandoned

    async def abandon(self, session_id: SessionId, reason: str) -> None:
        """Ends the session without a trajectory, also when the caller leaves. Its running turns are aborted."""
        await self._shielded.run(self._abandon(session_id, reason), f"abandon-{session_id}")

    async def _abandon(self, session_id: SessionId, reason: str) -> None:
        state = self._live.get(session_id)
        if session_id in self._finishing:
            raise Conflict(f"session {session_id} is being finished with {_described(self._finishing[session_id][0])}")
        if state.unrewarded is not None:
            state.unrewarded, state.phase = None, "live"
            self._live.presence.look_again(state, unix_s())
        state.end("abandoned")  # before the aborts: none of its turns may be replaced by a retry
        for turn in self._sessions.joinable.of_session(session_id):
            await turn.abort(f"its session was abandoned ({reason})")
        ended = Ended("abandoned", owner=state.spec.owner)
        self._close(state, ended, reason=reason)
        self._counters.sessions_abandoned += 1
        await self._after(state, ended)

    async def expire(self) -> None:
        """Abandons sessions that are over, and forgets turns that cannot be joined any more; until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            await self._sessions.sweep()
            for number, state in enumerate(list(self._live), 1):
                await self._abandon_if_over(state)
                if number % EXPIRED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await self.make_room()

    async def _abandon_if_over(self, state: SessionState) -> None:
        if not self._why_over(state):
            return
        try:
            await self._shielded.run(self._abandon_over(state), f"expire-{state.session_id}")
        except LaminarError as e:  # the next round tries again
            extra = about(state.spec.trace, session=state.session_id)
            log.error("session %s is over, and cannot be ended: %s", quoted(state.session_id), e, extra=extra)

    async def make_room(self) -> None:
        """Abandons idle sessions of unnamed calls, where there are too many."""
        for state in crowding(self._live.unnamed(), min(UNNAMED_MAX, self._config.sessions_max // 2)):
            if self._live.find(state.session_id) is not state or state.running:
                continue  # it has ended or gone on meanwhile
            try:
                await self.abandon(state.session_id, "later calls without a session took its place")
            except LaminarError as e:  # the next round tries again
                log.error("session %s gives no room: %s", quoted(state.session_id), e)

    async def _abandon_over(self, state: SessionState) -> None:
        """Checks again, since the session may have gone on meanwhile, or ended with its parent."""
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
        """Releases the parent that waits for the session, and ends its children."""
        self._live.unblock(state)
        for child in self._live.children(state.session_id):
            await self._abandon_if_over(child)

    async def _after(self, state: SessionState, ended: Ended, *, is_written: bool = False) -> None:
        """The end goes to disk, unless the trajectories' commit had it; then children, engines and the group follow."""
        if not is_written:
            await self._pool.flush()  # ends of turns that were aborted
            await self._store.end(state.session_id, ended, along=self._pool.forgetting(state.session_id))
        await self._store.synced()
        await self._part(state)
        self._fleet.decide_soon()
        if (group := self._groups.of(state)) is not None:
            if ended.how == "finished":
                group.state.sampled_under(state.sampled_versions)
            await self.member_ended(group, state.session_id, ended.how)

    async def member_ended(self, group: Group, session_id: SessionId, how: How) -> None:
        """What follows for the group: another member, its end with those it has, or the end of all the others."""
        outcome = await self._groups.member_ended(group, session_id, how)
        if isinstance(outcome, Resample):
            return
        if isinstance(outcome, GiveUp):
            await self.give_up_group(group, outcome.reason)
        await self._groups.save(group)

    async def give_up_group(self, group: Group, reason: str) -> None:
        """Abandons the members one by one: a member that cannot be ended now ends by itself, and delays no other."""
        log.info("group %s is given up: %s", quoted(group.state.group_id), quoted(reason))
        for session_id in list(group.state.live):
            try:
                await self.abandon(session_id, f"its group is given up: {reason}")
            except LaminarError as e:
                names = quoted(group.state.group_id), quoted(session_id)
                log.warning("group %s: member %s is not abandoned: %s", *names, e)
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
        if (tracer := self._live.tracer) is not None and (trace := state.spec.trace) is not None and trace.sampled:
            tracer.record(session_span(state, trace, ended.how, unix_s()))
        self._sessions.forget(state, ended)


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
        evidence=sorted({s.evidence for turn in state.tree.turns.values() for s in turn.segments}),
    )


def _described(request: Finish) -> str:
    return f"reward {'none' if request.reward is None else format(request.reward, 'g')}, {request.status}"
