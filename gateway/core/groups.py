"""Groups: the sessions sampled from one prompt, useful to a trainer only when the last one has ended. Pure.

Invariants:
- every place of the group is live, finished, or given up; a place is given up only once `resample_max` is used up;
- a group closes when no place is live, with at least `group_min` finished; it is given up as soon as that is not
  possible any more;
- the sessions of a group that have yet to begin follow the first one to its version, while an engine serves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gateway.core.types import GroupId, SessionId, Version
from protos.errors import Conflict

GroupPhase = Literal["open", "closed", "abandoned"]

GROUPS_MAX = 10_000
"""Groups some of whose sessions have ended; the version of the oldest is forgotten first."""


@dataclass(slots=True)
class GroupVersions:
    """Owner of the version under which the sessions of each group begin."""

    _versions: dict[GroupId, Version] = field(default_factory=dict)
    _ended: OrderedDict[GroupId, int] = field(default_factory=OrderedDict)  # sessions, of groups that have others

    def get(self, group_id: GroupId) -> Version | None:
        return self._versions.get(group_id)

    def note(self, group_id: GroupId, version: Version) -> None:
        """A session of the group has begun under `version`, and no engine serves an earlier one's."""
        self._versions[group_id] = version

    def session_ended(self, group_id: GroupId, group_size: int) -> None:
        """A session of the group has ended; with the last one the group's version is forgotten."""
        ended = self._ended.get(group_id, 0) + 1
        if ended < group_size:
            self._ended[group_id] = ended
        else:
            self._ended.pop(group_id, None)
            self._versions.pop(group_id, None)
        while len(self._ended) > GROUPS_MAX:
            oldest, _ = self._ended.popitem(last=False)
            self._versions.pop(oldest, None)


@dataclass(frozen=True, slots=True)
class Resample:
    """The place is sampled again."""

    sample_index: int


@dataclass(frozen=True, slots=True)
class Close:
    """Every place has ended; `members` have finished."""

    members: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The group cannot reach its minimum any more."""

    reason: str


@dataclass(slots=True)
class GroupState:
    """`live`: the sample index of each session that has not ended."""

    group_id: GroupId
    size: int
    group_min: int
    resample_max: int = 0
    phase: GroupPhase = "open"
    resampled: int = 0
    live: dict[SessionId, int] = field(default_factory=dict)
    finished: list[SessionId] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # that any finished member was sampled under, ascending

    def sampled(self, session_id: SessionId, sample_index: int) -> None:
        self.live[session_id] = sample_index

    @property
    def mixed(self) -> bool:
        """Its members were sampled under several versions: their rewards compare less well."""
        return len(self.versions) > 1

    def sampled_under(self, versions: Iterable[int]) -> None:
        self.versions = sorted({*self.versions, *versions})

    def ended(self, session_id: SessionId, how: Literal["finished", "abandoned"]) -> Resample | Close | GiveUp | None:
        """A member has ended. None: others are awaited, the group is over, or it is no member (any more)."""
        if session_id not in self.live:
            return None
        index = self.live.pop(session_id)
        if self.phase != "open":
            return None
        if how == "finished":
            self.finished.append(session_id)
        elif self.resampled < self.resample_max:
            self.resampled += 1
            return Resample(index)
        return self.without_place()

    def without_place(self) -> Close | GiveUp | None:
        """A place has ended, and is not (or cannot be) sampled again. None: others are awaited."""
        if len(self.finished) + len(self.live) < self.group_min:
            self.phase = "abandoned"
            return GiveUp(f"{len(self.finished) + len(self.live)} members are left, and it needs {self.group_min}")
        if self.live:
            return None
        self.phase = "closed"
        return Close(len(self.finished))

    def abandon(self) -> None:
        if self.phase != "open":
            raise Conflict(f"group {self.group_id} is already {self.phase}")
        self.phase = "abandoned"
