"""The groups that a gateway knows, by id: open ones, and those that have ended.

Groups are made of sessions, and a session is made only with the rights to its group: both registries read this one.
Invariant: their number is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from gateway.core.types import GroupId
from gateway.store.groups import Group
from protos.errors import OutOfCapacity

GROUPS_MAX = 10_000
"""Groups remembered; ended ones are forgotten first."""


class KnownGroups:
    """A bounded map. What becomes of a group is `GroupRegistry`'s to decide."""

    def __init__(self) -> None:
        self._groups: OrderedDict[GroupId, Group] = OrderedDict()

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def find(self, group_id: GroupId) -> Group | None:
        return self._groups.get(group_id)

    def owner(self, group_id: GroupId) -> str | None:
        """The name whose API key made the group by `POST /groups`; None: there is no such group."""
        group = self._groups.get(group_id)
        return None if group is None else group.spec.owner

    def add(self, group: Group) -> None:
        self._groups[group.state.group_id] = group

    def forget_one(self) -> GroupId | None:
        """Forgets the oldest group that has ended, if there are as many as may be. OutOfCapacity when all are open."""
        if len(self._groups) < GROUPS_MAX:
            return None
        oldest = next((name for name, group in self._groups.items() if group.state.phase != "open"), None)
        if oldest is None:
            raise OutOfCapacity(f"{len(self._groups)} groups are open", hint="end some", retry_after_s=5.0)
        del self._groups[oldest]
        return oldest
