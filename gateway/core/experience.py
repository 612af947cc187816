"""The bookkeeping of the experience buffer: order, leases, staleness and groups. Pure.

A lease makes delivery at-least-once. A trainer gets trajectories and acknowledges them once they were used; if it dies
between, the lease expires and the entries are free again, in their old order. Nothing is removed at delivery, and an
acknowledgement that comes after the expiry is refused, since another reader may have the entries by then.

Invariants:
- an entry is either free or in exactly one live lease; an expired lease returns its entries to their old place;
- free entries are handed out in the order of the sample's strategy (`gateway.core.selection`);
- a reader's bound decides what it gets, and removes nothing: only the buffer's `own` does;
- there are never more than `capacity` entries; and no more than `bytes_max` bytes, once something free can be evicted;
- an acknowledged entry is removed, unless its reader said that it may be used again;
- it changes by `make` alone, with what commands decide (`experience_commands`), and by `lapse`, with time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from gateway.core.selection import ANY, Bound, Entry, Strategy, ordered, whole_groups

ORDER_SLACK = 64
"""Of an order that has more than twice as many places as there are entries, and so many, the old ones are dropped."""


def holder(reader: str, rank: int) -> str:
    """Who a lease is held by, as its row names it: a rank of a reader."""
    return f"{reader}/{rank}"


def held_by(name: str, reader: str, rank: int, num_ranks: int) -> bool:
    """Whether `rank` of the `num_ranks` that `reader` has now answers for the holder `name`, of an earlier life in
    which there may have been more ranks: each now has the old ones of its own remainder, so no two share one.

    Rows of before ranks were named have the reader's name alone: rank 0's.
    """
    of, slash, number = name.rpartition("/")
    if slash and of == reader and number.isdecimal():
        return int(number) % num_ranks == rank
    return name == reader and rank == 0


@dataclass(slots=True)
class LeaseState:
    """`reader`: its `holder`. `uses_max`: how many uses its reader allows of an entry, over all readers."""

    lease_id: str
    reader: str
    until: float
    entries: dict[int, Entry]
    uses_max: int = 1

    def again(self) -> list[Entry]:
        """Of the entries, with this use counted, those that stay for another."""
        used = (replace(entry, uses=entry.uses + 1) for entry in self.entries.values())
        return [entry for entry in used if entry.uses < self.uses_max]


@dataclass(frozen=True, slots=True)
class Put:
    entry: Entry


@dataclass(frozen=True, slots=True)
class Gone:
    """Free ones."""

    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Replaced:
    """The free entry is this one now, with another body."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Leased:
    lease_id: str
    reader: str
    until: float
    uses_max: int
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Used:
    """The lease ends: its entries were used, and are gone, or free for their next use."""

    lease: LeaseState


@dataclass(frozen=True, slots=True)
class Released:
    """The lease ends unused: its entries are free again."""

    lease: LeaseState


@dataclass(frozen=True, slots=True)
class LeftOut:
    """No reader can get the entry: its body is damaged, and stays where it is."""

    lease: LeaseState
    entry: Entry


@dataclass(frozen=True, slots=True)
class Closed:
    """`forgotten`: the oldest closed groups beyond one for each place, all of whose members are long gone."""

    group_id: str
    members: int
    forgotten: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bounded:
    """What is beyond `own` is of no use to any reader from now on."""

    own: Bound


Change = Put | Gone | Replaced | Leased | Used | Released | LeftOut | Closed | Bounded


@dataclass(slots=True)
class BufferState:
    """`now` is in seconds of any one clock. `own`: what is beyond it is of no use to any reader."""

    capacity: int
    bytes_max: int | None = None
    own: Bound = ANY
    num_bytes: int = 0  # of all entries, packed
    num_used: int = 0  # free entries that were used before
    stale_came: bool = False  # an entry became free that was too stale already
    free: dict[int, Entry] = field(default_factory=dict)  # by seq; out of order once a lease expired
    leases: dict[str, LeaseState] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    closed_groups: dict[str, int] = field(default_factory=dict)  # complete with so many members, fewer than its size
    groups: dict[str, int] = field(default_factory=dict)  # free entries of each group that nobody has used
    last_seq: int = 0  # of all that were ever here
    bodies: set[str] = field(default_factory=set)  # that entries name
    # Free entries in the order in which they make room, and some that are not free any more.
    _order: list[tuple[int, int]] = field(default_factory=list)  # a heap of (-uses, seq)
    # The same entries by the versions of their oldest and newest token: staleness is counted without a look at each.
    spans: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.sessions)

    @property
    def num_leased(self) -> int:
        return sum(len(lease.entries) for lease in self.leases.values())

    def room_for(self, entry: Entry) -> list[Entry]:
        """What has to go for the entry: nothing, or all that is too stale, and then the oldest free ones. Those that
        were used most go first.

        Only while not `full`: with every place leased nothing can be evicted.
        """
        num_bytes = self.num_bytes + entry.facts.num_bytes
        if not self._over(len(self), num_bytes):
            return []
        gone = {old.seq: old for old in self.stale()}
        num_bytes -= sum(old.facts.num_bytes for old in gone.values())
        looked: list[tuple[int, int]] = []
        while self._over(len(self) - len(gone), num_bytes) and self._order:
            uses, seq = place = heapq.heappop(self._order)
            oldest = self.free.get(seq)
            if oldest is None or oldest.uses != -uses or seq in gone:
                continue  # it is not free any more, or stands there twice
            gone[seq] = oldest
            num_bytes -= oldest.facts.num_bytes
            looked.append(place)
        for place in looked:  # nothing has changed yet
            heapq.heappush(self._order, place)
        return list(gone.values())

    def _over(self, num_entries: int, num_bytes: int) -> bool:
        """Whether there is no room for one more entry, with which there are so many bytes."""
        return num_entries >= self.capacity or (self.bytes_max is not None and num_bytes > self.bytes_max)

    def full(self) -> bool:
        """Whether every place, or byte, is leased, so that nothing can be added."""
        over_bytes = self.bytes_max is not None and self.num_bytes >= self.bytes_max
        return (len(self) >= self.capacity or over_bytes) and not self.free

    def stale(self) -> list[Entry]:
        if not self.num_used and all(itertools.starmap(self.own.allows_span, self.spans)):
            return []
        return [entry for entry in self.free.values() if self.is_stale(entry)]

    def is_stale(self, entry: Entry) -> bool:
        return not self.own.allows(entry)

    def num_unused(self, bounds: Collection[Bound] = (ANY,)) -> int:
        """Free entries that nobody has used, and that are within one of `bounds`."""
        return sum(count for span, count in self.spans.items() if any(bound.allows_span(*span) for bound in bounds))

    def groups_within(self, bounds: Collection[Bound]) -> Mapping[str, int]:
        """`groups`, without the entries that are within none of `bounds`."""
        if self.num_unused(bounds) == self.num_unused():
            return self.groups
        return Counter(
            entry.group_id
            for entry in self.free.values()
            if not entry.uses and any(bound.allows(entry) for bound in bounds)
        )

    def take(self, count: int, strategy: Strategy = "fifo", uses_max: int = 1, bound: Bound = ANY) -> list[Entry]:
        """Up to `count` free entries within `bound`. They stay free until leased."""
        return ordered(filter(bound.allows, self.free.values()), strategy, uses_max)[:count]

    def take_sessions(
        self, session_ids: Collection[str], strategy: Strategy = "fifo", uses_max: int = 1, bound: Bound = ANY
    ) -> list[Entry]:
        """Those of `session_ids` that are free and within `bound`."""
        wanted = set(session_ids)
        found = (entry for entry in self.free.values() if entry.session_id in wanted and bound.allows(entry))
        return ordered(found, strategy, uses_max)

    def take_groups(
        self, count: int, group_size: int, strategy: Strategy = "fifo", uses_max: int = 1, bound: Bound = ANY
    ) -> list[Entry]:
        """Up to `count` whole groups of `group_size` members, or as many as they were closed with."""
        usable = ordered(filter(bound.allows, self.free.values()), strategy, uses_max)
        return whole_groups(usable, count, group_size, self.closed_groups)

    def may_have(
        self, count: int, group_size: int | None, session_ids: Collection[str] | None, uses_max: int, bound: Bound = ANY
    ) -> bool:
        """Whether a `take` may find so many entries (with a `group_size`: groups), or something is to be evicted. False
        is certain, and costs no look at each entry."""
        if self.stale_came or (uses_max > 1 and self.num_used):
            return True
        if session_ids is not None:
            return sum(map(self.sessions.__contains__, session_ids)) >= count
        if group_size is None:
            return self.num_unused((bound,)) >= count
        closed = self.groups.keys() & self.closed_groups.keys()
        ended = sum(self.closed_groups[name] <= self.groups[name] < group_size for name in closed)
        return sum(map(group_size.__le__, self.groups.values())) + ended >= count

    def why_nothing(self, bound: Bound, uses_max: int, sessions: Collection[str] | None = None) -> str:
        """In numbers, why a reader with `bound` gets nothing of what is here; of `sessions`, if it names some."""
        wanted = None if sessions is None else set(sessions)
        free = [entry for entry in self.free.values() if wanted is None or entry.session_id in wanted]
        fresh = [entry for entry in free if bound.allows(entry)]
        unused = sum(entry.uses < uses_max for entry in fresh)
        newest = max((entry.newest_version for entry in free), default=0)
        newest = max(newest, self.own.version)
        ahead = f", the newest is {newest} and you say {bound.version}"
        behind = f": more than {bound.staleness_max} versions behind {bound.version}"
        found = {
            "too stale" + (ahead if bound.version > newest else behind): len(free) - len(fresh),
            "used before": len(fresh) - unused,
            "too few, or in groups that lack members": unused,
            "leased": self.num_leased,
        }
        return "; ".join(f"{count} {what}" for what, count in found.items() if count) or "no trajectory waits"

    def num_beyond(self, bound: Bound) -> int:
        """Free entries that a reader with `bound` does not get for their staleness."""
        return sum(not bound.allows(entry) for entry in self.free.values())

    def lapse(self, now: float) -> list[LeaseState]:
        """Ends the leases that expired: their entries are free again."""
        if not self.leases:
            return []
        lapsed = [lease for lease in self.leases.values() if lease.until <= now]
        for lease in lapsed:
            self._release(lease.lease_id)
        return lapsed

    def next_lapse(self) -> float | None:
        return min((lease.until for lease in self.leases.values()), default=None)

    def make(self, change: Change) -> None:
        match change:
            case Put(entry):
                self.put(entry)
            case Gone(entries):
                for entry in entries:
                    self._remove(entry)
            case Replaced(entry):
                self._remove(self.free[entry.seq])
                self.put(entry)
            case Leased(lease_id, reader, until, uses_max, entries):
                taken = {entry.seq: self._take_out(entry.seq) for entry in entries}
                self.leases[lease_id] = LeaseState(lease_id, reader, until, taken, uses_max)
            case Used(lease):
                del self.leases[lease.lease_id]
                for entry in lease.entries.values():
                    self._disown(entry)
                for entry in lease.again():
                    self.put(entry)
            case Released(lease):
                self._release(lease.lease_id)
            case LeftOut(lease, entry):
                del lease.entries[entry.seq]
                self._disown(entry)
            case Closed(group_id, members, forgotten):
                self.closed_groups[group_id] = members
                for name in forgotten:
                    del self.closed_groups[name]
            case Bounded(own):
                self.own, self.stale_came = own, False

    def become(self, other: BufferState) -> None:
        """As the other one is, which nobody uses any more."""
        for part in fields(self):
            setattr(self, part.name, getattr(other, part.name))

    def hold(self, lease: LeaseState) -> None:
        """Takes over a lease, with its entries."""
        self.leases[lease.lease_id] = lease
        for entry in lease.entries.values():
            self._own(entry)

    def put(self, entry: Entry) -> None:
        self.last_seq = max(self.last_seq, entry.seq)
        self._let_in(entry)
        self._own(entry)

    def _remove(self, entry: Entry) -> None:
        self._take_out(entry.seq)
        self._disown(entry)

    def _release(self, lease_id: str) -> None:
        self._let_in(*self.leases.pop(lease_id).entries.values())

    def _own(self, entry: Entry) -> None:
        self.sessions.add(entry.session_id)
        self.bodies.add(entry.body)
        self.num_bytes += entry.facts.num_bytes

    def _disown(self, entry: Entry) -> None:
        self.sessions.discard(entry.session_id)
        self.bodies.discard(entry.body)
        self.num_bytes -= entry.facts.num_bytes

    def _let_in(self, *entries: Entry) -> None:
        for entry in entries:
            self.free[entry.seq] = entry
            heapq.heappush(self._order, (-entry.uses, entry.seq))
            self.stale_came |= self.is_stale(entry)
            if entry.uses:
                self.num_used += 1
            else:
                self.spans[entry.oldest_version, entry.newest_version] += 1
                self.groups[entry.group_id] = self.groups.get(entry.group_id, 0) + 1

    def _take_out(self, seq: int) -> Entry:
        entry = self.free.pop(seq)
        if len(self._order) > 2 * len(self.free) + ORDER_SLACK:
            self._order = [(-old.uses, old.seq) for old in self.free.values()]
            heapq.heapify(self._order)
        if entry.uses:
            self.num_used -= 1
            return entry
        span = entry.oldest_version, entry.newest_version
        self.spans[span] -= 1
        if not self.spans[span]:
            del self.spans[span]
        self.groups[entry.group_id] -= 1
        if not self.groups[entry.group_id]:
            del self.groups[entry.group_id]
        return entry
