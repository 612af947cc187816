"""The prompt pool of several gateways: its commands in a Redis, in one order, carried out by each gateway.

Each gateway has the whole pool in memory, and applies the same commands with the same times (the Redis' clock), so all
decide alike and the rules stand in one place. A command is answered once this gateway has applied it.

Invariants:
- what was answered is in the Redis' log, synced (`appendfsync always`): it survives any gateway, and the Redis' death;
- a command is applied once, in the log's order, whole or not at all;
- leases begin and end by the Redis' clock; times in answers are this gateway's;
- what waits to be sent is bounded: beyond, a request gets 503 and changes nothing.

While the Redis is away requests get 503 after a wait. Leases go on running; a runner that renews its lease after it
ended has it still, unless another one was faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.core.tasks import TASKS_MAX, Leased
from gateway.redis import RedisServer
from gateway.redis.server import WAIT_S
from gateway.runtime.clock import unix_s
from gateway.runtime.supervisor import Supervisor
from gateway.store.database import Database
from gateway.tasks import leases, rows
from gateway.tasks.commands import Command, Effect, LeaseSamples, ReleaseLeases, carry_out
from gateway.tasks.log import BEGIN, Exchanged, Logged, TaskLog
from gateway.tasks.pool import PromptPool, PromptPoolStatistics
from protos.decoding import decode_msgpack
from protos.errors import LaminarError, Unavailable

log = logging.getLogger(__name__)

FOLLOW_S = 0.2
"""Between two looks at what other gateways did, while nobody needs anything here."""
BATCH_MAX = 64
BATCH_BYTES_MAX = 64 << 20
"""Sent at once: the Redis syncs its file once for all that come together."""
SENDING_MAX = 4096
SNAPSHOT_COMMANDS = 16_384
"""Commands until the pool is written down whole, so that a gateway that starts need not apply all of its history."""
SOON_S = 0.05
"""An expiry that is due by this gateway's clock may not be by the Redis': a request that waits looks no more often."""

Outcome = Effect | LaminarError


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`command` empty: it waits until all that was in the log before is applied."""

    command: bytes
    applied: asyncio.Future[Any]


class SharedPromptPool(PromptPool):
    """As `PromptPool`, with the tasks and leases of all gateways. `replica`: in memory, and this pool's alone; its
    owner closes it, and `server`, after `close`."""

    def __init__(self, replica: Database, server: RedisServer, *, tasks_max: int = TASKS_MAX) -> None:
        super().__init__(replica, tasks_max=tasks_max)
        self._server = server
        self._log = TaskLog(server)
        self._position = BEGIN
        self._born = ""  # the log that the position is in
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._loops = Supervisor()
        self._closing = False

    async def open(self) -> None:
        """Reads what the gateways have made so far, and begins to follow it."""
        await self._database.run(lambda connection: rows.open_tables(connection, 0.0))
        await self._restore()
        await self._exchange([])
        await self._recount()
        self._loops.keep_running(self._follow, "prompt-pool")

    async def close(self) -> None:
        """Waits for the changes in progress, as long as the Redis takes them."""
        self._closing = True
        await super().close()
        await self._loops.close()
        _refuse(self._waiting, Unavailable("the gateway ends", hint="send the same request to another one"))

    async def _run(self, command: Command) -> Any:
        if not isinstance(command, LeaseSamples):
            return await self._send(command)
        found = await self._nothing_to_lease(command) or await self._send(command)
        return self._in_local_time(found)

    async def _nothing_to_lease(self, command: LeaseSamples) -> Leased | None:
        """A request that waits looks again at each change, and most find nothing: these are not worth a command."""
        await self._send(None)
        now = unix_s() + self._ahead_s
        return await self._database.run(lambda pool: leases.nothing_to_lease(pool, command.wanted, now))

    def _in_local_time(self, leased: Leased) -> Leased:
        found = [replace(lease, until_unix_s=lease.until_unix_s - self._ahead_s) for lease in leased.leases]
        due = leased.next_expiry_unix_s
        return Leased(found, leased.drained, None if due is None else max(due - self._ahead_s, unix_s() + SOON_S))

    async def _send(self, command: Command | None) -> Any:
        """The command's answer; of None, once this gateway has applied what was in the log."""
        if len(self._waiting) >= SENDING_MAX:
            why = self._server.failure or "it is slow"
            raise Unavailable(f"{len(self._waiting)} requests wait for {self._server.address}: {why}", hint="try again")
        encoded = b"" if command is None else msgspec.msgpack.encode(command)
        waiting = _Waiting(encoded, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.applied

    # -- the log

    async def _follow(self) -> None:
        """Sends what waits, and applies what comes, until cancelled."""
        while True:
            if not self._waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_S):
                        await self._wake.wait()
            self._wake.clear()
            batch = self._next_batch()
            try:
                await self._exchange(batch)
            except LaminarError as e:  # the server's room has logged it, and shows it
                _refuse(batch, e)
                await asyncio.sleep(FOLLOW_S)
            finally:
                _refuse(batch, Unavailable("the request is in doubt", hint="send the same request again"))

    def _next_batch(self) -> list[_Waiting]:
        batch, num_bytes = list[_Waiting](), 0
        while self._waiting and len(batch) < BATCH_MAX and num_bytes < BATCH_BYTES_MAX:
            batch.append(self._waiting.popleft())
            num_bytes += len(batch[-1].command)
        return batch

    async def _exchange(self, batch: Sequence[_Waiting]) -> None:
        """Sends a batch, and applies the log up to its end as it is then."""
        sent = [waiting for waiting in batch if waiting.command]
        wait_s = 0.0 if self._closing or not batch else WAIT_S
        number, found = await self._log.exchange(self._position, [w.command for w in sent], wait_s=wait_s)
        mine = dict(enumerate(sent))
        end = found.last
        while True:
            self._ahead_s = found.unix_s - unix_s()
            if self._is_lost(found):
                log.warning("the prompt pool is read anew from %s", self._server.address)
                await self._restore()
                await self._recount()
                end = found.last
            else:
                await self._apply(found.logged, number, mine)
            if self._position >= end:
                break
            _, found = await self._log.exchange(self._position, wait_s=wait_s)
        for waiting in batch:
            if not waiting.command and not waiting.applied.done():
                waiting.applied.set_result(None)
        await self._keep_snapshot(found)

    def _is_lost(self, found: Exchanged) -> bool:
        """Whether the log does not go on where this gateway is: it was trimmed, or is another one."""
        another, self._born = self._born not in ("", found.born), found.born
        return another or not found.trimmed <= self._position <= found.last

    async def _apply(self, logged: Sequence[Logged], number: int, mine: Mapping[int, _Waiting]) -> None:
        if not logged:
            return
        outcomes = await self._database.run(lambda connection: [_apply(connection, one) for one in logged])
        self._position = logged[-1].position
        for one, outcome in zip(logged, outcomes, strict=True):
            if isinstance(outcome, Effect):
                self._count(outcome)
            if one.life != self._log.life:
                continue
            waiting = mine.get(one.at) if one.number == number else None
            if waiting is not None and not waiting.applied.done():
                _settle(waiting, outcome)
            elif isinstance(outcome, Effect) and isinstance(outcome.answer, Leased):
                self._give_back_unnamed(one, outcome.answer)

    def _give_back_unnamed(self, logged: Logged, leased: Leased) -> None:
        """Of a request that got 503 although it landed. One that has a name is sent again, perhaps to another gateway,
        and gets the same leases; of any other no runner will ever know."""
        command = decode_msgpack(logged.command, Command)
        if leased.leases and isinstance(command, LeaseSamples) and command.wanted.request is None:
            names = [lease.lease_id for lease in leased.leases]
            self._shielded.start(self._run(ReleaseLeases(names)), "give-back-tasks")

    async def _restore(self) -> None:
        position, parts = await self._log.snapshot()
        await self._database.run(lambda connection: rows.restore(connection, parts))
        self._position = position

    async def _recount(self) -> None:
        tasks, live = await self._database.run(rows.totals)
        self._statistics = PromptPoolStatistics(tasks=tasks, leases=live)
        self._notify()

    async def _keep_snapshot(self, found: Exchanged) -> None:
        if found.since >= SNAPSHOT_COMMANDS and self._position >= found.last:
            parts = await self._database.run(rows.dump)
            await self._log.keep_snapshot(self._position, parts)
            log.info("the prompt pool is written down whole in %s after %d commands", self._server.address, found.since)


def _apply(connection: sqlite3.Connection, logged: Logged) -> Outcome:
    """One command, whole or not at all. An error of the command is its outcome, on every gateway alike."""
    command = decode_msgpack(logged.command, Command)
    connection.execute("SAVEPOINT command")
    try:
        return carry_out(connection, command, logged.unix_s)
    except LaminarError as e:
        connection.execute("ROLLBACK TO command")
        return e
    finally:
        connection.execute("RELEASE command")


def _settle(waiting: _Waiting, outcome: Outcome) -> None:
    if isinstance(outcome, Effect):
        waiting.applied.set_result(outcome.answer)
    else:
        waiting.applied.set_exception(outcome)


def _refuse(batch: Sequence[_Waiting] | deque[_Waiting], error: LaminarError) -> None:
    for waiting in batch:
        if not waiting.applied.done():
            waiting.applied.set_exception(error)
            waiting.applied.exception()  # nobody may wait for it any more
