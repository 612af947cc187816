"""The groups of this gateway: made whole, failed members sampled again, closed short or given up with all they have.

Owner of every `GroupState`. Sessions tell it how they end; it makes and abandons sessions, and tells the experience
buffer which groups are whole with fewer members than were asked for. An order to make or abandon a group comes to its
end when who gave it is gone.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence

from gateway.core.endings import How
from gateway.core.groups import Close, GiveUp, GroupState, Resample
from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import GroupId, SessionId
from gateway.experience import ExperienceBuffer
from gateway.runtime.orders import Orders
from gateway.sessions.endings import Endings
from gateway.sessions.registry import SessionRegistry
from gateway.store.groups import Group, GroupStore
from protos.errors import Conflict, LaminarError, NotFound, OutOfCapacity

log = logging.getLogger(__name__)

GROUPS_MAX = 10_000
"""Remembered, ended ones first forgotten."""


class Groups:
    def __init__(self, live: SessionRegistry, endings: Endings, buffer: ExperienceBuffer, store: GroupStore) -> None:
        self._live, self._endings, self._buffer, self._store = live, endings, buffer, store
        self._groups: OrderedDict[GroupId, Group] = OrderedDict()
        self._orders = Orders()
        endings.on_end = self.session_ended

    async def create(self, spec: SessionSpec, *, group_min: int, resample_max: int) -> Group:
        """`spec` is that of each member but for its id and index. All of them are made, or none is."""
        return await self._orders.carry_out(self._create(spec, group_min, resample_max), f"group-{spec.group_id}")

    async def close(self) -> None:
        """What was begun comes to its end."""
        await self._orders.done()

    async def _create(self, spec: SessionSpec, group_min: int, resample_max: int) -> Group:
        if spec.group_id in self._groups:
            phase = self._groups[spec.group_id].state.phase
            ended = "" if phase == "open" else f" ({phase}): trajectories are known by it, so that a name is used once"
            raise Conflict(
                f"there was already a group {spec.group_id!r}{ended}", hint="leave group_id out to get a new one"
            )
        await self._make_room()
        state = GroupState(spec.group_id, spec.group_size, group_min, resample_max)
        group = Group(state, spec)
        try:
            for index in range(spec.group_size):
                self._sample(group, index)
        except LaminarError:
            for session_id in list(state.live):
                await self._endings.abandon(session_id, "its group could not be made whole")
            raise
        self._groups[spec.group_id] = group
        await self._store.save(group)
        return group

    async def restore(self) -> None:
        """Groups of an earlier life; to be called once sessions are restored. What ended unheard is made good."""
        for group in await self._store.load():
            self._groups[group.state.group_id] = group
            for session_id in list(group.state.live):
                if self._live.find(session_id) is None:
                    ended = self._live.ended(session_id)
                    await self._member_ended(group, session_id, "abandoned" if ended is None else ended.how)

    def get(self, group_id: GroupId) -> Group:
        group = self._groups.get(group_id)
        if group is None:
            raise NotFound(f"no group {group_id!r}", hint="make it with POST /groups")
        return group

    def replacement(self, session_id: SessionId, group_id: GroupId) -> tuple[SessionId, str] | None:
        """The session that took the place of a failed one, and its key."""
        group = self._groups.get(group_id)
        name = None if group is None else group.replaced.get(session_id)
        if group is None or name is None or name not in group.keys:
            return None
        return name, group.keys[name]

    async def abandon(self, group_id: GroupId, reason: str) -> None:
        await self._orders.carry_out(self._abandon(group_id, reason), f"abandon-{group_id}")

    async def _abandon(self, group_id: GroupId, reason: str) -> None:
        group = self.get(group_id)
        group.state.abandon()
        await self._abort(group, reason)
        await self._store.save(group)

    async def session_ended(self, session: SessionState, how: How) -> None:
        group = self._groups.get(session.spec.group_id)
        if group is not None:
            if how == "finished":
                group.state.sampled_under(session.sampled_versions)
            await self._member_ended(group, session.session_id, how)

    async def _member_ended(self, group: Group, session_id: SessionId, how: How) -> None:
        if self._live.parent_ended(group.spec):
            group.state.resample_max = group.state.resampled  # no more children can be made
        outcome = group.state.ended(session_id, how)
        group.keys.pop(session_id, None)
        if group.state.phase == "abandoned" and how == "finished":
            await self._buffer.drop_group(group.state.group_id)  # it was being finished as the group was given up
        if isinstance(outcome, Resample):
            if self._live.draining:
                return  # nothing new begins: the next start finds the place empty, and samples it again
            outcome = self._sample_again(group, session_id, outcome.sample_index)
        if isinstance(outcome, Close) and outcome.members < group.state.size:
            await self._buffer.close_group(group.state.group_id, outcome.members)
        elif isinstance(outcome, GiveUp):
            await self._abort(group, outcome.reason)
        await self._store.save(group)

    def _sample_again(self, group: Group, session_id: SessionId, index: int) -> Close | GiveUp | None:
        """The place of a failed member. Where nobody can be made for it, it is given up: the others go on."""
        try:
            group.replaced[session_id] = self._sample(group, index)
        except LaminarError as e:
            log.error("group %s: nobody takes the place of %s: %s", group.state.group_id, session_id, e)
            return group.state.without_place()
        return None

    def _sample(self, group: Group, index: int) -> SessionId:
        name = SessionId(f"s-{secrets.token_hex(8)}")
        _, key = self._live.create(dataclasses.replace(group.spec, session_id=name, sample_index=index))
        group.state.sampled(name, index)
        group.keys[name] = key
        return name

    async def _abort(self, group: Group, reason: str) -> None:
        """Member by member: one that cannot be ended now keeps no other, and ends by itself."""
        log.info("group %s is given up: %s", group.state.group_id, reason)
        for session_id in list(group.state.live):
            try:
                await self._endings.abandon(session_id, f"its group is given up: {reason}")
            except LaminarError as e:
                log.warning("group %s: member %s is not abandoned: %s", group.state.group_id, session_id, e)
        await self._buffer.drop_group(group.state.group_id)

    async def _make_room(self) -> None:
        if len(self._groups) < GROUPS_MAX:
            return
        ended: Sequence[GroupId] = [name for name, group in self._groups.items() if group.state.phase != "open"]
        if not ended:
            raise OutOfCapacity(f"{len(self._groups)} groups are open", hint="end some", retry_after_s=5.0)
        del self._groups[ended[0]]
        await self._store.forget(ended[0])
