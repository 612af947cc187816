"""What bounds the admission of new sessions: readers of trajectories, and groups that lack members. Pure.

New sessions wait while running and buffered trajectories reach (staleness bound + 1) batches: more would be too stale
when the trainer takes them. Invariants:
- a reader counts once it waits for a batch or samples again: a single sample decides nothing for the others;
- of the readers of the last hour, the one with the largest bound decides: else a reader could wait for a batch that is
  never admitted;
- buffered trajectories of a group that lacks members, and has none running, do not count: no reader of groups can take
  them. Counted, they could block the very session that the group waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

READER_S = 3600.0
"""After which a reader that has not sampled again does not count, if another has."""
READERS_MAX = 1000
"""Readers remembered; the one that sampled longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader's last request. `group_size` None: it takes trajectories one by one."""

    name: str
    batch: int
    group_size: int | None
    staleness_max: int
    requested_at: float
    counts: bool  # it has waited for a batch, or sampled twice

    @property
    def bound(self) -> int:
        return (self.staleness_max + 1) * self.batch


@dataclass(slots=True)
class Readers:
    _of: dict[str, Reader] = field(default_factory=dict)  # in the order of their last requests

    def requested(
        self, name: str, batch: int, group_size: int | None, staleness_max: int, now: float, *, waits: bool
    ) -> None:
        before = self._of.pop(name, None)
        self._of[name] = Reader(name, batch, group_size, staleness_max, now, waits or before is not None)
        while len(self._of) > READERS_MAX:
            del self._of[next(iter(self._of))]

    def deciding(self, now: float) -> Reader | None:
        """The reader whose batches bound admission; None: there is none yet."""
        counting = [reader for reader in self._of.values() if reader.counts]
        recent = [reader for reader in counting if now - reader.requested_at <= READER_S] or counting[-1:]
        return max(recent, key=lambda reader: reader.bound, default=None)


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A group that its reader cannot take yet. `live`: its members that have not ended."""

    group_id: str
    buffered: int
    size: int
    live: Sequence[str]

    @property
    def stranded(self) -> bool:
        """No member runs that could complete it."""
        return not self.live

    def __str__(self) -> str:
        if self.stranded:
            return (
                f"group {self.group_id}: {self.buffered} of {self.size} are buffered, and no member is running: "
                "make another one, or it is dropped when it is too stale"
            )
        return (
            f"group {self.group_id}: {self.buffered} of {self.size} are buffered; it waits for {', '.join(self.live)}"
        )


def stranded(buffered: Mapping[str, int], closed: Mapping[str, int], size: int, live: Set[str]) -> int:
    """Trajectories of groups that have fewer members than their readers take, and none running. `live`: groups that
    have running members."""
    return sum(
        count
        for name, count in buffered.items()
        if count < size and name not in live and count < closed.get(name, size)
    )


def waiting_groups(
    buffered: Mapping[str, int], closed: Mapping[str, int], size: int, live: Iterable[tuple[str, str]]
) -> list[WaitingGroup]:
    """Groups with members in the buffer (`buffered`), and fewer than their readers take. `closed`: groups that are
    whole with fewer members. `live`: running sessions, with their groups."""
    short = {name: count for name, count in buffered.items() if count < min(size, closed.get(name, size))}
    members: dict[str, list[str]] = {name: [] for name in short}
    for session_id, group_id in live:
        if group_id in members:
            members[group_id].append(session_id)
    return [WaitingGroup(name, short[name], size, sorted(members[name])) for name in sorted(short)]
