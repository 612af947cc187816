"""Where the experience buffer keeps its trajectories: the seam, and the two stores that a gateway has alone.

The buffer decides what is added, leased and dropped (`buffer`, `leases`); a store has the bodies, and whatever of the
bookkeeping is to outlive the gateway. Of a session's finish, every store commits the part that is not its own (`along`)
to the gateway's database, and has the trajectories only if that succeeded.

What `run` and `owe` are to the database, the methods here are to their callers: `add`, `revise`, `lease` and `use_up`
raise LaminarError without any effect; the others record what has happened already, and wait while a store cannot be
written.

A store that several gateways share (`redis_store`) may refuse what another gateway was faster with: `Raced`.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.selection import Entry
from gateway.experience import rows
from gateway.experience.leases import LeaseState
from gateway.store.database import Database, Operation
from protos.errors import Conflict, InvalidRequest, Unavailable
from protos.packed import Facts
from protos.trajectories import Trajectory

log = logging.getLogger(__name__)

Change = Callable[[list[Trajectory]], list[Trajectory]]


class Raced(Conflict):
    """Another gateway has changed what was chosen. Nothing was done: catch up, and choose again."""


class Undelivered(Unavailable):
    """The finish is committed at this gateway and not yet in the store that it shares; it lands once that answers."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an earlier life of the gateway left. `entries`: oldest first, each with its lease's id. `leases`: id,
    reader, end (Unix time, in seconds) and the uses that it allows. `closed_groups`: with their members. `last_seq`: of
    all that is there, also of what is damaged; numbers above it are free."""

    entries: Sequence[tuple[Entry, str | None]] = ()
    leases: Sequence[tuple[str, str, float, int]] = ()
    closed_groups: Sequence[tuple[str, int]] = ()
    last_seq: int = 0


class ExperienceStore(Protocol):
    """The bodies of trajectories, by entry: the leaves of one session, as a row of `protos.packed`."""

    async def open(self) -> Kept:
        """Makes the tables in any case: the sessions' own refer to them (`gateway.store.sessions`)."""
        ...

    def check(self) -> None:
        """Raises Unavailable while no lease can be kept."""
        ...

    async def synced(self) -> None:
        """When this returns, what this store keeps on disk survives a power cut."""
        ...

    async def add(self, entry: Entry, body: bytes, gone: Sequence[Entry], along: Operation[object] | None) -> None:
        """Adds `body` in place of those of `gone`. `along` takes effect, too, or nothing does. What is written outside
        the gateway's database is synced when this returns."""
        ...

    async def revise(self, entry: Entry, change: Change) -> Facts:
        """The entry's new facts. `change` is pure and may run in another thread, or more than once; if it raises,
        nothing changes."""
        ...

    async def read(self, entry: Entry) -> bytes:
        """The entry's body, whoever has its lease."""
        ...

    async def delete(self, gone: Sequence[Entry]) -> Sequence[Entry]:
        """Returns those that another gateway has leased meanwhile: they stay."""
        ...

    async def lease(self, lease: LeaseState) -> Sequence[bytes]:
        """The bodies of the lease's entries, in their order, once the lease is kept; b"" for one that is damaged or
        gone. May raise Raced."""
        ...

    async def use_up(self, lease: LeaseState) -> None:
        """Deletes the lease and its entries, but for those that `again` keeps for another use."""
        ...

    async def acknowledged(self, lease_id: str) -> int | None:
        """How many the lease had, if the store knows that it was used up; None if not."""
        ...

    async def release(self, lease_id: str) -> None: ...

    async def leave_out(self, entry: Entry) -> None:
        """The entry's body does not decode: it stays where it is, and belongs to no lease."""
        ...

    async def close_group(self, group_id: str, members: int, forgotten: Sequence[str]) -> None: ...


class DatabaseStore:
    """Rows of the gateway's database. With `--data` they outlive the gateway, leases included."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> Kept:
        entries, leases, last_seq = await self._database.run(rows.load)
        return Kept(entries, leases, await self._database.run(rows.load_closed_groups), last_seq)

    def check(self) -> None:
        self._database.check()

    async def synced(self) -> None:
        await self._database.synced()

    async def add(self, entry: Entry, body: bytes, gone: Sequence[Entry], along: Operation[object] | None) -> None:
        def write(connection: sqlite3.Connection) -> None:
            rows.replace(connection, entry, body, gone)
            if along is not None:
                along(connection)

        await self._database.run(write)

    async def revise(self, entry: Entry, change: Change) -> Facts:
        return await self._database.run(lambda connection: rows.revise(connection, entry.seq, change))

    async def read(self, entry: Entry) -> bytes:
        return await self._database.run(lambda connection: rows.read(connection, entry.seq))

    async def delete(self, gone: Sequence[Entry]) -> Sequence[Entry]:
        await self._database.owe(lambda connection: rows.delete(connection, gone))
        return ()

    async def lease(self, lease: LeaseState) -> Sequence[bytes]:
        return await self._database.run(lambda connection: rows.lease_rows(connection, lease))

    async def use_up(self, lease: LeaseState) -> None:
        await self._database.run(lambda connection: rows.use_up(connection, lease))

    async def acknowledged(self, lease_id: str) -> int | None:
        return None

    async def release(self, lease_id: str) -> None:
        await self._database.owe(lambda connection: rows.release(connection, lease_id))

    async def leave_out(self, entry: Entry) -> None:
        await self._database.owe(lambda connection: rows.unlease(connection, entry.seq))

    async def close_group(self, group_id: str, members: int, forgotten: Sequence[str]) -> None:
        await self._database.owe(lambda connection: rows.close_group(connection, group_id, members, forgotten))


class MemoryStore:
    """Bodies in this process alone, as many as the buffer's capacity; the next start begins without any.

    The database gets no row of them, and only `along` is written: so a disk that fails refuses finishes, but no reader.
    Leases and closed groups are in the buffer's own bookkeeping, and need no record. What an earlier life with a
    `DatabaseStore` left stays untouched.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._bodies: dict[int, bytes] = {}  # by the entry's seq

    def __len__(self) -> int:
        return len(self._bodies)

    async def open(self) -> Kept:
        if left := await self._database.run(rows.count):
            log.warning(
                "%d sessions' trajectories of an earlier life stay in the database, and no reader gets them: start "
                "with --experience-store database to hand them out",
                left,
            )
        return Kept()

    def check(self) -> None:
        pass

    async def synced(self) -> None:
        pass

    async def add(self, entry: Entry, body: bytes, gone: Sequence[Entry], along: Operation[object] | None) -> None:
        if along is not None:
            await self._database.run(along)
        await self.delete(gone)
        self._bodies[entry.seq] = body

    async def revise(self, entry: Entry, change: Change) -> Facts:
        self._bodies[entry.seq], facts = rows.revised(entry.seq, self._bodies[entry.seq], change)
        return facts

    async def read(self, entry: Entry) -> bytes:
        return self._bodies[entry.seq]

    async def delete(self, gone: Sequence[Entry]) -> Sequence[Entry]:
        for entry in gone:
            self._bodies.pop(entry.seq, None)
        return ()

    async def lease(self, lease: LeaseState) -> Sequence[bytes]:
        return [self._bodies[seq] for seq in lease.entries]

    async def use_up(self, lease: LeaseState) -> None:
        kept = {entry.seq for entry in lease.again()}
        await self.delete([entry for entry in lease.entries.values() if entry.seq not in kept])

    async def acknowledged(self, lease_id: str) -> int | None:
        return None

    async def release(self, lease_id: str) -> None:
        pass

    async def leave_out(self, entry: Entry) -> None:
        self._bodies.pop(entry.seq, None)

    async def close_group(self, group_id: str, members: int, forgotten: Sequence[str]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A store that a gateway has alone. `make`: from the gateway's database, which is for what is committed along.
    `help`: where trajectories wait in it, for `--help`."""

    make: Callable[[Database], ExperienceStore]
    help: str


STORES: Mapping[str, StoreKind] = {
    "database": StoreKind(DatabaseStore, "with the sessions, in --data"),
    "memory": StoreKind(MemoryStore, "never on disk, and lost at exit, also where --data keeps the sessions"),
}
"""By the name that `--experience-store` takes; no other place names them."""


def make_store(name: str, database: Database) -> ExperienceStore:
    """Raises InvalidRequest for a name that no store has."""
    if name not in STORES:
        raise InvalidRequest(f"no experience store is named {name!r}", hint=f"there are: {', '.join(STORES)}")
    return STORES[name].make(database)
