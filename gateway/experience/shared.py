"""The experience of several gateways: the commands of all of them, in the order of a log that they share.

Invariants:
- a finish is committed at this gateway (`outbox`) together with its session's end, and then sent; it returns once it
  landed. One that the log does not take in time raises `Undelivered`, and is sent until it landed, over restarts;
- the state changes by the log's commands alone; leases end by the log's clock alone;
- what waits to be sent is bounded, in number and bytes: beyond, a finish is refused without any effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.core.admission import Reader, Readers
from gateway.core.experience import BufferState, LeaseState
from gateway.core.experience_commands import (
    AddSession,
    CloseGroup,
    Command,
    ConfirmFinishes,
    DeclareReader,
    DropGroup,
    EndLapsed,
    Known,
    LeaseEntries,
    ReleaseLease,
    carry_out,
)
from gateway.core.selection import Bound, Entry
from gateway.experience import rows
from gateway.experience.outbox import Finish, Outbox, Sending
from gateway.experience.stores import DeliveryStatistics, StoreMaker, Undelivered
from gateway.log.base import Body, Hooks, Outcome, SharedStore, Timed, parts_in
from gateway.log.replicated import Replicated
from gateway.runtime.aside import aside
from gateway.runtime.shielded import ShieldedTasks
from gateway.runtime.supervisor import Supervisor
from gateway.store.database import Database, Operation
from protos.decoding import decode_msgpack
from protos.errors import Conflict, LaminarError, OutOfCapacity, Unavailable
from protos.packed import Facts

log = logging.getLogger(__name__)

ROOM = "experience"
DELIVERY_WAIT_S = 20.0
"""How long the caller of a finish waits for the log's store."""
CLOSE_WAIT_S = 2.0
"""How long a gateway that ends waits for it."""
SENDING_MAX = 4096
SENDING_BYTES_MAX = 256 << 20
"""What may wait to be sent. A gateway holds it in its memory, and on disk with `--data`."""
RETRY_S = 0.1
RETRY_MAX_S = 2.0
"""Between attempts of a finish for which there is no room."""
DUMPED_AT_ONCE = 4096


class _Dump(msgspec.Struct):
    """All but the free entries, which follow in pieces. `leases`: id, reader, end, uses that it allows, entries."""

    leases: list[tuple[str, str, float, int, list[Entry]]]
    closed_groups: dict[str, int]
    own: Bound
    capacity: int
    bytes_max: int | None
    last_seq: int
    landed: dict[str, dict[str, float]]
    ended: dict[str, tuple[int, float]]
    readers: list[Reader]


class ExperienceMachine:
    """The bookkeeping as what a log's commands change."""

    def __init__(self, state: BufferState, known: Known) -> None:
        self._state, self._known = state, known

    def decode(self, command: bytes) -> Command:
        found: Command = decode_msgpack(command, Command)
        return found

    async def apply(self, commands: Sequence[Timed]) -> Sequence[Outcome]:
        return [self._apply(timed) for timed in commands]

    def _apply(self, timed: Timed) -> Outcome:
        try:
            return carry_out(self._state, self._known, timed.command, timed.unix_s)
        except LaminarError as e:
            return e

    async def resume(self, now: float) -> None:
        """There is nothing but the log."""

    async def dump(self) -> Sequence[bytes]:
        state, known = self._state, self._known
        leases = [
            (it.lease_id, it.reader, it.until, it.uses_max, list(it.entries.values())) for it in state.leases.values()
        ]
        dump = _Dump(
            leases,
            dict(state.closed_groups),
            state.own,
            state.capacity,
            state.bytes_max,
            state.last_seq,
            {sender: dict(landed) for sender, landed in known.landed.items()},
            dict(known.ended),
            known.readers.all(),
        )
        free = list(state.free.values())
        pieces = [free[at : at + DUMPED_AT_ONCE] for at in range(0, len(free), DUMPED_AT_ONCE)]
        return await aside(lambda: [msgspec.msgpack.encode(part) for part in (dump, *pieces)], long=bool(pieces))

    async def restore(self, dumped: Sequence[bytes]) -> None:
        state, known = BufferState(self._state.capacity, self._state.bytes_max), Known()
        if dumped:
            found = decode_msgpack(dumped[0], _Dump)
            state = BufferState(found.capacity, found.bytes_max, found.own)
            for piece in dumped[1:]:
                for entry in decode_msgpack(piece, list[Entry]):
                    state.put(entry)
            for lease_id, reader, until, uses_max, entries in found.leases:
                state.hold(LeaseState(lease_id, reader, until, {entry.seq: entry for entry in entries}, uses_max))
            state.last_seq = found.last_seq
            state.closed_groups.update(found.closed_groups)
            known = Known(found.landed, found.ended, Readers.of(found.readers))
        self._state.become(state)
        self._known.landed, self._known.ended, self._known.readers = known.landed, known.ended, known.readers

    def undo(self, command: Command) -> Command | None:
        return ReleaseLease(command.lease_id) if isinstance(command, LeaseEntries | ReleaseLease) else None

    def keeps(self, body: str) -> bool:
        return body in self._state.bodies


@dataclass(frozen=True, slots=True)
class _Waiting:
    sending: Sending
    landed: asyncio.Future[Any]


class SharedExperience:
    """`store`: connected; its owner closes it. Implements `gateway.experience.stores.ExperienceStore`."""

    is_shared = True

    def __init__(self, database: Database, store: SharedStore, state: BufferState, hooks: Hooks) -> None:
        self.state, self.known = state, Known()
        self._capacity, self._bytes_max = state.capacity, state.bytes_max
        self._database, self._store, self._hooks = database, store, hooks
        machine = ExperienceMachine(state, self.known)
        self._commands = Replicated(store.log(ROOM), machine, hooks, store, ROOM)
        self._outbox = Outbox(database)
        self._waiting: dict[int, _Waiting] = {}  # by the number in the outbox
        self._waiting_bytes = 0
        self._unconfirmed: list[Sending] = []
        self._delivered = 0
        self._closing = asyncio.Event()
        self._deliveries, self._shielded = Supervisor(), ShieldedTasks()

    async def open(self) -> None:
        """Reads what the log has made, and begins to send what an earlier life of this gateway left."""
        if left := await self._database.run(rows.count):
            log.warning("%d sessions' trajectories stay in the database: no reader of the shared store gets them", left)
        unsent = await self._outbox.open()
        await self._commands.open()
        finishes = [_finish(sending) for sending in unsent if sending.kind == "finish"]
        if self.known.landed.get(self._outbox.gateway):
            await self._commands.run(ConfirmFinishes(self._outbox.gateway, finishes, others=True))
        if unsent:
            log.info("%d rows of an earlier life are sent to %s", len(unsent), self._store.address)
        for sending in unsent:
            self._send(sending)

    async def close(self) -> None:
        """Waits a short time for what is being sent; the rest stays in the outbox."""
        if landing := [found.landed for found in self._waiting.values()]:
            await asyncio.wait(landing, timeout=CLOSE_WAIT_S)
        self._closing.set()
        await self._shielded.drain()
        await self._deliveries.close()
        await self._commands.close()
        if self._waiting:
            log.warning("%d rows wait for %s: the next start sends them", len(self._waiting), self._store.address)

    def now(self) -> float:
        return self._commands.now()

    def lapse(self) -> None:
        """Leases end by the log's clock."""

    def check(self) -> None:
        self._commands.check()

    async def synced(self) -> None:
        await self._commands.synced()

    async def look(self) -> None:
        await self._commands.look()
        lapse = self.state.next_lapse()
        if lapse is not None and lapse <= self.now():
            await self._commands.run(EndLapsed())

    async def run(self, command: Command, body: bytes | None = None, along: Operation[object] | None = None) -> Any:
        if not isinstance(command, AddSession | CloseGroup | DropGroup):
            return await self._commands.run(command, body)
        if isinstance(command, AddSession):
            return await self._landed(self._send(await self._keep(command, body or b"", along)))
        kind, members = ("close_group", command.members) if isinstance(command, CloseGroup) else ("drop_group", 0)
        found = self._send(await self._outbox.put(kind, command.group_id, members))  # type: ignore[arg-type]
        if not self._store.failure:
            with contextlib.suppress(Undelivered):  # it is in the outbox, and no caller gets a promise of it
                return await self._landed(found)
        return 0

    async def _keep(self, command: AddSession, body: bytes, along: Operation[object] | None) -> Sending:
        if len(self._waiting) >= SENDING_MAX or self._waiting_bytes + len(body) > SENDING_BYTES_MAX:
            why = self._store.failure or "it is slow"
            raise Unavailable(
                f"{len(self._waiting)} finishes wait for {self._store.address}: {why}",
                hint="finish the session again once it answers",
            )
        content = Finish(command.group_id, command.oldest_version, msgspec.msgpack.encode(command.facts), body)
        return await self._outbox.put("finish", command.session_id, content, along)

    def declare(self, reader: DeclareReader) -> None:
        self._commands.owe(reader)

    async def read(self, entries: Sequence[Entry]) -> list[bytes]:
        bodies = [Body(entry.body, parts_in(entry.facts.num_bytes)) for entry in entries]
        found = await self._commands.bodies(bodies)
        if None in found:  # revised or used at another gateway meanwhile, unless it is damaged
            await self._commands.look()
        return [body or b"" for body in found]

    def is_waiting(self, session_id: str) -> bool:
        return any(found.sending.name == session_id for found in self._waiting.values())

    async def delivered(self, session_id: str) -> None:
        found = next((it for it in self._waiting.values() if it.sending.name == session_id), None)
        if found is not None:
            await self._landed(found)

    def delivery(self) -> DeliveryStatistics:
        store = self._store.statistics()
        waiting, num_bytes = len(self._waiting), self._waiting_bytes
        return DeliveryStatistics(
            store.address, store.namespace, store.failure, waiting, num_bytes, self._delivered, store.failed
        )

    # -- delivery

    def _send(self, sending: Sending) -> _Waiting:
        found = self._waiting[sending.number] = _Waiting(sending, asyncio.get_running_loop().create_future())
        self._waiting_bytes += sending.num_bytes
        self._deliveries.start(self._deliver(found, self._owe(sending)), f"deliver-{sending.number}")
        return found

    def _owe(self, sending: Sending) -> asyncio.Future[Any]:
        content = sending.content
        if not isinstance(content, Finish):
            closes = sending.kind == "close_group"
            return self._commands.owe(
                CloseGroup(sending.name, content) if closes else DropGroup(sending.name), kept=True
            )
        command = AddSession(
            sending.name,
            content.group_id,
            content.oldest_version,
            decode_msgpack(content.facts, Facts),
            self._capacity,
            self._bytes_max,
            self._outbox.gateway,
            _finish(sending),
        )
        return self._commands.owe(command, content.row, kept=True)

    async def _deliver(self, found: _Waiting, landing: asyncio.Future[Any]) -> None:
        """Until it has landed, or never will."""
        retry_s = RETRY_S
        while True:
            try:
                answer = await landing
            except OutOfCapacity:
                await asyncio.sleep(retry_s)
                retry_s, landing = min(RETRY_MAX_S, 2 * retry_s), self._owe(found.sending)
                continue
            except Unavailable:
                return  # this gateway ends: the next start sends it
            except Conflict as e:
                log.error("the trajectory of a session is not kept: %s", e)
                found.landed.set_exception(e)
                found.landed.exception()  # nobody may wait for it any more
            else:
                found.landed.set_result(answer)
            break
        self._delivered += found.sending.kind == "finish"
        del self._waiting[found.sending.number]
        self._waiting_bytes -= found.sending.num_bytes
        self._unconfirmed.append(found.sending)
        if len(self._unconfirmed) == 1:
            self._shielded.start(self._confirm(), "confirm-delivered")

    async def _landed(self, found: _Waiting) -> Any:
        """Raises Undelivered after `DELIVERY_WAIT_S`, and when this gateway ends; Conflict where the session's name is
        taken."""
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait((found.landed, closing), timeout=DELIVERY_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        if not found.landed.done():
            raise Undelivered(
                f"{found.sending.name} is kept at this gateway, and waits for "
                f"{self._store.address}: {self._store.failure or 'it has no room'}",
                hint="send the same request again: it returns once the trajectory landed",
            )
        return found.landed.result()

    async def _confirm(self) -> None:
        """Deletes what landed from the outbox, and then what the log knows of it: in this order, so that it is known
        as long as it may be sent again."""
        await asyncio.sleep(0)  # for all that landed together
        sent, self._unconfirmed = self._unconfirmed, []
        await self._outbox.delete(sent)
        finishes = list(_finishes(sent))
        if finishes:
            self._commands.owe(ConfirmFinishes(self._outbox.gateway, finishes))


def _finishes(sent: Iterable[Sending]) -> Iterable[str]:
    return (_finish(sending) for sending in sent if sending.kind == "finish")


def _finish(sending: Sending) -> str:
    """What names it in the log: a later session of the same name is another finish."""
    return f"{sending.number} {sending.name}"


def shared_store(database: Database, store: SharedStore) -> StoreMaker:
    """`database`: this gateway's own, which has the ends of sessions, and what is not sent yet."""
    return lambda state, hooks: SharedExperience(database, store, state, hooks)
