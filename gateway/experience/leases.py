"""Which trajectories a reader gets: pure bookkeeping of the experience buffer (order, leases, staleness, groups).

Invariants:
- an entry is either free or in exactly one live lease; a lease that lapsed gives its entries back to their old place;
- free entries are given out in the order they came; groups in the order of their oldest member, whole or not at all;
- never more than `capacity` entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """`oldest_version` is the oldest weight version that sampled a token of it."""

    seq: int
    session_id: str
    group_id: str
    oldest_version: int


@dataclass(slots=True)
class LeaseState:
    lease_id: str
    reader: str
    until: float
    entries: dict[int, Entry]


@dataclass(slots=True)
class BufferState:
    """`now` is in seconds of any one clock; `trainer_version` is the newest that a reader declared."""

    capacity: int
    trainer_version: int = 0
    staleness_max: int | None = None
    free: dict[int, Entry] = field(default_factory=dict)  # by seq; may be out of order after a lapse
    leases: dict[str, LeaseState] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    closed_groups: dict[str, int] = field(default_factory=dict)  # whole with so many members, fewer than asked for
    groups: dict[str, int] = field(default_factory=dict)  # free entries of each group

    def __len__(self) -> int:
        return len(self.sessions)

    @property
    def num_leased(self) -> int:
        return sum(len(lease.entries) for lease in self.leases.values())

    def add(self, entry: Entry) -> list[Entry]:
        """Takes the entry in; returns what had to go for it: over-stale ones first, else the oldest free one.

        Ask `full` before: with every place leased there is no room to make.
        """
        gone: list[Entry] = []
        if len(self) >= self.capacity:
            gone = self.stale() or [self.free[min(self.free)]]
            for old in gone:
                self.remove(old)
        self.sessions.add(entry.session_id)
        self._let_in(entry)
        return gone

    def full(self) -> bool:
        """Nothing can come in: every place is leased."""
        return len(self) >= self.capacity and not self.free

    def declare(self, trainer_version: int, staleness_max: int | None) -> list[Entry]:
        """A reader says where the trainer is; returns the free entries that are now too stale for it, taken out."""
        self.trainer_version = max(self.trainer_version, trainer_version)
        self.staleness_max = staleness_max
        stale = self.stale()
        for entry in stale:
            self.remove(entry)
        return stale

    def stale(self) -> list[Entry]:
        return [entry for entry in self.free.values() if self.is_stale(entry)]

    def is_stale(self, entry: Entry) -> bool:
        return self.staleness_max is not None and self.trainer_version - entry.oldest_version > self.staleness_max

    def take(self, count: int) -> list[Entry]:
        """Up to `count` free entries, oldest first. They stay free until leased."""
        return [self.free[seq] for seq in sorted(self.free)[:count]]

    def take_groups(self, count: int, group_size: int) -> list[Entry]:
        """Up to `count` whole groups of `group_size` members (or as many as they were closed with), the group with the
        oldest member first."""
        groups: dict[str, list[Entry]] = {}
        for seq in sorted(self.free):
            groups.setdefault(self.free[seq].group_id, []).append(self.free[seq])
        needed = {name: min(group_size, self.closed_groups.get(name, group_size)) for name in groups}
        whole = [members[:group_size] for name, members in groups.items() if len(members) >= needed[name]]
        return [entry for members in whole[:count] for entry in members]

    def forget_closed_groups(self) -> list[str]:
        """Beyond one for each place, the oldest: all their members are long gone."""
        gone = list(self.closed_groups)[: max(0, len(self.closed_groups) - self.capacity)]
        for name in gone:
            del self.closed_groups[name]
        return gone

    def lease(self, lease_id: str, reader: str, entries: Iterable[Entry], until: float) -> LeaseState:
        taken = {entry.seq: self._take_out(entry.seq) for entry in entries}
        state = self.leases[lease_id] = LeaseState(lease_id, reader, until, taken)
        return state

    def ack(self, lease_id: str) -> LeaseState | None:
        """Ends a lease for good: its entries are used. None if there is no such lease."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self.sessions.difference_update(entry.session_id for entry in lease.entries.values())
        return lease

    def hold(self, lease: LeaseState) -> None:
        """A lease that was ended, and could not be."""
        self.leases[lease.lease_id] = lease
        self.sessions.update(entry.session_id for entry in lease.entries.values())

    def release(self, lease_id: str) -> bool:
        """Its entries are free again; False if it had lapsed or ended."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self._let_in(*lease.entries.values())
        return lease is not None

    def leave_out(self, lease: LeaseState, entry: Entry) -> None:
        """It cannot be given to anybody."""
        lease.entries.pop(entry.seq, None)
        if entry.seq in self.free:
            self._take_out(entry.seq)
        self.sessions.discard(entry.session_id)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Free entries that were taken out, and are still there."""
        for entry in entries:
            self._let_in(entry)
            self.sessions.add(entry.session_id)

    def lapse(self, now: float) -> list[LeaseState]:
        """Gives back what readers held too long."""
        lapsed = [lease for lease in self.leases.values() if lease.until <= now]
        for lease in lapsed:
            del self.leases[lease.lease_id]
            self._let_in(*lease.entries.values())
        return lapsed

    def next_lapse(self) -> float | None:
        return min((lease.until for lease in self.leases.values()), default=None)

    def remove(self, entry: Entry) -> None:
        """Takes a free entry out."""
        self._take_out(entry.seq)
        self.sessions.discard(entry.session_id)

    def _let_in(self, *entries: Entry) -> None:
        for entry in entries:
            self.free[entry.seq] = entry
            self.groups[entry.group_id] = self.groups.get(entry.group_id, 0) + 1

    def _take_out(self, seq: int) -> Entry:
        entry = self.free.pop(seq)
        self.groups[entry.group_id] -= 1
        if not self.groups[entry.group_id]:
            del self.groups[entry.group_id]
        return entry
