"""A group: the sessions sampled from one prompt, useful to a trainer only when its last one has ended. Pure.

Invariants:
- every place of the group is live, finished, or given up; a place is given up only once `resample_max` is used up;
- a group closes when no place is live, with at least `group_min` finished; it is given up as soon as that cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gateway.core.types import GroupId, SessionId
from protos.errors import Conflict

GroupPhase = Literal["open", "closed", "abandoned"]


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
    """`live` are the places under way, by their session."""

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
        """Its members are not all of one version: their rewards compare less well."""
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
