"""The groups of this gateway. Failed members are sampled again; a group short of members is closed or given up.

Owner of every `GroupState`. `endings` reports how members end; the experience buffer gets from here which groups are
whole with fewer members than were requested. `group_service` serves callers.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence

from gateway.core.endings import How
from gateway.core.groups import Close, GiveUp, Resample
from gateway.core.sessions import SessionState
from gateway.core.types import GroupId, SessionId
from gateway.experience import ExperienceBuffer
from gateway.sessions.registry import SessionRegistry
from gateway.store.groups import Group, GroupStore
from protos.errors import LaminarError, OutOfCapacity

log = logging.getLogger(__name__)

GROUPS_MAX = 10_000
"""Groups remembered; ended ones are forgotten first."""


class GroupRegistry:
    """Groups by id, open ones and those that have ended; a bounded number."""

    def __init__(self, live: SessionRegistry, buffer: ExperienceBuffer, store: GroupStore) -> None:
        self._live, self._buffer, self._store = live, buffer, store
        self._groups: OrderedDict[GroupId, Group] = OrderedDict()
        live.group_owner = self.owner

    def find(self, group_id: GroupId) -> Group | None:
        return self._groups.get(group_id)

    def owner(self, group_id: GroupId) -> str | None:
        """The name whose API key made the group by `POST /groups`; None: there is no such group."""
        group = self._groups.get(group_id)
        return None if group is None else group.spec.owner

    def of(self, session: SessionState) -> Group | None:
        return self._groups.get(session.spec.group_id)

    def add(self, group: Group) -> None:
        self._groups[group.state.group_id] = group

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
            log.error("group %s: no session can replace %s: %s", group.state.group_id, session_id, e)
            return group.state.without_place()
        return None

    def sample(self, group: Group, index: int) -> SessionId:
        """A new session in the group."""
        name = SessionId(f"s-{secrets.token_hex(8)}")
        _, key = self._live.create(dataclasses.replace(group.spec, session_id=name, sample_index=index))
        group.state.sampled(name, index)
        group.keys[name] = key
        return name

    async def make_room(self) -> None:
        """Forgets the oldest group that has ended. OutOfCapacity when all are open."""
        if len(self._groups) < GROUPS_MAX:
            return
        ended: Sequence[GroupId] = [name for name, group in self._groups.items() if group.state.phase != "open"]
        if not ended:
            raise OutOfCapacity(f"{len(self._groups)} groups are open", hint="end some", retry_after_s=5.0)
        del self._groups[ended[0]]
        await self._store.forget(ended[0])
