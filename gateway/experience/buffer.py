"""The experience buffer: finished trajectories that wait for a trainer, under leases.

Invariants:
- a trajectory is in its store when `add` returns; it leaves only by `ack`, as too stale, for room, or by `evict`: each
  is counted. What is too stale to leave is the gateway's to say, not a reader's: a reader's bound filters its answer;
- state and store change together, in the same order: where the store refuses, the state is restored; where the caller
  is cancelled, both changes are completed (a lease whose reader went away is then given back);
- a reader that dies loses nothing: its lease expires and the trajectories are handed out again;
- the trajectories of a live lease are handed to no other reader;
- a reader may name a lease: it can give back what it does not get the answer of, also before the lease is there.

With `stores.DatabaseStore` and a gateway that has `--data`, all of it holds after a restart, too. Revisions and
acknowledgements survive a power cut when the call returns; additions once their finish is reported
(`gateway.sessions.endings`). With `stores.MemoryStore` nothing outlives the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from gateway.core.selection import ANY, Bound, Entry, Strategy, check_wanted, of_equal_rewards
from gateway.experience.leases import BufferState, LeaseState, held_by
from gateway.experience.record import SampledRecord, SampledStatistics
from gateway.experience.stores import ExperienceStore, Raced, make_store
from gateway.runtime.aside import aside
from gateway.runtime.clock import unix_s
from gateway.runtime.shielded import ShieldedTasks
from gateway.store.damage import leaving_out, reading
from gateway.store.database import Database, Operation
from protos import packed
from protos.errors import Conflict, LaminarError, NotFound, OutOfCapacity
from protos.packed import Facts, Offer
from protos.trajectories import Trajectory

log = logging.getLogger(__name__)

CAPACITY = 65_536
BYTES_MAX = 32 << 30
"""Of packed trajectories: some 20 KB for 2,000 tokens."""
LEASE_S = 600.0
WAIT_S_MAX = 300.0
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
class DeliveryStatistics:
    """A store that gateways share, as this one sees it. `failure`: why it takes nothing now; empty while it does.
    `waiting`: what is committed at this gateway and not there yet. `failed_calls`: calls that did not get through."""

    address: str
    namespace: str
    failure: str
    waiting: int
    waiting_bytes: int
    delivered: int
    failed_calls: int


@dataclass(slots=True)
class _Counters:
    added: int = 0
    sampled: int = 0
    acked: int = 0
    lapsed_leases: int = 0
    evicted_stale: int = 0
    evicted_for_room: int = 0
    evicted_equal: int = 0
    evicted_by_readers: int = 0


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
        store: str | ExperienceStore = "database",
        capacity: int = CAPACITY,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._store = make_store(store, database) if isinstance(store, str) else store
        self._state = BufferState(capacity, bytes_max)
        self._counters = _Counters()
        self._record = SampledRecord()
        self._changed = asyncio.Event()
        # Held across each change of the state and its write: without it, two changes could reach the store in another
        # order than the state, or one could be decided on a state that the other has to restore.
        self._order = asyncio.Lock()
        self._next_seq = 1
        self._sampling: set[str] = set()  # names of leases that are asked for
        self._withdrawn: set[str] = set()  # of these, those that were given back before they were there
        self._shielded = ShieldedTasks()

    async def close(self) -> None:
        """Waits for the changes in progress. The database stays open."""
        await self._shielded.drain()

    async def open(self) -> None:
        """Creates the tables and takes over what the previous process left, leases included."""
        kept = await self._store.open()
        gone = [entry for entry, lease in kept.entries[: -self._state.capacity] if lease is None]
        dropped = {entry.seq for entry in gone}
        for entry, _ in kept.entries:
            if entry.seq not in dropped:
                gone += self._state.add(entry)
        if gone:
            log.warning("%d trajectories of an earlier life are more than this one keeps: they are evicted", len(gone))
            self._counters.evicted_for_room += len(gone)
            await self._store.delete(gone)
        self._next_seq = kept.last_seq + 1
        self._state.closed_groups.update(kept.closed_groups)
        for lease_id, reader, until, uses_max in kept.leases:
            held = [entry for entry, of in kept.entries if of == lease_id and entry.seq in self._state.free]
            self._state.lease(lease_id, reader, held, until, uses_max)

    async def add(self, *leaves: Trajectory, along: Operation[object] | None = None) -> None:
        """Adds one whole session: its leaves are added, handed out and used up together. `along` is
        committed to the database with them, and only then are they here.

        Raises Conflict for a session that is in the buffer already, OutOfCapacity if every place is leased.
        """
        trajectory = leaves[0]
        if trajectory.split == "eval":
            raise ValueError(f"session {trajectory.session_id} is an evaluation: it never enters the buffer")
        await self._shielded.run(self._add(leaves, along), f"add-{trajectory.session_id}")

    async def _add(self, leaves: Sequence[Trajectory], along: Operation[object] | None) -> None:
        trajectory = leaves[0]
        row, facts = await packed_with_facts(leaves)
        async with self._order:
            self._refuse(trajectory.session_id)
            name, group = trajectory.session_id, trajectory.group_id
            entry = Entry(self._next_seq, name, group, facts.oldest_version, facts)
            self._next_seq += 1
            gone = self._state.add(entry)
            try:
                await self._store.add(entry, row, gone, along)
            except LaminarError:
                self._state.remove(entry)
                self._state.put_back(gone)
                raise
            self._count_evicted(gone)
            self._counters.added += 1
        self._changed.set()

    async def revise(self, session_id: str, change: Callable[[list[Trajectory]], list[Trajectory]]) -> None:
        """Replaces a session's trajectories. NotFound when it is not here, Conflict when a reader has it.

        `change` may run in the database's thread and must be pure; if it raises, nothing changes.
        """
        await self._shielded.run(self._revise(session_id, change), f"revise-{session_id}")

    async def _revise(self, session_id: str, change: Callable[[list[Trajectory]], list[Trajectory]]) -> None:
        async with self._order:
            await self._catch_up()
            if session_id not in self._state.sessions:
                raise NotFound(f"session {session_id} is not in the experience buffer", hint="it was used, or dropped")
            entry = next((e for e in self._state.free.values() if e.session_id == session_id), None)
            if entry is None:
                raise Conflict(f"a reader has session {session_id}", hint="give rewards before it is sampled")
            facts = await self._store.revise(entry, change)
            if entry.seq in self._state.free:
                self._state.replace(dataclasses.replace(entry, facts=facts))
        await self._store.synced()

    def has(self, session_id: str) -> bool:
        """Whether the session is here, free or leased."""
        return session_id in self._state.sessions

    async def delivered(self, session_id: str) -> None:
        """When this returns, a session that was added is in the store."""

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
        async with self._order:
            await self._catch_up()
            entry = next(filter(wanted, chain(self._state.free.values(), self._leased())), None)
            if entry is None:
                raise NotFound(
                    f"{name} is not in the experience buffer",
                    hint="a trainer has used it, or it was never stored: evaluations are not",
                )
            return await self._store.read(entry)

    def _leased(self) -> Iterator[Entry]:
        return chain.from_iterable(lease.entries.values() for lease in self._state.leases.values())

    async def close_group(self, group_id: str, members: int) -> None:
        """The group is complete with `members`, fewer than its size: readers of groups get it as it is."""
        await self._shielded.run(self._close_group(group_id, members), f"close-{group_id}")

    async def _close_group(self, group_id: str, members: int) -> None:
        async with self._order:
            self._state.closed_groups[group_id] = members
            gone = self._state.forget_closed_groups()
            await self._store.close_group(group_id, members, gone)
        self._changed.set()

    async def drop_group(self, group_id: str) -> int:
        """Removes the members of a group that no reader has; returns how many sessions those were."""
        return await self._shielded.run(self._drop_group(group_id), f"drop-{group_id}")

    async def _drop_group(self, group_id: str) -> int:
        async with self._order:
            return await self._drop_members(group_id)

    async def _drop_members(self, group_id: str) -> int:
        await self._catch_up()
        gone = [entry for entry in self._state.free.values() if entry.group_id == group_id]
        for entry in gone:
            self._state.remove(entry)
        return len(gone) - await self._delete(gone)

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
        self._store.check()
        deadline = time.monotonic() + min(wait_s, WAIT_S_MAX)
        whole_size = None if groups is None else group_size
        bound = Bound(trainer_version, staleness_max, by_token=strategy == "staleness_bounded")
        with self._naming(lease_id or f"lease-{secrets.token_hex(8)}") as name:
            while True:
                async with self._order:
                    await self._catch_up()
                    if own is not None:
                        await self._evict_stale(own)
                    self._check_name(name)
                    chosen = self._take(wanted, groups, group_size, session_ids, strategy, uses_max, bound)
                    remaining_s = deadline - time.monotonic()
                    found = len(chosen) if groups is None else len({entry.group_id for entry in chosen})
                    if whole and found < wanted and remaining_s <= 0:
                        return self._nothing(bound, uses_max, session_ids)
                    if found >= wanted or remaining_s <= 0:
                        if drop_equal_rewards and await self._drop_equal(chosen):
                            continue
                        if not chosen:
                            return self._nothing(bound, uses_max, session_ids)
                        if (leased := await self._lease(name, reader, chosen, lease_s, uses_max)) is None:
                            continue
                        return leased
                    # Cleared under the lock: a change after this look sets the event again, so none is missed.
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
        async with self._order:
            await self._catch_up()
            chosen = self._take(wanted, groups, group_size, session_ids, strategy, uses_max, bound)
            found: list[tuple[Entry, bytes]] = []
            for entry in chosen:
                with leaving_out("trajectory_bodies", entry.seq), contextlib.suppress(NotFound):  # gone at the Redis
                    row = await self._store.read(entry)
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
        return await self._shielded.run(self._ack(lease_id), f"ack-{lease_id}")

    async def _ack(self, lease_id: str) -> int:
        async with self._order:
            await self._catch_up()
            lease = self._state.ack(lease_id)
            if lease is None and (before := await self._store.acknowledged(lease_id)) is not None:
                return before
            if lease is None:
                raise NotFound(
                    f"no lease {lease_id!r}",
                    hint="it was acknowledged before, or it expired and its trajectories went back: sample again",
                )
            try:
                await self._store.use_up(lease)
            except LaminarError:
                self._state.hold(lease)
                raise
            self._counters.acked += len(lease.entries)
        if lease.again():
            self._changed.set()
        await self._store.synced()
        return len(lease.entries)

    async def release(self, lease_id: str) -> int:
        """The reader has not used them: others may get them at once. Returns how many. NotFound as `ack`.

        A sample of this name that still waits gets Conflict instead of a lease: its caller has gone."""
        return await self._shielded.run(self._release(lease_id), f"release-{lease_id}")

    async def _release(self, lease_id: str) -> int:
        async with self._order:
            await self._catch_up()
            lease = self._state.leases.get(lease_id)
            if lease is None and lease_id in self._sampling:
                self._withdrawn.add(lease_id)
                self._changed.set()
                return 0
            if lease is None:
                raise NotFound(f"no lease {lease_id!r}", hint="it was acknowledged or given back before, or it expired")
            self._state.release(lease_id)
            await self._store.release(lease_id)
        self._changed.set()
        return len(lease.entries)

    async def reclaim(self, reader: str, rank: int = 0, num_ranks: int = 1) -> int:
        """Ends the leases that an earlier life of this rank of `reader` left, unused. Returns how many trajectories are
        free again."""
        return await self._shielded.run(self._reclaim(reader, rank, num_ranks), f"reclaim-{reader}")

    async def _reclaim(self, reader: str, rank: int, num_ranks: int) -> int:
        async with self._order:
            await self._catch_up()
            left = [lease for lease in self._state.leases.values() if held_by(lease.reader, reader, rank, num_ranks)]
            for lease in left:
                self._state.release(lease.lease_id)
                await self._store.release(lease.lease_id)
        self._changed.set()
        return sum(len(lease.entries) for lease in left)

    async def evict(self, session_ids: Sequence[str]) -> Evicted:
        """Removes these sessions for good, but for those that a reader has."""
        return await self._shielded.run(self._evict(frozenset(session_ids)), "evict")

    async def _evict(self, session_ids: frozenset[str]) -> Evicted:
        async with self._order:
            await self._catch_up()
            present = len(session_ids & self._state.sessions)
            gone = [entry for entry in self._state.free.values() if entry.session_id in session_ids]
            for entry in gone:
                self._state.remove(entry)
            num_gone = len(gone) - await self._delete(gone)  # less those that another gateway has leased meanwhile
            self._counters.evicted_by_readers += num_gone
        return Evicted(num_gone, present - num_gone, len(session_ids) - present)

    def statistics(self) -> BufferStatistics:
        self._lapse()
        state, counters = self._state, dataclasses.asdict(self._counters)
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
        return None

    def offers(self, after: int, limit: int, *, leased: bool = False) -> list[Offer]:
        """What waits for a trainer, in the order of finishes: up to `limit` with numbers above `after`. `leased`: also
        what readers have."""
        self._lapse()
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
        self._lapse()
        return self._state.num_unused(bounds)

    def holds_lease(self, reader: str) -> bool:
        """Whether some rank of the reader has a lease."""
        return any(lease.reader.rpartition("/")[0] == reader for lease in self._state.leases.values())

    def _refuse(self, session_id: str) -> None:
        if session_id in self._state.sessions:
            raise Conflict(f"the trajectory of session {session_id} is already in the experience buffer")
        self._lapse()
        if self._state.full():
            raise OutOfCapacity(
                f"all {self._state.capacity} places of the experience buffer are leased to readers",
                hint="acknowledge leases after use",
            )

    async def _evict_stale(self, own: Bound) -> None:
        if stale := self._state.evict_stale(own):
            self._count_evicted(stale)
            self._counters.evicted_stale -= await self._delete(stale)

    async def _delete(self, gone: Sequence[Entry]) -> int:
        """Deletes entries from the store that the state has dropped; returns how many are there still."""
        left = await self._shielded.run(self._store.delete(gone), "delete-trajectories")
        self._state.put_back(left)
        return len(left)

    async def _drop_equal(self, chosen: list[Entry]) -> bool:
        """Returns whether any group was dropped."""
        gone = of_equal_rewards(chosen)
        for entry in gone:
            if entry.seq in self._state.free:
                self._state.remove(entry)
        self._counters.evicted_equal += len(gone)
        self._counters.evicted_equal -= await self._delete(gone)
        return bool(gone)

    async def _lease(
        self, lease_id: str, reader: str, chosen: list[Entry], lease_s: float, uses_max: int
    ) -> Sampled | None:
        """None: none could be read, or another gateway has leased some of them.

        The lease is written by a task of its own, so that a cancelled caller cannot leave state and store apart. Its
        reader will never learn the lease's id, so the trajectories would be stuck until it expires: once it is written,
        it is given back.
        """
        lease = self._state.lease(lease_id, reader, chosen, unix_s() + lease_s, uses_max)
        leasing = self._shielded.start(self._write_lease(lease, chosen), lease_id)
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            self._shielded.start(self._give_back(lease_id, leasing), f"give-back-{lease_id}")
            raise

    async def _write_lease(self, lease: LeaseState, chosen: Sequence[Entry]) -> Sampled | None:
        try:
            bodies = await self._store.lease(lease)
        except Raced:
            self._state.release(lease.lease_id)
            return None
        except LaminarError:
            self._state.release(lease.lease_id)
            raise
        found: list[tuple[Entry, bytes]] = []
        for entry, body in zip(chosen, bodies, strict=True):
            with leaving_out("trajectory_bodies", entry.seq):
                packed.check(body)
                found.append((entry, body))
                continue
            self._state.leave_out(lease, entry)
            await self._store.leave_out(entry)
        self._counters.sampled += len(lease.entries)
        self._record.took(lease.entries.values(), unix_s())
        if not lease.entries:
            self._state.release(lease.lease_id)
            await self._store.release(lease.lease_id)
            return None
        return Sampled(lease.lease_id, [entry for entry, _ in found], [row for _, row in found])

    async def _give_back(self, lease_id: str, leasing: asyncio.Task[Sampled | None]) -> None:
        await asyncio.wait([leasing])
        async with self._order:
            if self._state.release(lease_id):
                await self._store.release(lease_id)
        self._changed.set()

    async def _wait_for_change(self, deadline: float, worth_a_look: Callable[[], bool]) -> None:
        """Returns when the caller has to look: a change may have brought enough, its deadline has come, or a lease
        expired. Each finish is a change, and a look sorts all that is free: so many waiting ranks look only if there
        may be enough."""
        while True:
            remaining_s, lapse = deadline - time.monotonic(), self._state.next_lapse()
            until_lapse_s = remaining_s if lapse is None else max(0.0, lapse - unix_s())
            try:
                async with asyncio.timeout(min(remaining_s, until_lapse_s)):
                    await self._changed.wait()
            except TimeoutError:
                return
            if worth_a_look():
                return
            self._changed.clear()  # no await since the look: what changes from here on sets it again

    async def _catch_up(self) -> None:
        """The state is as the store is now: before anything is decided on it."""
        self._lapse()

    def _lapse(self) -> None:
        lapsed = self._state.lapse(unix_s())
        self._counters.lapsed_leases += len(lapsed)
        if lapsed:
            self._changed.set()

    def _count_evicted(self, gone: list[Entry]) -> None:
        for entry in gone:
            if self._state.is_stale(entry):
                self._counters.evicted_stale += 1
            else:
                self._counters.evicted_for_room += 1


async def packed_with_facts(leaves: Sequence[Trajectory]) -> tuple[bytes, Facts]:
    """The row of a session, and what is known of it without its tokens."""

    def pack() -> tuple[bytes, Facts]:
        row = packed.pack(leaves)
        return row, packed.facts_of(leaves, len(row))

    return await aside(pack, long=sum(len(leaf.token_ids) for leaf in leaves) > AT_ONCE_TOKENS)


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
