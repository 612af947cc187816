"""The groups of this gateway. Failed members are sampled again; a group short of members is closed or given up.

Owner of every `GroupState`. `endings` reports how members end; the experience buffer gets from here which groups are
whole with fewer members than were requested. `group_service` serves callers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from gateway.core.endings import How
from gateway.core.groups import Close, GiveUp, Resample
from gateway.core.sessions import SessionState
from gateway.core.types import GroupId, SessionId
from gateway.experience import ExperienceBuffer
from gateway.sessions.known_groups import KnownGroups
from gateway.sessions.registry import SessionRegistry
from gateway.store.groups import Group, GroupStore
from protos.errors import Conflict, LaminarError
from protos.foreign_text import quoted

log = logging.getLogger(__name__)


class GroupRegistry:
    """Groups by id, open ones and those that have ended; a bounded number."""

    def __init__(self, groups: KnownGroups, live: SessionRegistry, buffer: ExperienceBuffer, store: GroupStore) -> None:
        self._groups, self._live, self._buffer, self._store = groups, live, buffer, store

    def find(self, group_id: GroupId) -> Group | None:
        return self._groups.find(group_id)

    def open(self) -> list[GroupId]:
        """The names of those that have not ended."""
        return [group.state.group_id for group in self._groups if group.state.phase == "open"]

    def of(self, session: SessionState) -> Group | None:
        return self._groups.find(session.spec.group_id)

    def check_unused(self, group_id: GroupId) -> None:
        """Conflict for a name that other sessions have: their trajectories would count as its members'."""
        named = next((session.session_id for session in self._live if session.spec.group_id == group_id), None)
        num = self._buffer.groups()[0].get(group_id, 0)
        if named is not None:
            why = f"session {named} is in it"
        elif num:
            why = f"{num} finished session{'s' * (num > 1)} of it wait{'s' * (num == 1)} for a trainer"
        else:
            return
        raise Conflict(
            f"there is a group {group_id!r} already, of sessions made otherwise: {why}",
            hint="leave group_id out to get a new one, or abandon those sessions first",
        )

    def add(self, group: Group) -> None:
        self._groups.add(group)

    async def save(self, group: Group) -> None:
        await self._store.save(group)

    async def load(self) -> Sequence[Group]:
        """Reads the groups of an earlier life of this gateway."""
        groups = await self._store.load()
        for group in groups:
            self.add(group)
        return groups

    async def member_ended(self, group: Group, session_id: SessionId, how: How) -> GiveUp | Resample | None:
        """What the caller has to do, before it saves the group.

        GiveUp: abandon the other members. Resample: nothing new begins in this life of the gateway, so do not save the
        group; the next start finds the member gone, and samples it again.
        """
        if self._live.parent_ended(group.spec):
            group.state.resample_max = group.state.resampled  # no more children can be made
        outcome = group.state.ended(session_id, how)
        group.keys.pop(session_id, None)
        if group.state.phase == "abandoned" and how == "finished":
            await self._buffer.drop_group(group.state.group_id)  # its finish was in progress as the group was given up
        if isinstance(outcome, Resample):
            if self._live.draining:
                return outcome
            outcome = self._sample_again(group, session_id, outcome.sample_index)
        if isinstance(outcome, Close) and outcome.members < group.state.size:
            await self._buffer.close_group(group.state.group_id, outcome.members)
        return outcome if isinstance(outcome, GiveUp) else None

    def _sample_again(self, group: Group, session_id: SessionId, index: int) -> Close | GiveUp | None:
        """Samples the place of a failed member again. If no session can be made, the place is given up."""
        try:
            group.replaced[session_id] = self.sample(group, index)
        except LaminarError as e:
            names = quoted(group.state.group_id), quoted(session_id)
            log.error("group %s: no session can replace %s: %s", *names, e)
            return group.state.without_place()
        return None

    def sample(self, group: Group, index: int) -> SessionId:
        """A new session in the group."""
        name = self._live.new_id()
        _, key = self._live.create(dataclasses.replace(group.spec, session_id=name, sample_index=index))
        group.state.sampled(name, index)
        group.keys[name] = key
        return name

    async def make_room(self) -> None:
        """Forgets the oldest group that has ended. OutOfCapacity when all are open."""
        forgotten = self._groups.forget_one()
        if forgotten is not None:
            await self._store.forget(forgotten)
