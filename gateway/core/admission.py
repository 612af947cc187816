"""What bounds the admission of new sessions: readers of trajectories, and groups that lack members. Pure.

New sessions wait while running and buffered trajectories reach (staleness bound + 1) batches: more would be too stale
when the trainer takes them. Invariants:
- a reader counts once it waits for a batch or samples again: a single sample decides nothing for the others. One that
  has neither sampled nor held a lease for `READER_S` does not count any more;
- of the readers that count, the one with the largest bound decides: else a reader could wait for a batch that is never
  admitted. Of several with that bound it is the one that says the lowest version, whoever sampled last;
- a reader's smaller batch counts from its second request on: one small sample under the trainer's name lowers nothing;
- a buffered trajectory counts while any of those readers may take it;
- buffered trajectories of a group that lacks members, and has none running, do not count: no reader of groups can take
  them. Counted, they could block the very session that the group waits for;
- a session whose client has sent nothing for `idle_after_s` does not count, unless something keeps it (`Keeper`): its
  agent may have crashed. It counts again with its next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from gateway.core.selection import Bound
from gateway.core.sessions import SessionState

READER_S = 3600.0
"""After which a reader that neither sampled nor held a lease does not count."""
READERS_MAX = 1000
"""Readers remembered; the one that sampled longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader's last request. `group_size` None: it takes trajectories one by one. `version`: the one that it said.
    `once`: a smaller batch that it requested last, and only once so far."""

    name: str
    batch: int
    group_size: int | None
    staleness_max: int
    requested_at: float
    counts: bool  # it has waited for a batch, or sampled twice
    version: int = 0
    by_token: bool = False
    once: int = 0

    @property
    def bound(self) -> int:
        return (self.staleness_max + 1) * self.batch

    def takes(self, newest: int) -> Bound:
        """What it takes, where `newest` is the newest version that a relay announced."""
        return Bound(max(self.version, newest), self.staleness_max, self.by_token)


@dataclass(slots=True)
class Readers:
    _of: dict[str, Reader] = field(default_factory=dict)  # in the order of their last requests

    @classmethod
    def of(cls, readers: Iterable[Reader]) -> Readers:
        return cls({reader.name: reader for reader in readers})

    def all(self) -> list[Reader]:
        return list(self._of.values())

    def requested(
        self,
        name: str,
        batch: int,
        group_size: int | None,
        staleness_max: int,
        now: float,
        *,
        waits: bool,
        version: int = 0,
        by_token: bool = False,
    ) -> None:
        before = self._of.pop(name, None)
        counts = waits or before is not None
        found = Reader(name, batch, group_size, staleness_max, now, counts, version, by_token)
        if before is not None and before.counts and found.bound < before.bound and found.bound != before.once:
            found = replace(before, requested_at=now, version=version, once=found.bound)
        self._of[name] = found
        while len(self._of) > READERS_MAX:
            del self._of[next(iter(self._of))]

    def counting(self, now: float, holds_lease: Callable[[str], bool] = lambda name: False) -> list[Reader]:
        """The readers whose batches count, the one that decides first. `holds_lease`: whether a reader of that name has
        trajectories now, as during a long step."""
        counting = (
            reader
            for reader in self._of.values()
            if reader.counts and (now - reader.requested_at <= READER_S or holds_lease(reader.name))
        )
        return sorted(counting, key=lambda reader: (-reader.bound, reader.version))


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
                f"group {self.group_id}: {self.buffered} of the {self.size} that its reader takes are buffered, and no "
                "member is running: make another one, or have the reader take smaller groups; else it goes as stale"
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
    buffered: Mapping[str, int], closed: Mapping[str, int], size: int, live: Mapping[str, Collection[str]]
) -> list[WaitingGroup]:
    """Groups with members in the buffer (`buffered`), and fewer than their readers take. `closed`: groups that are
    whole with fewer members. `live`: running sessions, by their group."""
    short = {name: count for name, count in buffered.items() if count < min(size, closed.get(name, size))}
    return [WaitingGroup(name, short[name], size, sorted(live.get(name, ()))) for name in sorted(short)]


Keeper = Literal["turn", "runner", "child", "reward"]
"""What keeps a session from being idle: a turn, now or lately; a runner that has the lease of its sample; a child that
it waits for, and that is not idle itself; or that it has ended and waits for its reward."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions for training that have begun and not ended. `running` count against the bound. Of those, `silent` have
    had no request for `idle_after_s`, and something else keeps them. `idle` do not count."""

    running: int = 0
    silent: int = 0
    idle: int = 0


def is_silent(state: SessionState, now_unix_s: float, idle_after_s: float) -> bool:
    """No turn of it is in flight, and none ended so lately."""
    return not state.running and now_unix_s - state.touched_unix_s >= idle_after_s
