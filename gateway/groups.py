"""The groups of this gateway: made whole, failed members sampled again, closed short or given up with all they have.

Owner of every `GroupState`. Sessions tell it how they end; it makes and abandons sessions, and tells the experience
buffer which groups are whole with fewer members than were asked for.
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
from gateway.data import ExperienceBuffer
from gateway.data.groups import Group, GroupStore
from gateway.endings import Endings
from gateway.live import LiveSessions
from protos.errors import Conflict, LaminarError, NotFound, OutOfCapacity

log = logging.getLogger(__name__)

GROUPS_MAX = 10_000
"""Remembered, ended ones first forgotten."""


class Groups:
    def __init__(self, live: LiveSessions, endings: Endings, buffer: ExperienceBuffer, store: GroupStore) -> None:
        self._live, self._endings, self._buffer, self._store = live, endings, buffer, store
        self._groups: OrderedDict[GroupId, Group] = OrderedDict()
        endings.on_end = self.session_ended

    async def create(self, spec: SessionSpec, *, group_min: int, resample_max: int) -> Group:
        """`spec` is that of each member but for its id and index. All of them are made, or none is."""
        if spec.group_id in self._groups:
            raise Conflict(f"there is already a group {spec.group_id!r}", hint="leave group_id out to get a new one")
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
        if isinstance(outcome, Resample):
            group.replaced[session_id] = self._sample(group, outcome.sample_index)
        elif isinstance(outcome, Close) and outcome.members < group.state.size:
            await self._buffer.close_group(group.state.group_id, outcome.members)
        elif isinstance(outcome, GiveUp):
            await self._abort(group, outcome.reason)
        await self._store.save(group)

    def _sample(self, group: Group, index: int) -> SessionId:
        name = SessionId(f"s-{secrets.token_hex(8)}")
        _, key = self._live.create(dataclasses.replace(group.spec, session_id=name, sample_index=index))
        group.state.sampled(name, index)
        group.keys[name] = key
        return name

    async def _abort(self, group: Group, reason: str) -> None:
        log.info("group %s is given up: %s", group.state.group_id, reason)
        for session_id in list(group.state.live):
            await self._endings.abandon(session_id, f"its group is given up: {reason}")
        group.state.live.clear()
        await self._buffer.drop_group(group.state.group_id)

    async def _make_room(self) -> None:
        if len(self._groups) < GROUPS_MAX:
            return
        ended: Sequence[GroupId] = [name for name, group in self._groups.items() if group.state.phase != "open"]
        if not ended:
            raise OutOfCapacity(f"{len(self._groups)} groups are open", hint="end some", retry_after_s=5.0)
        del self._groups[ended[0]]
        await self._store.forget(ended[0])
