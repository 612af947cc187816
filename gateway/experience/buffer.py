"""The experience buffer: finished trajectories that wait for a trainer, under leases.

Invariants:
- a trajectory is in its store when `add` returns; it leaves only by `ack`, as too stale, for room, or by `evict`: each
  is counted. What is too stale to leave is the gateway's to say, not a reader's: a reader's bound filters its answer;
- the state changes by commands alone, which a store carries out (`stores`): what is refused has changed nothing. A
  change is completed also where its caller is cancelled (a lease whose reader went away is then given back);
- a choice is made on the state, and may be late: a lease of what is not free any more is refused, and chosen again;
- a reader that dies loses nothing: its lease expires and the trajectories are handed out again;
- the trajectories of a live lease are handed to no other reader;
- a reader may name a lease: it can give back what it does not get the answer of, also before the lease is there.

With a gateway that has `--data`, all of it holds after a restart, too (`stores.DatabaseRows`). Revisions and
acknowledgements survive a power cut when the call returns; additions once their finish is reported
(`gateway.sessions.endings`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gateway.core.admission import Readers
from gateway.core.commands import Effect
from gateway.core.experience import BufferState, held_by
from gateway.core.experience_commands import (
    Acknowledge,
    AddSession,
    CloseGroup,
    Command,
    DeclareReader,
    DropGroup,
    EvictEntries,
    LeaseEntries,
    LeaveOut,
    Raced,
    ReleaseLease,
    ReviseSession,
    SetBound,
    free_session,
    refuse_full,
)
from gateway.core.selection import ANY, Bound, Entry, Strategy, check_wanted, of_equal_rewards
from gateway.experience.record import SampledRecord, SampledStatistics
from gateway.experience.stores import DeliveryStatistics, StoreMaker, own_store
from gateway.log.base import Hooks, Outcome
from gateway.runtime.aside import aside
from gateway.runtime.clock import unix_s
from gateway.runtime.shielded import ShieldedTasks
from gateway.store.damage import leaving_out, reading
from gateway.store.database import Database, Operation
from protos import packed
from protos.errors import Conflict, LaminarError, NotFound, OutOfCapacity, Unavailable
from protos.packed import Facts, Offer
from protos.trajectories import Trajectory

log = logging.getLogger(__name__)

CAPACITY = 65_536
BYTES_MAX = 32 << 30
"""Of packed trajectories: some 20 KB for 2,000 tokens."""
LEASE_S = 600.0
WAIT_S_MAX = 300.0
REVISIONS_MAX = 100
"""Attempts to replace a row that others replace at the same time."""
Revision = Callable[[list[Trajectory]], list[Trajectory]]
COUNTERS = (
    "added",
    "sampled",
    "acked",
    "lapsed_leases",
    "evicted_stale",
    "evicted_for_room",
    "evicted_equal",
    "evicted_by_readers",
)
AT_ONCE_TOKENS = 50_000
"""Of a session's trajectories, which are made and packed at once; more would hold the event loop for over 20 ms."""


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    trajectories: int
    leased: int
    capacity: int
    added: int
    sampled: int
    acked: int
    lapsed_leases: int
    evicted_stale: int
    evicted_for_room: int
    evicted_equal: int
    evicted_by_readers: int
    used_before: int = 0  # of `trajectories`, those that wait for another use
    num_bytes: int = 0  # packed, leased ones included
    bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class Evicted:
    """What became of sessions that a reader named: `leased` ones stay, since a reader has them; `missing` ones were
    used, evicted, or never here."""

    evicted: int
    leased: int
    missing: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a sample got: `rows[i]` (`protos.packed`) is the session of `entries[i]`. No lease (""): nothing was
    there, and `why` says in numbers what was in its stead; or it was a `peek`."""

    lease_id: str = ""
    entries: Sequence[Entry] = ()
    rows: Sequence[bytes] = ()
    why: str = ""
    stale: int = 0  # of what is there, how many are beyond the reader's bound; counted where it got nothing

    def trajectories(self) -> list[Trajectory]:
        """All leaves, unpacked: a cost for each token."""
        return [leaf for row in self.rows for leaf in packed.unpack(row)]


class ExperienceBuffer:
    """Any number of readers; `add` by the gateway at a session's finish. `database`: the gateway's; `store`: what keeps
    the trajectories, or its name in `stores.STORES`."""

    def __init__(
        self,
        database: Database,
        *,
        store: str | StoreMaker = "database",
        capacity: int = CAPACITY,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        make = own_store(store, database) if isinstance(store, str) else store
        self._state = BufferState(capacity, bytes_max)
        self._store = make(self._state, Hooks(self._applied, self._restored))
        self._capacity, self._bytes_max = capacity, bytes_max
        self._counters = Counter[str]()
        self._record = SampledRecord()
        self._changed = asyncio.Event()
        self._sampling: set[str] = set()  # names of leases that are asked for
        self._withdrawn: set[str] = set()  # of these, those that were given back before they were there
        self._shielded = ShieldedTasks()

    async def open(self) -> None:
        """Creates the tables and takes over what the previous process left, or what other gateways have, leases
        included."""
        await self._store.open()

    async def close(self) -> None:
        """Waits for the changes in progress. The database stays open."""
        await self._store.close()
        await self._shielded.drain()

    def _applied(self, command: Command, outcome: Outcome, mine: bool) -> None:
        if not isinstance(outcome, Effect):
            return
        if mine:
            for name, number in outcome.counted.items():
                self._counters[name] += number
        if outcome.notable:
            self._changed.set()

    def _restored(self) -> None:
        self._changed.set()

    async def _run(self, command: Command, row: bytes | None = None, along: Operation[object] | None = None) -> Any:
        """The command's answer; it is carried out whether or not its caller stays."""
        return await self._shielded.run(self._store.run(command, row, along), type(command).__name__)

    async def add(self, *leaves: Trajectory, along: Operation[object] | None = None) -> None:
        """Adds one whole session: its leaves are added, handed out and used up together. `along` is
        committed to the database with them, and only then are they here.

        Raises Conflict for a session that is in the buffer already, OutOfCapacity if every place is leased, and
        Undelivered where it is committed here and on its way to a store that gateways share.
        """
        trajectory = leaves[0]
        if trajectory.split == "eval":
            raise ValueError(f"session {trajectory.session_id} is an evaluation: it never enters the buffer")
        await self._shielded.run(self._add(leaves, along), f"add-{trajectory.session_id}")

    async def _add(self, leaves: Sequence[Trajectory], along: Operation[object] | None) -> None:
        name, group = leaves[0].session_id, leaves[0].group_id
        row, facts = await packed_with_facts(leaves)
        try:
            self._refuse(name)
        except (Conflict, OutOfCapacity):  # by a state that may be late
            with contextlib.suppress(Unavailable):
                await self._store.look()
            self._refuse(name)
        add = AddSession(name, group, facts.oldest_version, facts, self._capacity, self._bytes_max)
        await self._store.run(add, row, along)

    def _refuse(self, session_id: str) -> None:
        if session_id in self._state.sessions:
            raise Conflict(f"the trajectory of session {session_id} is already in the experience buffer")
        if self._store.is_waiting(session_id):
            raise Conflict(f"the trajectory of session {session_id} is on its way to the experience buffer")
        self._store.lapse()
        refuse_full(self._state)

    async def revise(self, session_id: str, change: Revision) -> None:
        """Replaces a session's trajectories. NotFound when it is not here, Conflict when a reader has it.

        `change` may run in another thread, or more than once, and must be pure; if it raises, nothing changes.
        """
        await self._shielded.run(self._revise(session_id, change), f"revise-{session_id}")

    async def _revise(self, session_id: str, change: Revision) -> None:
        for _ in range(REVISIONS_MAX):
            entry, before = await self._found(lambda: free_session(self._state, session_id))
            long = entry.facts.num_tokens > AT_ONCE_TOKENS
            after, facts = await aside(functools.partial(_revised, entry, before, change), long=long)
            with contextlib.suppress(Raced):
                await self._store.run(ReviseSession(session_id, entry.edits, facts), after)
                await self._store.synced()
                return
        raise Unavailable(f"session {session_id} is changed by others all the time", hint="try again")

    def has(self, session_id: str) -> bool:
        """Whether the session is here, free or leased."""
        return session_id in self._state.sessions

    async def delivered(self, session_id: str) -> None:
        """When this returns, a session that was added is in the store."""
        await self._store.delivered(session_id)

    async def look(self, session_id: str) -> Iterator[Trajectory]:
        """A session's trajectories, which stay as they are, each unpacked when it is taken. NotFound when it is not
        here."""
        row = await self._read(lambda entry: entry.session_id == session_id, f"session {session_id}")
        with reading("trajectories", session_id):
            packed.check(row)
        return packed.Row(row).trajectories()

    async def read(self, number: int) -> bytes:
        """The row of the session with this number, packed, whoever has its lease. NotFound when it is not here."""
        return await self._read(lambda entry: entry.seq == number, f"session number {number}")

    async def _read(self, wanted: Callable[[Entry], bool], name: str) -> bytes:
        def find() -> Entry:
            entry = next(filter(wanted, chain(self._state.free.values(), self._leased())), None)
            if entry is None:
                raise NotFound(
                    f"{name} is not in the experience buffer",
                    hint="a trainer has used it, or it was never stored: evaluations are not",
                )
            return entry

        return (await self._found(find))[1]

    async def _found(self, find: Callable[[], Entry]) -> tuple[Entry, bytes]:
        """An entry and its row, which is read again where another gateway has revised or used it meanwhile."""
        await self._store.look()
        while True:
            entry = find()
            [row] = await self._store.read([entry])
            if row or find() is entry:
                return entry, row

    def _leased(self) -> Iterator[Entry]:
        return chain.from_iterable(lease.entries.values() for lease in self._state.leases.values())

    async def close_group(self, group_id: str, members: int) -> None:
        """The group is complete with `members`, fewer than its size: readers of groups get it as it is."""
        await self._run(CloseGroup(group_id, members))

    async def drop_group(self, group_id: str) -> int:
        """Removes the members of a group that no reader has; returns how many sessions those were."""
        dropped: int = await self._run(DropGroup(group_id))
        return dropped

    def declare(self, reader: DeclareReader) -> None:
        """What a reader requests: it bounds admission, at all gateways that share this experience."""
        self._store.declare(reader)

    @property
    def is_shared(self) -> bool:
        """Other gateways change it, too."""
        return self._store.is_shared

    async def sample(
        self,
        reader: str,
        *,
        trainer_version: int,
        trajectories: int | None = None,
        groups: int | None = None,
        group_size: int | None = None,
        session_ids: Sequence[str] | None = None,
        wait_s: float = 0.0,
        staleness_max: int | None = None,
        lease_s: float = LEASE_S,
        drop_equal_rewards: bool = False,
        strategy: Strategy = "fifo",
        uses_max: int = 1,
        whole: bool = False,
        lease_id: str = "",
        own: Bound | None = None,
    ) -> Sampled:
        """A lease and its trajectories: as many as requested, or those that are there after `wait_s`, possibly none;
        if `whole`, then none.

        A session with branches counts as one and comes with all its leaves.
        With `groups`, whole groups of `group_size` only; with `session_ids`, those sessions only. Trajectories more
        than `staleness_max` versions behind `trainer_version` (with their oldest token; under `staleness_bounded` with
        their newest) are not handed out, and stay; those beyond `own`, the gateway's bound now, are dropped and
        counted; with `drop_equal_rewards` so are groups all of whose rewards are equal. Trajectories that were used
        less than `uses_max` times are handed out, the least used first.

        `lease_id`: what the caller names the lease, so that it can give back what it does not get the answer of.
        Conflict when a lease has that name.
        """
        wanted = check_wanted(trajectories, groups, group_size, strategy, session_ids)
        if wait_s <= 0:
            self._store.check()
        deadline = time.monotonic() + min(wait_s, WAIT_S_MAX)
        whole_size = None if groups is None else group_size
        bound = Bound(trainer_version, staleness_max, by_token=strategy == "staleness_bounded")
        with self._naming(lease_id or f"lease-{secrets.token_hex(8)}") as name:
            while True:
                await self._store.look()
                if own is not None and (self._state.stale_came or self._state.own != own):
                    await self._run(SetBound(own.version, own.staleness_max, own.by_token))
                self._check_name(name)
                chosen = self._take(wanted, groups, group_size, session_ids, strategy, uses_max, bound)
                remaining_s = deadline - time.monotonic()
                found = len(chosen) if groups is None else len({entry.group_id for entry in chosen})
                if whole and found < wanted and remaining_s <= 0:
                    return self._nothing(bound, uses_max, session_ids)
                if found >= wanted or remaining_s <= 0:
                    if drop_equal_rewards and (equal := of_equal_rewards(chosen)):
                        await self._run(EvictEntries([entry.seq for entry in equal], "equal"))
                        continue
                    if not chosen:
                        return self._nothing(bound, uses_max, session_ids)
                    if (leased := await self._lease(name, reader, chosen, lease_s, uses_max)) is None:
                        continue
                    return leased
                # Nothing is awaited since the look: a change after it sets the event again, so none is missed.
                self._changed.clear()
                await self._wait_for_change(
                    deadline,
                    lambda: (
                        name in self._withdrawn
                        or self._state.may_have(wanted, whole_size, session_ids, uses_max, bound)
                    ),
                )

    def _take(
        self,
        wanted: int,
        groups: int | None,
        group_size: int | None,
        session_ids: Sequence[str] | None,
        strategy: Strategy,
        uses_max: int,
        bound: Bound,
    ) -> list[Entry]:
        """Of what is free now, what `sample` asks for, or less. It stays free until it is leased."""
        if session_ids is not None:
            return self._state.take_sessions(session_ids, strategy, uses_max, bound)
        if groups is not None:
            return self._state.take_groups(groups, group_size or 0, strategy, uses_max, bound)
        return self._state.take(wanted, strategy, uses_max, bound)

    async def peek(
        self,
        bound: Bound,
        *,
        trajectories: int | None = None,
        groups: int | None = None,
        group_size: int | None = None,
        session_ids: Sequence[str] | None = None,
        strategy: Strategy = "fifo",
        uses_max: int = 1,
    ) -> Sampled:
        """What a `sample` would get now, without a lease: all stays as it is. What is damaged is left out."""
        wanted = check_wanted(trajectories, groups, group_size, strategy, session_ids)
        await self._store.look()
        chosen = self._take(wanted, groups, group_size, session_ids, strategy, uses_max, bound)
        found: list[tuple[Entry, bytes]] = []
        for entry in chosen:
            [row] = await self._store.read([entry])
            if not row and entry.session_id not in self._state.sessions:
                continue  # another gateway's reader has used it meanwhile
            with leaving_out("trajectory_bodies", entry.seq):
                packed.check(row)
                found.append((entry, row))
        if not found:
            return self._nothing(bound, uses_max, session_ids)
        return Sampled("", [entry for entry, _ in found], [row for _, row in found])

    def _nothing(self, bound: Bound, uses_max: int, session_ids: Sequence[str] | None) -> Sampled:
        return Sampled(why=self._state.why_nothing(bound, uses_max, session_ids), stale=self._state.num_beyond(bound))

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[str]:
        """Two samples at once are never of one name."""
        if name in self._sampling:
            raise _name_taken(name)
        self._sampling.add(name)
        try:
            yield name
        finally:
            self._sampling.discard(name)
            self._withdrawn.discard(name)

    def _check_name(self, name: str) -> None:
        if name in self._withdrawn:
            raise Conflict(f"lease {name!r} was given back before it was there", hint="sample under another name")
        if name in self._state.leases:
            raise _name_taken(name)

    async def ack(self, lease_id: str) -> int:
        """The reader has used them: they are gone, or wait for another use. Returns how many.

        NotFound for an unknown or expired lease."""
        number: int = await self._run(Acknowledge(lease_id))
        await self._store.synced()
        return number

    async def release(self, lease_id: str) -> int:
        """The reader has not used them: others may get them at once. Returns how many. NotFound as `ack`.

        A sample of this name that still waits gets Conflict instead of a lease: its caller has gone."""
        if lease_id in self._sampling and lease_id not in self._state.leases:
            self._withdrawn.add(lease_id)
            self._changed.set()
            return 0
        number: int = await self._run(ReleaseLease(lease_id))
        return number

    async def reclaim(self, reader: str, rank: int = 0, num_ranks: int = 1) -> int:
        """Ends the leases that an earlier life of this rank of `reader` left, unused. Returns how many trajectories are
        free again."""
        return await self._shielded.run(self._reclaim(reader, rank, num_ranks), f"reclaim-{reader}")

    async def _reclaim(self, reader: str, rank: int, num_ranks: int) -> int:
        await self._store.look()
        left = [lease for lease in self._state.leases.values() if held_by(lease.reader, reader, rank, num_ranks)]
        number = 0
        for lease in left:
            with contextlib.suppress(NotFound):  # it ended meanwhile
                number += await self._store.run(ReleaseLease(lease.lease_id))
        return number

    async def evict(self, session_ids: Sequence[str]) -> Evicted:
        """Removes these sessions for good, but for those that a reader has."""
        return await self._shielded.run(self._evict(frozenset(session_ids)), "evict")

    async def _evict(self, session_ids: frozenset[str]) -> Evicted:
        await self._store.look()
        present = len(session_ids & self._state.sessions)
        seqs = [entry.seq for entry in self._state.free.values() if entry.session_id in session_ids]
        # Less those that another gateway has leased meanwhile.
        num_gone: int = await self._store.run(EvictEntries(seqs, "by_readers")) if seqs else 0
        return Evicted(num_gone, present - num_gone, len(session_ids) - present)

    def statistics(self) -> BufferStatistics:
        self._store.lapse()
        state, counters = self._state, {name: self._counters[name] for name in COUNTERS}
        return BufferStatistics(
            len(state) - state.num_leased,
            state.num_leased,
            state.capacity,
            **counters,
            used_before=state.num_used,
            num_bytes=state.num_bytes,
            bytes_max=state.bytes_max or 0,
        )

    def delivery(self) -> DeliveryStatistics | None:
        """None for a store of this gateway's own."""
        return self._store.delivery()

    def offers(self, after: int, limit: int, *, leased: bool = False) -> list[Offer]:
        """What waits for a trainer, in the order of finishes: up to `limit` with numbers above `after`. `leased`: also
        what readers have."""
        self._store.lapse()
        also = self._leased() if leased else ()
        entries = (entry for entry in chain(self._state.free.values(), also) if entry.seq > after)
        found = heapq.nsmallest(limit, entries, key=lambda entry: entry.seq)
        return [_offer(entry, leased=entry.seq not in self._state.free) for entry in found]

    def sampled_statistics(self) -> SampledStatistics:
        return self._record.statistics()

    def groups(self, bounds: Collection[Bound] = (ANY,)) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """By group, the number of trajectories within one of `bounds` that no reader has or had; and the groups closed
        with fewer than their size."""
        return self._state.groups_within(bounds), self._state.closed_groups

    def num_unused(self, bounds: Collection[Bound] = (ANY,)) -> int:
        """Trajectories that no reader has or had, and that are within one of `bounds`."""
        self._store.lapse()
        return self._state.num_unused(bounds)

    def holds_lease(self, reader: str) -> bool:
        """Whether some rank of the reader has a lease."""
        return any(lease.reader.rpartition("/")[0] == reader for lease in self._state.leases.values())

    @property
    def readers(self) -> Readers:
        """Those that have declared what they take; their times are those of `now`."""
        return self._store.known.readers

    @property
    def own(self) -> Bound:
        """The bound beyond which trajectories are evicted; a log has that of all gateways."""
        return self._state.own

    def now(self) -> float:
        """Unix time in seconds, by the clock of leases and readers."""
        return self._store.now()

    async def _lease(
        self, lease_id: str, reader: str, chosen: Sequence[Entry], lease_s: float, uses_max: int
    ) -> Sampled | None:
        """None: none could be read, or another gateway has leased some of them.

        It is leased by a task of its own. A reader that is cancelled will never learn the lease's id, so the
        trajectories would be stuck until it expires: once it is there, it is given back.
        """
        named = [(entry.seq, entry.uses) for entry in chosen]
        wanted = LeaseEntries(lease_id, reader, lease_s, uses_max, named)
        leasing = self._shielded.start(self._lease_and_read(wanted), lease_id)
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            self._shielded.start(self._give_back(lease_id, leasing), f"give-back-{lease_id}")
            raise

    async def _lease_and_read(self, wanted: LeaseEntries) -> Sampled | None:
        try:
            entries: list[Entry] = await self._store.run(wanted)
        except Raced:
            return None
        try:
            rows = await self._store.read(entries)
        except LaminarError:
            await self._end(wanted.lease_id)
            raise
        found: list[tuple[Entry, bytes]] = []
        for entry, row in zip(entries, rows, strict=True):
            if not row and wanted.lease_id not in self._state.leases:
                return None  # it expired while the bodies were on their way, and another reader has used some
            with leaving_out("trajectory_bodies", entry.seq):
                packed.check(row)
                found.append((entry, row))
                continue
            await self._store.run(LeaveOut(wanted.lease_id, entry.seq))
        self._counters["sampled"] += len(found)
        self._record.took((entry for entry, _ in found), unix_s())
        if not found:
            await self._end(wanted.lease_id)
            return None
        return Sampled(wanted.lease_id, [entry for entry, _ in found], [row for _, row in found])

    async def _give_back(self, lease_id: str, leasing: asyncio.Task[Sampled | None]) -> None:
        await asyncio.wait([leasing])
        await self._end(lease_id)

    async def _end(self, lease_id: str) -> None:
        with contextlib.suppress(NotFound, Unavailable):  # it has ended, or what is owed ends it
            await self._store.run(ReleaseLease(lease_id))

    async def _wait_for_change(self, deadline: float, worth_a_look: Callable[[], bool]) -> None:
        """Returns when the caller has to look: a change may have brought enough, its deadline has come, or a lease
        expired. Each finish is a change, and a look sorts all that is free: so many waiting ranks look only if there
        may be enough."""
        while True:
            remaining_s, lapse = deadline - time.monotonic(), self._state.next_lapse()
            until_lapse_s = remaining_s if lapse is None else max(0.0, lapse - self.now())
            try:
                async with asyncio.timeout(min(remaining_s, until_lapse_s)):
                    await self._changed.wait()
            except TimeoutError:
                return
            if worth_a_look():
                return
            self._changed.clear()  # no await since the look: what changes from here on sets it again


async def packed_with_facts(leaves: Sequence[Trajectory]) -> tuple[bytes, Facts]:
    """The row of a session, and what is known of it without its tokens."""

    def pack() -> tuple[bytes, Facts]:
        row = packed.pack(leaves)
        return row, packed.facts_of(leaves, len(row))

    return await aside(pack, long=sum(len(leaf.token_ids) for leaf in leaves) > AT_ONCE_TOKENS)


def _revised(entry: Entry, row: bytes, change: Revision) -> tuple[bytes, Facts]:
    with reading("trajectory_bodies", entry.seq):
        before = packed.unpack(row)
    leaves = change(before)
    after = packed.pack(leaves)
    return after, packed.facts_of(leaves, len(after))


def _name_taken(name: str) -> Conflict:
    return Conflict(
        f"there is a lease {name!r}, or a sample that asks for one", hint="give each sample a name of its own"
    )


def _offer(entry: Entry, *, leased: bool) -> Offer:
    return Offer(
        seq=entry.seq,
        session_id=entry.session_id,
        group_id=entry.group_id,
        uses=entry.uses,
        leased=leased,
        facts=entry.facts,
    )
