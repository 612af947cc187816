"""The bookkeeping of the experience buffer: order, leases, staleness and groups. Pure.

A lease makes delivery at-least-once. A trainer gets trajectories and acknowledges them once they were used; if it dies
between, the lease expires and the entries are free again, in their old order. Nothing is removed at delivery, and an
acknowledgement that comes after the expiry is refused, since another reader may have the entries by then.

Invariants:
- an entry is either free or in exactly one live lease; an expired lease returns its entries to their old place;
- free entries are handed out in the order of the sample's strategy (`gateway.core.selection`);
- there are never more than `capacity` entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from gateway.core.selection import Entry, Strategy, ordered, whole_groups


@dataclass(slots=True)
class LeaseState:
    lease_id: str
    reader: str
    until: float
    entries: dict[int, Entry]


@dataclass(slots=True)
class BufferState:
    """`now` is in seconds of any one clock; `trainer_version` is the newest that a reader reported."""

    capacity: int
    trainer_version: int = 0
    staleness_max: int | None = None
    free: dict[int, Entry] = field(default_factory=dict)  # by seq; out of order once a lease expired
    leases: dict[str, LeaseState] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    closed_groups: dict[str, int] = field(default_factory=dict)  # complete with so many members, fewer than its size
    groups: dict[str, int] = field(default_factory=dict)  # free entries of each group

    def __len__(self) -> int:
        return len(self.sessions)

    @property
    def num_leased(self) -> int:
        return sum(len(lease.entries) for lease in self.leases.values())

    def add(self, entry: Entry) -> list[Entry]:
        """Adds the entry; returns those evicted for it: all that are too stale, else the oldest free one.

        Only while not `full`: with every place leased nothing can be evicted.
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
        """Whether every place is leased, so that nothing can be added."""
        return len(self) >= self.capacity and not self.free

    def declare(self, trainer_version: int, staleness_max: int | None) -> list[Entry]:
        """A reader reports the trainer's version. Removes the free entries that are now too stale, and returns them."""
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

    def take(self, count: int, strategy: Strategy = "fifo") -> list[Entry]:
        """Up to `count` free entries. They stay free until leased."""
        return ordered(self.free.values(), strategy)[:count]

    def take_sessions(self, session_ids: Collection[str], strategy: Strategy = "fifo") -> list[Entry]:
        """Those of `session_ids` that are free."""
        wanted = set(session_ids)
        return ordered((entry for entry in self.free.values() if entry.session_id in wanted), strategy)

    def take_groups(self, count: int, group_size: int, strategy: Strategy = "fifo") -> list[Entry]:
        """Up to `count` whole groups of `group_size` members, or as many as they were closed with."""
        return whole_groups(self.free.values(), count, group_size, self.closed_groups, strategy)

    def forget_closed_groups(self) -> list[str]:
        """Forgets the oldest closed groups beyond one for each place: all their members are long gone."""
        gone = list(self.closed_groups)[: max(0, len(self.closed_groups) - self.capacity)]
        for name in gone:
            del self.closed_groups[name]
        return gone

    def lease(self, lease_id: str, reader: str, entries: Iterable[Entry], until: float) -> LeaseState:
        taken = {entry.seq: self._take_out(entry.seq) for entry in entries}
        state = self.leases[lease_id] = LeaseState(lease_id, reader, until, taken)
        return state

    def ack(self, lease_id: str) -> LeaseState | None:
        """Ends a lease: its entries were used. None if there is no such lease."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self.sessions.difference_update(entry.session_id for entry in lease.entries.values())
        return lease

    def hold(self, lease: LeaseState) -> None:
        """Restores a lease whose end could not be written."""
        self.leases[lease.lease_id] = lease
        self.sessions.update(entry.session_id for entry in lease.entries.values())

    def release(self, lease_id: str) -> bool:
        """Ends a lease unused: its entries are free again. False if it had expired or ended."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self._let_in(*lease.entries.values())
        return lease is not None

    def leave_out(self, lease: LeaseState, entry: Entry) -> None:
        """Removes an entry that no reader can get: its row is damaged."""
        lease.entries.pop(entry.seq, None)
        if entry.seq in self.free:
            self._take_out(entry.seq)
        self.sessions.discard(entry.session_id)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Adds removed entries again: their removal could not be written."""
        for entry in entries:
            self._let_in(entry)
            self.sessions.add(entry.session_id)

    def lapse(self, now: float) -> list[LeaseState]:
        """Ends the leases that expired: their entries are free again."""
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
