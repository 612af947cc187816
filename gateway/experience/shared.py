"""The experience buffer of several gateways: in a Redis, with a replica of the bookkeeping in each gateway.

Invariants:
- a finish is committed at this gateway (`outbox`) together with its session's end, and then sent; `add` returns once it
  landed. One that the Redis does not take in time raises `Undelivered`, and is sent until it landed, over restarts;
- the state changes by what the Redis reports, or by what this gateway did there; before each decision it catches up;
- a lease ends by the Redis' clock alone;
- what waits to be sent is bounded, in number and bytes: beyond, a finish is refused without any effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

from gateway.core.selection import Entry
from gateway.experience.buffer import BYTES_MAX, CAPACITY, DeliveryStatistics, ExperienceBuffer, packed_with_facts
from gateway.experience.outbox import Finish, Sending
from gateway.experience.redis_store import Landed, RedisStore, taken
from gateway.experience.stores import Undelivered
from gateway.redis import RedisServer
from gateway.runtime.supervisor import Supervisor
from gateway.store.database import Database, Operation
from protos.decoding import decode_msgpack
from protos.errors import Conflict, LaminarError, OutOfCapacity, Unavailable
from protos.packed import Facts
from protos.trajectories import Trajectory

log = logging.getLogger(__name__)

FOLLOW_S = 0.2
"""Between two looks at what other gateways did, while nobody decides anything here."""
DELIVERY_WAIT_S = 20.0
"""How long the caller of a finish waits for the Redis."""
CLOSE_WAIT_S = 2.0
"""How long a gateway that ends waits for it."""
BATCH_MAX = 16
"""Finishes sent at once: Redis syncs its file once for all that come together."""
SENDING_MAX = 4096
SENDING_BYTES_MAX = 256 << 20
"""What may wait to be sent. A gateway holds it in its memory, and on disk with `--data`."""
RETRY_S = 0.1
RETRY_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    sending: Sending
    landed: asyncio.Future[int]  # for `drop_group` with the number of sessions, else 0


class SharedBuffer(ExperienceBuffer):
    """As `ExperienceBuffer`, with what other gateways add, lease and use. `server`: connected; its owner closes it."""

    def __init__(
        self, database: Database, server: RedisServer, *, capacity: int = CAPACITY, bytes_max: int = BYTES_MAX
    ) -> None:
        self._redis = RedisStore(database, server, capacity, bytes_max)
        super().__init__(database, store=self._redis, capacity=capacity, bytes_max=bytes_max)
        self._server = server
        self._waiting: dict[int, _Waiting] = {}  # by the number in the outbox
        self._waiting_bytes = 0
        self._unconfirmed: list[Sending] = []
        self._delivered = 0
        self._wake, self._closing = asyncio.Event(), asyncio.Event()
        self._loops = Supervisor()

    async def open(self) -> None:
        """Reads what the Redis has, and begins to send what an earlier life of this gateway left."""
        await self._redis.open()
        async with self._order:
            await self._catch_up()
        if self._redis.unsent:
            log.info("%d rows of an earlier life are sent to %s", len(self._redis.unsent), self._server.address)
        for sending in self._redis.unsent:
            self._send(sending)
        self._loops.keep_running(self._deliver, "experience-delivery")
        self._loops.keep_running(self._follow, "experience-follow")

    async def close(self) -> None:
        """Waits a short time for what is being sent; the rest stays in the outbox."""
        waiting = [found.landed for found in self._waiting.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=CLOSE_WAIT_S)
        self._closing.set()
        await self._loops.close()  # before the drain: it starts confirmations
        await super().close()
        if self._waiting:
            log.warning("%d rows wait for %s: the next start sends them", len(self._waiting), self._server.address)

    def delivery(self) -> DeliveryStatistics:
        redis = self._server.statistics()
        return DeliveryStatistics(
            redis.address,
            redis.namespace,
            redis.failure,
            len(self._waiting),
            self._waiting_bytes,
            self._delivered,
            redis.failed,
        )

    async def delivered(self, session_id: str) -> None:
        found = next((w for w in self._waiting.values() if w.sending.name == session_id), None)
        if found is not None:
            await self._landed(found)

    # -- what this gateway adds

    async def _add(self, leaves: Sequence[Trajectory], along: Operation[object] | None) -> None:
        trajectory = leaves[0]
        name, group = trajectory.session_id, trajectory.group_id
        row, facts = await packed_with_facts(leaves)
        try:
            self._refuse(name)
        except (Conflict, OutOfCapacity):  # by a replica, which may be late
            async with self._order:
                await self._catch_up_or_later()
            self._refuse(name)
        if len(self._waiting) >= SENDING_MAX or self._waiting_bytes + len(row) > SENDING_BYTES_MAX:
            why = self._server.failure or "it is slow"
            raise Unavailable(
                f"{len(self._waiting)} finishes wait for {self._server.address}: {why}",
                hint="finish the session again once it answers",
            )
        entry = Entry(0, name, group, facts.oldest_version, facts)
        await self._landed(self._send(await self._redis.keep(entry, row, along)))

    def _refuse(self, session_id: str) -> None:
        super()._refuse(session_id)
        if any(found.sending.name == session_id for found in self._waiting.values()):
            raise Conflict(f"the trajectory of session {session_id} is on its way to the experience buffer")

    async def _release(self, lease_id: str) -> int:
        try:
            return await super()._release(lease_id)
        except Unavailable:
            self._redis.doubt(lease_id)
            raise

    async def _close_group(self, group_id: str, members: int) -> None:
        await self._commit("close_group", group_id, members)

    async def _drop_group(self, group_id: str) -> int:
        return await self._commit("drop_group", group_id, 0)

    async def _commit(self, kind: Literal["close_group", "drop_group"], group_id: str, members: int) -> int:
        """Committed when this returns; it lands now, or once the Redis answers, behind the finishes before it."""
        found = self._send(await self._redis.outbox.put(kind, group_id, members))
        if not self._server.failure:
            with contextlib.suppress(Undelivered):  # it is in the outbox, and no caller gets a promise of it
                return await self._landed(found)
        return 0

    def _send(self, sending: Sending) -> _Waiting:
        found = self._waiting[sending.number] = _Waiting(sending, asyncio.get_running_loop().create_future())
        self._waiting_bytes += sending.num_bytes
        self._wake.set()
        return found

    async def _landed(self, found: _Waiting) -> int:
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
                f"{self._server.address}: {self._server.failure or 'it has no room'}",
                hint="send the same request again: it returns once the trajectory landed",
            )
        return found.landed.result()

    # -- delivery

    async def _deliver(self) -> None:
        """Sends what waits, in order, until cancelled."""
        retry_s = RETRY_S
        while True:
            self._wake.clear()
            if not self._waiting:
                await self._wake.wait()
            try:
                async with self._order:
                    num_landed = await self._deliver_some()
            except LaminarError:  # the server's room has logged it, and shows it
                num_landed = 0
            if num_landed:
                retry_s = RETRY_S
                continue
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_MAX_S, 2 * retry_s)

    async def _deliver_some(self) -> int:
        """A run of finishes together, or another row alone; returns how many landed."""
        first = list(islice(self._waiting.values(), BATCH_MAX))
        finishes = list(takewhile(lambda found: found.sending.kind == "finish", first))
        if not finishes:
            await self._deliver_other(first[0])
            return 1
        results = await asyncio.gather(
            *(self._redis.land(found.sending, wait_s=0) for found in finishes), return_exceptions=True
        )
        done: list[tuple[_Waiting, Landed]] = []
        error: BaseException | None = None
        for found, result in zip(finishes, results, strict=True):
            if isinstance(result, BaseException):
                error = error or result
            elif result not in ("full", "raced"):
                done.append((found, result))
            elif error is None and (landed := await self._land_with_room(found.sending)) is not None:
                done.append((found, landed))
        if done:
            await self._catch_up_or_later()
            self._settle(done)
        if error is not None:
            raise error
        return len(done)

    async def _land_with_room(self, sending: Sending) -> Landed | None:
        """Makes room by the buffer's own rule. None: there is none now, every place is leased."""
        content = sending.content
        assert isinstance(content, Finish)
        facts = decode_msgpack(content.facts, Facts)
        entry = Entry(0, sending.name, content.group_id, content.oldest_version, facts)
        while True:
            await self._redis.catch_up(self._state, 0)
            if self._state.full():
                return None
            gone = self._state.make_room(entry)
            try:
                landed = await self._redis.land(sending, gone, 0)
            except LaminarError:
                self._state.put_back(gone)
                raise
            if landed not in ("full", "raced"):
                self._count_evicted(gone)
                return landed
            self._state.put_back(gone)
            if landed == "full" and not gone:
                return None  # by a bound of this gateway that the replica does not show

    async def _deliver_other(self, found: _Waiting) -> None:
        sending, num_gone = found.sending, 0
        if sending.kind == "close_group":
            assert isinstance(sending.content, int)
            await self._redis.close_group(sending.name, sending.content)
        else:
            num_gone = await self._drop_members(sending.name)
        await self._catch_up_or_later()
        self._remove(found)
        if not found.landed.done():
            found.landed.set_result(num_gone)
        self._changed.set()

    async def _catch_up_or_later(self) -> None:
        """So that who waits for a finish finds it in the state; the finish has landed in any case."""
        with contextlib.suppress(Unavailable):
            await self._redis.catch_up(self._state, 0)

    def _settle(self, done: Sequence[tuple[_Waiting, Landed]]) -> None:
        for found, landed in done:
            self._remove(found)
            self._delivered += 1
            if landed == "taken":
                error = taken(found.sending.name)
                log.error("%s", error)
                found.landed.set_exception(error)
                found.landed.exception()  # nobody may wait for it any more
            else:
                self._counters.added += 1
                found.landed.set_result(0)
        self._changed.set()

    def _remove(self, found: _Waiting) -> None:
        del self._waiting[found.sending.number]
        self._waiting_bytes -= found.sending.num_bytes
        self._unconfirmed.append(found.sending)
        if len(self._unconfirmed) == 1:
            self._shielded.start(self._confirm(), "confirm-delivered")

    async def _confirm(self) -> None:
        """Deletes what landed from the outbox, and then what the Redis knows of it: in this order, so that it is known
        as long as it may be sent again."""
        await asyncio.sleep(0)  # for all that landed together
        sent, self._unconfirmed = self._unconfirmed, []
        try:
            await self._redis.sent(sent)
        except Unavailable:
            log.info("%s is to forget %d finishes at the next start of this gateway", self._server.address, len(sent))

    # -- what other gateways do

    async def _catch_up(self) -> None:
        if await self._redis.catch_up(self._state):
            self._changed.set()
        self._counters.lapsed_leases = self._redis.lapsed

    async def _follow(self) -> None:
        """Until cancelled. Also what finds that a Redis answers again while nobody asks for anything."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            async with self._order:
                with contextlib.suppress(Unavailable):
                    if await self._redis.catch_up(self._state, 0):
                        self._changed.set()
                    self._counters.lapsed_leases = self._redis.lapsed

    def _lapse(self) -> None:
        """Leases end by the Redis' clock."""
