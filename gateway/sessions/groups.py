"""The groups of this gateway: failed members sampled again, closed short, or given up with all they have.

Owner of every `GroupState`: `endings` reports how members end. The experience buffer learns from here which groups are
whole with fewer members than were requested. What callers order about groups is in `group_orders`.
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
"""Remembered, ended ones first forgotten."""


class GroupBook:
    """The groups that are known, open ones and those that have ended; a bounded number."""

    def __init__(self, live: SessionRegistry, buffer: ExperienceBuffer, store: GroupStore) -> None:
        self._live, self._buffer, self._store = live, buffer, store
        self._groups: OrderedDict[GroupId, Group] = OrderedDict()

    def find(self, group_id: GroupId) -> Group | None:
        return self._groups.get(group_id)

    def of(self, session: SessionState) -> Group | None:
        return self._groups.get(session.spec.group_id)

    def add(self, group: Group) -> None:
        self._groups[group.state.group_id] = group

    async def save(self, group: Group) -> None:
        await self._store.save(group)

    async def load(self) -> Sequence[Group]:
        """Groups of an earlier life of this gateway, which are known from now on."""
        groups = await self._store.load()
        for group in groups:
            self.add(group)
        return groups

    async def member_ended(self, group: Group, session_id: SessionId, how: How) -> GiveUp | Resample | None:
        """What is left to the caller, who saves the group afterwards.

        GiveUp: the other members are to be abandoned. Resample: nothing new begins in this life of the gateway. The
        group is not to be saved then: the next start finds the member gone, and samples it again.
        """
        if self._live.parent_ended(group.spec):
            group.state.resample_max = group.state.resampled  # no more children can be made
        outcome = group.state.ended(session_id, how)
        group.keys.pop(session_id, None)
        if group.state.phase == "abandoned" and how == "finished":
            await self._buffer.drop_group(group.state.group_id)  # it was being finished as the group was given up
        if isinstance(outcome, Resample):
            if self._live.draining:
                return outcome
            outcome = self._sample_again(group, session_id, outcome.sample_index)
        if isinstance(outcome, Close) and outcome.members < group.state.size:
            await self._buffer.close_group(group.state.group_id, outcome.members)
        return outcome if isinstance(outcome, GiveUp) else None

    def _sample_again(self, group: Group, session_id: SessionId, index: int) -> Close | GiveUp | None:
        """The place of a failed member. Where nobody can be made for it, it is given up: the others go on."""
        try:
            group.replaced[session_id] = self.sample(group, index)
        except LaminarError as e:
            log.error("group %s: nobody takes the place of %s: %s", group.state.group_id, session_id, e)
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
