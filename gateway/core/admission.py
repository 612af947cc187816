"""What holds the admission of new sessions: readers of trajectories, and groups that lack members. Pure.

Invariants:
- a reader counts once it waits for a batch or comes again: one that looks in once decides nothing for the others;
- of the readers of the last hour the one that takes most decides, so that none waits for what is never admitted;
- what is buffered of a group that lacks members, and has none under way, is nothing that a reader of groups could take:
  it holds up no session, perhaps the very one that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

READER_S = 3600.0
"""After which a reader that has not come again decides no more, if another has."""
READERS_MAX = 1000
"""Remembered; who came longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class Reader:
    """What one asks for. `group_size` None: it takes trajectories one by one."""

    name: str
    batch: int
    group_size: int | None
    staleness_max: int
    asked_at: float
    stands: bool  # it has waited for a batch, or come twice

    @property
    def bound(self) -> int:
        return (self.staleness_max + 1) * self.batch


@dataclass(slots=True)
class Readers:
    _of: dict[str, Reader] = field(default_factory=dict)  # in the order in which they came last

    def asked(
        self, name: str, batch: int, group_size: int | None, staleness_max: int, now: float, *, waits: bool
    ) -> None:
        before = self._of.pop(name, None)
        self._of[name] = Reader(name, batch, group_size, staleness_max, now, waits or before is not None)
        while len(self._of) > READERS_MAX:
            del self._of[next(iter(self._of))]

    def deciding(self, now: float) -> Reader | None:
        """The one whose batches bound what may be admitted; None: nobody does yet."""
        standing = [reader for reader in self._of.values() if reader.stands]
        recent = [reader for reader in standing if now - reader.asked_at <= READER_S] or standing[-1:]
        return max(recent, key=lambda reader: reader.bound, default=None)


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A group that its reader cannot take yet. `live`: its members under way."""

    group_id: str
    buffered: int
    size: int
    live: Sequence[str]

    @property
    def stranded(self) -> bool:
        """Nobody is under way who could make it whole."""
        return not self.live

    def __str__(self) -> str:
        if self.stranded:
            return (
                f"group {self.group_id}: {self.buffered} of {self.size} are buffered, and no member is under way: "
                "make another one, or it is dropped when it is too stale"
            )
        return (
            f"group {self.group_id}: {self.buffered} of {self.size} are buffered; it waits for {', '.join(self.live)}"
        )


def stranded(buffered: Mapping[str, int], closed: Mapping[str, int], size: int, live: Set[str]) -> int:
    """Trajectories of groups that have fewer members than their readers take, and none under way. `live`: groups that
    have."""
    return sum(
        count
        for name, count in buffered.items()
        if count < size and name not in live and count < closed.get(name, size)
    )


def waiting_groups(
    buffered: Mapping[str, int], closed: Mapping[str, int], size: int, live: Iterable[tuple[str, str]]
) -> list[WaitingGroup]:
    """Groups with members in the buffer (`buffered`), and fewer than their readers take. `closed`: whole with so many.
    `live`: sessions under way, with their groups."""
    short = {name: count for name, count in buffered.items() if count < min(size, closed.get(name, size))}
    members: dict[str, list[str]] = {name: [] for name in short}
    for session_id, group_id in live:
        if group_id in members:
            members[group_id].append(session_id)
    return [WaitingGroup(name, short[name], size, sorted(members[name])) for name in sorted(short)]
