"""How the experience changes, and who keeps what came of it: the seam, and the two stores that a gateway has alone.

A change is a command (`gateway.core.experience_commands`). A gateway that is alone writes what was decided, and then
makes it: so its state and its store never differ, and what the store refuses has had no effect. Of a session's finish,
every store commits the part that is not its own (`along`) to the gateway's database, and has the trajectories only if
that succeeded. Gateways that share a log (`shared`) carry out the same commands in its order.

With `DatabaseRows` and a gateway that has `--data`, everything holds after a restart. With `MemoryRows` nothing
outlives the process.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.commands import Effect
from gateway.core.experience import Bounded, BufferState, Change, Gone, Leased, LeftOut, Put, Replaced, Used
from gateway.core.experience_commands import (
    CloseGroup,
    Command,
    DeclareReader,
    DropGroup,
    EndLapsed,
    EvictEntries,
    Known,
    LeaveOut,
    ReleaseLease,
    SetBound,
    decide,
    effect_of,
    remember,
)
from gateway.core.selection import Entry
from gateway.experience import rows
from gateway.log.base import Commands, Hooks
from gateway.runtime.clock import unix_s
from gateway.store.database import Database, Operation
from protos.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

HAPPENED = CloseGroup | DropGroup | EvictEntries | LeaveOut | ReleaseLease | SetBound
"""What has happened already: no full disk refuses it, and it is written once it can be."""


class Undelivered(Unavailable):
    """The finish is committed at this gateway and not yet in the store that it shares; it lands once that answers."""


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


class ExperienceStore(Commands, Protocol):
    """`state`, `known`: what commands have made. `is_shared`: others change it, too, and its time is the log's. `open`
    makes the tables in any case: the sessions' own refer to them (`gateway.store.sessions`)."""

    state: BufferState
    known: Known
    is_shared: bool

    def lapse(self) -> None:
        """Leases that are over are over at once, where this gateway alone decides that."""
        ...

    async def run(self, command: Command, body: bytes | None = None, along: Operation[object] | None = None) -> Any:
        """The command's answer. `body`: of the entry that it puts or replaces (`protos.packed`). `along` takes effect
        with it, or neither does; where a log is shared `Undelivered` may be raised although it has.

        Raises as `Commands.run`. The caller is not cancelled meanwhile."""
        ...

    def declare(self, reader: DeclareReader) -> None:
        """Without waiting: at once, or as soon as the log takes it."""
        ...

    async def read(self, entries: Sequence[Entry]) -> list[bytes]:
        """The entries' bodies, whoever has their leases; b"" for one that is not there."""
        ...

    def is_waiting(self, session_id: str) -> bool:
        """Whether a session's finish is committed here, and is on its way."""
        ...

    async def delivered(self, session_id: str) -> None:
        """When this returns, no finish of the session is on its way. May raise Undelivered."""
        ...

    def delivery(self) -> DeliveryStatistics | None:
        """None for a store of this gateway's own."""
        ...


class Rows(Protocol):
    """What keeps the experience of a gateway that is alone."""

    async def load(self, state: BufferState) -> None: ...

    async def keep(self, changes: Sequence[Change], body: bytes | None, along: Operation[object] | None) -> None:
        """Raises LaminarError without any effect."""
        ...

    async def note(self, changes: Sequence[Change]) -> None:
        """As `keep`, for what has happened already: waits while the store cannot be written."""
        ...

    async def read(self, seqs: Sequence[int]) -> list[bytes]: ...

    def check(self) -> None: ...

    async def synced(self) -> None: ...


class DatabaseRows:
    """Rows of the gateway's database. With `--data` they outlive the gateway, leases included."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, state: BufferState) -> None:
        entries, leases, last_seq = await self._database.run(rows.load)
        state.closed_groups.update(await self._database.run(rows.load_closed_groups))
        surplus = max(0, len(entries) - state.capacity)
        gone = [entry for entry, lease in entries[:surplus] if lease is None]
        dropped = {entry.seq for entry in gone}
        for entry in (entry for entry, _ in entries if entry.seq not in dropped):
            room = state.room_for(entry)
            state.make(Gone(room))
            gone += room
            state.make(Put(entry))
        state.last_seq = last_seq
        for lease_id, reader, until, uses_max in leases:
            held = [entry for entry, of in entries if of == lease_id and entry.seq in state.free]
            state.make(Leased(lease_id, reader, until, uses_max, held))
        if gone:
            log.warning("%d trajectories of an earlier life are more than this one keeps: they are evicted", len(gone))
            await self.note([Gone(gone)])

    async def keep(self, changes: Sequence[Change], body: bytes | None, along: Operation[object] | None) -> None:
        def write(connection: sqlite3.Connection) -> None:
            rows.write(connection, changes, body)
            if along is not None:
                along(connection)

        await self._database.run(write)

    async def note(self, changes: Sequence[Change]) -> None:
        if any(not isinstance(change, Bounded) for change in changes):
            await self._database.owe(lambda connection: rows.write(connection, changes))

    async def read(self, seqs: Sequence[int]) -> list[bytes]:
        return await self._database.run(lambda connection: rows.bodies(connection, seqs))

    def check(self) -> None:
        self._database.check()

    async def synced(self) -> None:
        await self._database.synced()


class MemoryRows:
    """Bodies in this process alone, as many as the buffer's capacity; the next start begins without any.

    The database gets no row of them, and only `along` is written: so a disk that fails refuses finishes, but no reader.
    What an earlier life with `DatabaseRows` left stays untouched.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._bodies: dict[int, bytes] = {}  # by the entry's seq

    def __len__(self) -> int:
        return len(self._bodies)

    async def load(self, state: BufferState) -> None:
        if left := await self._database.run(rows.count):
            log.warning(
                "%d sessions' trajectories of an earlier life stay in the database, and no reader gets them: start "
                "with --experience-store database to hand them out",
                left,
            )

    async def keep(self, changes: Sequence[Change], body: bytes | None, along: Operation[object] | None) -> None:
        if along is not None:
            await self._database.run(along)
        for change in changes:
            if isinstance(change, Put | Replaced):
                self._bodies[change.entry.seq] = body or b""
            else:
                self._forget(change)

    async def note(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._forget(change)

    def _forget(self, change: Change) -> None:
        gone: Iterable[int] = ()
        match change:
            case Gone(entries):
                gone = [entry.seq for entry in entries]
            case Used(lease):
                gone = lease.entries.keys() - {entry.seq for entry in lease.again()}
            case LeftOut(_, entry):
                gone = [entry.seq]
        for seq in gone:
            self._bodies.pop(seq, None)

    async def read(self, seqs: Sequence[int]) -> list[bytes]:
        return [self._bodies.get(seq, b"") for seq in seqs]

    def check(self) -> None:
        pass

    async def synced(self) -> None:
        pass


class OwnExperience:
    """Of a gateway that is alone. Implements `ExperienceStore`."""

    is_shared = False

    def __init__(self, kept: Rows, state: BufferState, hooks: Hooks) -> None:
        self._rows, self.state, self._hooks = kept, state, hooks
        self.known = Known()
        # Held across each change and its write: the store has them in the order in which they were decided.
        self._order = asyncio.Lock()

    async def open(self) -> None:
        await self._rows.load(self.state)

    async def close(self) -> None:
        pass

    def now(self) -> float:
        return unix_s()

    def lapse(self) -> None:
        if lapsed := self.state.lapse(unix_s()):
            self._hooks.applied(EndLapsed(), Effect(None, {"lapsed_leases": len(lapsed)}, notable=True), True)

    async def look(self) -> None:
        self.lapse()

    async def run(self, command: Command, body: bytes | None = None, along: Operation[object] | None = None) -> Any:
        async with self._order:
            self.lapse()
            decided = decide(self.state, self.known, command, unix_s())
            happened = isinstance(command, HAPPENED)
            if not happened:
                await self._rows.keep(decided.changes, body, along)
            for change in decided.changes:
                self.state.make(change)
            if happened and decided.changes:
                await self._rows.note(decided.changes)
        self._hooks.applied(command, effect_of(decided), True)
        return decided.answer

    def declare(self, reader: DeclareReader) -> None:
        remember(self.known, reader, decide(self.state, self.known, reader, self.now()), self.now())

    async def read(self, entries: Sequence[Entry]) -> list[bytes]:
        return await self._rows.read([entry.seq for entry in entries])

    def check(self) -> None:
        self._rows.check()

    async def synced(self) -> None:
        await self._rows.synced()

    def is_waiting(self, session_id: str) -> bool:
        return False

    async def delivered(self, session_id: str) -> None:
        pass

    def delivery(self) -> None:
        return None


StoreMaker = Callable[[BufferState, Hooks], ExperienceStore]


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A store that a gateway has alone. `rows`: over the gateway's database, which is for what is committed along.
    `help`: where trajectories wait in it, for `--help`."""

    rows: Callable[[Database], Rows]
    help: str


STORES: Mapping[str, StoreKind] = {
    "database": StoreKind(DatabaseRows, "with the sessions, in --data"),
    "memory": StoreKind(MemoryRows, "never on disk, and lost at exit, also where --data keeps the sessions"),
}
"""By the name that `--experience-store` takes; no other place names them."""


def own_store(name: str, database: Database) -> StoreMaker:
    """Raises InvalidRequest for a name that no store has."""
    if name not in STORES:
        raise InvalidRequest(f"no experience store is named {name!r}", hint=f"there are: {', '.join(STORES)}")
    kept = STORES[name].rows(database)
    return lambda state, hooks: OwnExperience(kept, state, hooks)
