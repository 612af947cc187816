"""What callers do with groups: create, look up, abandon; and their restoration. Completes also when a caller leaves."""

from __future__ import annotations

import asyncio

from gateway.core.groups import GroupState
from gateway.core.sessions import SessionSpec
from gateway.core.types import GroupId, SessionId
from gateway.runtime.shielded import ShieldedTasks
from gateway.sessions.endings import Endings
from gateway.sessions.group_registry import GroupRegistry
from gateway.sessions.registry import SessionRegistry
from gateway.store.groups import Group
from protos.errors import Conflict, LaminarError, NotFound

SAMPLED_AT_ONCE = 256
"""Members made in one step: some 5 ms."""


class UnknownGroup(NotFound):
    """No group of this name is, or is remembered, at this gateway."""

    def __init__(self, group_id: str) -> None:
        super().__init__(f"no group {group_id!r}", hint="make it with POST /groups")
        self.group_id = group_id


class GroupService:
    """Above `Endings`, since abandoning a group ends sessions."""

    def __init__(self, live: SessionRegistry, endings: Endings, book: GroupRegistry) -> None:
        self._live, self._endings, self._book = live, endings, book
        self._shielded = ShieldedTasks()
        self._making: set[GroupId] = set()

    async def create(self, spec: SessionSpec, *, group_min: int, resample_max: int) -> Group:
        """Makes a session for each member, or none. `spec`: of each member, but for its id and index."""
        return await self._shielded.run(self._create(spec, group_min, resample_max), f"group-{spec.group_id}")

    async def close(self) -> None:
        """Waits for what is in progress."""
        await self._shielded.drain()

    async def _create(self, spec: SessionSpec, group_min: int, resample_max: int) -> Group:
        if spec.group_id in self._making:
            raise Conflict(f"group {spec.group_id!r} is being made", hint="leave group_id out to get a new one")
        self._making.add(spec.group_id)
        try:
            return await self._make(spec, group_min, resample_max)
        finally:
            self._making.discard(spec.group_id)

    async def _make(self, spec: SessionSpec, group_min: int, resample_max: int) -> Group:
        if (known := self._book.find(spec.group_id)) is not None:
            phase = known.state.phase
            ended = "" if phase == "open" else f" ({phase}); trajectories carry its name: it is used once"
            raise Conflict(
                f"there was already a group {spec.group_id!r}{ended}", hint="leave group_id out to get a new one"
            )
        self._book.check_unused(spec.group_id)
        await self._book.make_room()
        state = GroupState(spec.group_id, spec.group_size, group_min, resample_max)
        group = Group(state, spec)
        try:
            for index in range(spec.group_size):
                self._book.sample(group, index)
                if index % SAMPLED_AT_ONCE == SAMPLED_AT_ONCE - 1:
                    await asyncio.sleep(0)  # thousands would hold the event loop
        except LaminarError:
            for session_id in list(state.live):
                await self._endings.abandon(session_id, "its group could not be made whole")
            raise
        self._book.add(group)
        await self._end_gone(group)
        await self._book.save(group)
        return group

    async def restore(self) -> None:
        """Restores the groups of an earlier life of the gateway; call it after sessions are restored."""
        for group in await self._book.load():
            await self._end_gone(group)

    async def _end_gone(self, group: Group) -> None:
        """Ends members whose end the group does not know of: it was not there, or not written, as they ended."""
        for session_id in list(group.state.live):
            if self._live.find(session_id) is None:
                ended = self._live.ended(session_id)
                await self._endings.member_ended(group, session_id, "abandoned" if ended is None else ended.how)

    def open(self) -> list[GroupId]:
        return self._book.open()

    def get(self, group_id: GroupId) -> Group:
        group = self._book.find(group_id)
        if group is None:
            raise UnknownGroup(group_id)
        return group

    def replacement(self, session_id: SessionId, group_id: GroupId) -> tuple[SessionId, str] | None:
        """The session that took the place of a failed one, and its key."""
        group = self._book.find(group_id)
        name = None if group is None else group.replaced.get(session_id)
        if group is None or name is None or name not in group.keys:
            return None
        return name, group.keys[name]

    async def abandon(self, group_id: GroupId, reason: str) -> None:
        await self._shielded.run(self._abandon(group_id, reason), f"abandon-{group_id}")

    async def _abandon(self, group_id: GroupId, reason: str) -> None:
        group = self.get(group_id)
        group.state.abandon()
        await self._endings.give_up_group(group, reason)
        await self._book.save(group)
