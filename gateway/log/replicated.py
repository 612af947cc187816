"""The commands of gateways that share a log: sent in batches, and carried out by each gateway in the log's order.

Invariants:
- a command is answered once this gateway has carried it out, so whoever got an answer finds its effect here;
- what was answered is in the log; what was not may be: **a lease whose answer was lost** is ended by the `undo` of its
  command, which is owed. It has a higher number, so either it ends the lease, or the lease never lands;
- what is owed lands, in order, as often as it takes; what waits to be sent is bounded;
- a log that does not have the entry that this gateway stands at is another one, or has lost its end (a failover): then
  the state is read anew, and nothing was appended that was decided on the old one;
- bodies are put before the command that names them. Whoever ends a name drops the body; one that nothing names a day
  later is dropped by who writes a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.core.commands import Effect
from gateway.log.base import (
    BEGIN,
    REPLY_BYTES_MAX,
    Batch,
    Body,
    CommandLog,
    Exchanged,
    Hooks,
    Logged,
    Machine,
    Ordering,
    Outcome,
    SharedStore,
    Timed,
    parts_of,
)
from gateway.runtime.clock import unix_s
from gateway.runtime.shielded import ShieldedTasks
from gateway.runtime.supervisor import Supervisor
from protos.decoding import decode_msgpack
from protos.errors import LaminarError, NotFound, Unavailable

log = logging.getLogger(__name__)

FOLLOW_S = 0.2
"""Between two looks at what other gateways did, while nobody needs anything here."""
WAIT_S = 10.0
"""How long a command is sent again before its caller is refused."""
CLOSE_WAIT_S = 2.0
"""How long a gateway that ends waits for what is owed."""
BATCH_MAX = 64
BATCH_BYTES_MAX = 64 << 20
"""Sent at once: the store syncs once for all that come together."""
ALONG_BYTES_MAX = 256 << 10
"""Of bodies that are sent together with the commands that name them."""
WAITING_MAX = 4096
OWED_MAX = 1024
"""Owed without a caller; of further leases that nobody has, each ends by its own time."""
SNAPSHOT_COMMANDS = 16_384
"""Commands until the state is written down whole, so that a gateway that starts need not apply all of its history."""
RESTARTS_MAX = 10
"""Attempts to read a state that others replace meanwhile, or to put a body that is not there."""
UNNAMED_S = 86_400.0
"""How long a body that nothing names is kept: longer than its command may be on its way."""


@dataclass(slots=True)
class _Waiting:
    """`command` None: it waits until all that was in the log before is applied. `content`: becomes the command's body.
    `owed`: sent until it lands; `kept`: on disk until then."""

    command: Any
    done: asyncio.Future[Any]
    content: bytes | None = None
    owed: bool = False
    kept: bool = False
    is_sent: bool = False

    @property
    def num_bytes(self) -> int:
        return 0 if self.content is None else len(self.content)


class Replicated:
    """`name`: of the state, for the log. `wait_s`: how long a command is sent again; default: `WAIT_S`. `store`: its
    owner closes it, after `close`."""

    def __init__(
        self,
        command_log: CommandLog,
        machine: Machine,
        hooks: Hooks,
        store: SharedStore,
        name: str,
        wait_s: float | None = None,
    ) -> None:
        self._wait_s = wait_s
        self._log, self._machine, self._hooks, self._store, self._name = command_log, machine, hooks, store, name
        self._life, self._number = secrets.token_hex(8), 0
        self._place = BEGIN
        self._ahead_s = 0.0
        self._waiting: deque[_Waiting] = deque()
        self._num_owed = 0
        self._wake = asyncio.Event()
        self._loops, self._shielded = Supervisor(), ShieldedTasks()
        self._unnamed: list[str] = []
        self._closing = False

    async def open(self) -> None:
        """Reads what the gateways have made so far, and begins to follow it."""
        await self._restore()
        await self._exchange([])
        self._loops.keep_running(self._follow, self._name)

    async def close(self) -> None:
        """Waits for what is being sent, as long as the store takes it."""
        self._closing = True
        owed = [waiting.done for waiting in self._waiting if waiting.owed]
        if owed and not self._store.failure:
            await asyncio.wait(owed, timeout=CLOSE_WAIT_S)
        await self._loops.close()
        await self._shielded.drain()
        for waiting in self._waiting:
            _refuse(waiting, Unavailable("the gateway ends", hint="send the same request to another one"))

    def now(self) -> float:
        """Unix time in seconds, by the store's clock."""
        return unix_s() + self._ahead_s

    def check(self) -> None:
        self._store.check()

    async def synced(self) -> None:
        """Nothing to wait for: what was answered is synced."""

    async def run(self, command: Any, content: bytes | None = None) -> Any:
        """The command's answer, or what it was refused with. Unavailable: in doubt, and its lease is ended."""
        return await self._send(_Waiting(command, asyncio.get_running_loop().create_future(), content))

    async def look(self) -> None:
        """Returns once this gateway has applied what was in the log."""
        await self._send(_Waiting(None, asyncio.get_running_loop().create_future()))

    def owe(self, command: Any, content: bytes | None = None, *, kept: bool = False) -> asyncio.Future[Any]:
        """The command lands in any case, in the order in which it is owed, also if nobody waits for it. `kept`: on disk
        until it landed, by a caller who bounds what waits."""
        waiting = _Waiting(command, asyncio.get_running_loop().create_future(), content, owed=True, kept=kept)
        if not kept and self._num_owed >= OWED_MAX:
            waiting.done.set_exception(self._too_many(self._num_owed))
            waiting.done.exception()
            return waiting.done
        self._num_owed += not kept
        self._queue(waiting)
        return waiting.done

    async def bodies(self, bodies: Sequence[Body]) -> list[bytes | None]:
        return await self._log.read(bodies, wait_s=WAIT_S)

    async def _send(self, waiting: _Waiting) -> Any:
        if len(self._waiting) >= WAITING_MAX:
            raise self._too_many(len(self._waiting))
        self._queue(waiting)
        return await waiting.done

    def _queue(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._wake.set()

    def _too_many(self, number: int) -> Unavailable:
        why = self._store.failure or "it is slow"
        return Unavailable(f"{number} requests wait for {self._store.address}: {why}", hint="try again")

    # -- the log

    async def _follow(self) -> None:
        """Sends what waits, and applies what comes, until cancelled."""
        while True:
            if not self._waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_S):
                        await self._wake.wait()
            self._wake.clear()
            batch, failed = self._next_batch(), False
            error: LaminarError = Unavailable("the request is in doubt", hint="send the same request again")
            try:
                await self._exchange(batch)
            except LaminarError as e:  # the store's room has logged it, and shows it
                error, failed = e, True
            finally:
                self._settle_rest(batch, error)
            if failed:
                await asyncio.sleep(FOLLOW_S)

    def _next_batch(self) -> list[_Waiting]:
        batch, num_bytes = list[_Waiting](), 0
        while self._waiting and len(batch) < BATCH_MAX and num_bytes < BATCH_BYTES_MAX:
            batch.append(self._waiting.popleft())
            num_bytes += batch[-1].num_bytes
        return batch

    def _settle_rest(self, batch: Sequence[_Waiting], error: LaminarError) -> None:
        """What has no outcome: it is owed still, or in doubt."""
        rest = [waiting for waiting in batch if not waiting.done.done()]
        self._waiting.extendleft(waiting for waiting in reversed(rest) if waiting.owed)
        for waiting in rest:
            if not waiting.owed:
                _refuse(waiting, error)
                if waiting.is_sent and (undo := self._machine.undo(waiting.command)) is not None:
                    self.owe(undo)

    async def _exchange(self, batch: Sequence[_Waiting]) -> None:
        """Sends a batch, and applies the log up to its end as it is then."""
        sent = [waiting for waiting in batch if waiting.command is not None]
        patient = not self._closing and any(not waiting.owed for waiting in batch)
        wait_s = 0.0 if not patient else WAIT_S if self._wait_s is None else self._wait_s
        self._number += bool(sent)
        request = await self._batch(sent, wait_s)
        found = await self._append(request, sent, wait_s)
        end = found.last
        while True:
            self._ahead_s = found.unix_s - unix_s()
            await self._apply(found.logged, dict(enumerate(sent)), wait_s)
            if self._place.position >= end:
                break
            found = await self._append(Batch(self._life, self._number), (), wait_s)
        for waiting in batch:
            if waiting.command is None and not waiting.done.done():
                waiting.done.set_result(None)
        self._drop_unnamed()
        await self._keep_snapshot(found)

    async def _append(self, batch: Batch, sent: Sequence[_Waiting], wait_s: float) -> Exchanged:
        for _ in range(RESTARTS_MAX):
            for waiting in sent:
                waiting.is_sent = True
            try:
                found = await self._log.exchange(self._place, batch, wait_s=wait_s)
            except NotFound as e:  # the store has lost a body since it was put
                log.info("%s: %s", self._store.address, e)
                batch = await self._batch(sent, wait_s)
                continue
            if found.proven:
                return found
            log.warning("%s is read anew from %s", self._name, self._store.address)
            await self._restore()
        raise Unavailable(f"{self._name} is replaced all the time at {self._store.address}", hint="try again")

    async def _batch(self, sent: Sequence[_Waiting], wait_s: float) -> Batch:
        """With what the commands need: few bytes go along, and more are put before."""
        commands: list[bytes] = []
        bodies: list[tuple[Body, bytes]] = []
        for waiting in sent:
            if waiting.content is not None:
                bodies.append((self._body("b", waiting.content), waiting.content))
                waiting.command = msgspec.structs.replace(waiting.command, body=bodies[-1][0].name)
            commands.append(msgspec.msgpack.encode(waiting.command))
            if len(commands[-1]) > REPLY_BYTES_MAX // 2:
                bodies.append((self._body("c", commands[-1]), commands[-1]))
                commands[-1] = msgspec.msgpack.encode((bodies[-1][0].name, bodies[-1][0].num_parts))
        needs = [body for body, _ in bodies]
        if sum(len(content) for _, content in bodies) <= ALONG_BYTES_MAX:
            return Batch(self._life, self._number, commands, needs, bodies)
        await asyncio.gather(*(self._log.put(body, content, wait_s=wait_s) for body, content in bodies))
        return Batch(self._life, self._number, commands, needs)

    def _body(self, kind: str, content: bytes) -> Body:
        return Body(f"{kind}{int(self.now()):x}-{secrets.token_hex(8)}", len(parts_of(content)))

    async def _apply(self, logged: Sequence[Logged], sent: Mapping[int, _Waiting], wait_s: float) -> None:
        if not logged:
            return
        commands = [self._machine.decode(await self._command(one, wait_s)) for one in logged]
        timed = [Timed(command, one.unix_s) for command, one in zip(commands, logged, strict=True)]
        outcomes = await self._machine.apply(timed)
        self._place = logged[-1].place
        for one, command, outcome in zip(logged, commands, outcomes, strict=True):
            mine = one.life == self._life
            if mine:
                self._note_unnamed(command, outcome)
            self._hooks.applied(command, outcome, mine)
            if mine and one.number == self._number and one.at in sent:
                self._settle(sent[one.at], outcome)

    async def _command(self, logged: Logged, wait_s: float) -> bytes:
        """Also of one that is too large for a reply: an array (msgpack) of its body's name and number of parts."""
        if logged.command[0] >> 4 != 0x9:
            return logged.command
        body = Body(*decode_msgpack(logged.command, tuple[str, int]))
        [found] = await self._log.read([body], wait_s=wait_s)
        if found is None:
            raise Unavailable(f"{self._store.address} lacks the command {body.name}", hint="restore the store")
        return found

    def _settle(self, waiting: _Waiting, outcome: Outcome) -> None:
        self._num_owed -= waiting.owed and not waiting.kept
        if waiting.done.done():
            return
        if isinstance(outcome, Effect):
            waiting.done.set_result(outcome.answer)
        else:
            waiting.done.set_exception(outcome)
            waiting.done.exception()  # nobody may wait for it any more

    def _note_unnamed(self, command: Any, outcome: Outcome) -> None:
        """Bodies that this gateway's commands have ended the name of, or never gave one."""
        unnamed = list(outcome.unnamed) if isinstance(outcome, Effect) else []
        if body := getattr(command, "body", ""):
            unnamed.append(body)
        self._unnamed += [name for name in unnamed if not self._machine.keeps(name)]

    def _drop_unnamed(self) -> None:
        if self._unnamed:
            names, self._unnamed = self._unnamed, []
            self._shielded.start(self._drop(names), f"{self._name}-drop")

    async def _drop(self, names: Sequence[str]) -> None:
        with contextlib.suppress(Unavailable):  # whoever writes a snapshot finds them
            await self._log.drop(names)

    # -- the snapshot

    async def _restore(self) -> None:
        for _ in range(RESTARTS_MAX):
            snapshot = await self._log.snapshot()
            dumped: Sequence[bytes] = ()
            if snapshot.body is not None:
                [content] = await self._log.read([snapshot.body], wait_s=WAIT_S)
                if content is None:
                    continue  # it was replaced meanwhile
                dumped = decode_msgpack(content, list[bytes])
            await self._machine.restore(dumped)
            self._place = snapshot.place
            self._hooks.restored()
            return
        raise Unavailable(f"the snapshot of {self._name} is replaced all the time", hint="try again")

    async def _keep_snapshot(self, found: Exchanged) -> None:
        if found.since < SNAPSHOT_COMMANDS or self._place.position < found.last:
            return
        place = self._place
        content = msgspec.msgpack.encode(list(await self._machine.dump()))
        body = self._body("s", content)
        await self._log.put(body, content, wait_s=WAIT_S)
        await self._log.keep(place, body)
        log.info("%s is written down whole in %s after %d commands", self._name, self._store.address, found.since)
        kept = await self._log.snapshot()
        old = kept.kept_since_unix_s - UNNAMED_S
        named = kept.body.name if kept.body is not None else ""
        names = [name for name in await self._log.names() if name != named and _made_at(name) < old]
        await self._log.drop([name for name in names if not self._machine.keeps(name)])


def _made_at(name: str) -> float:
    """When a body was put."""
    return float(int(name[1:].partition("-")[0], 16))


def _refuse(waiting: _Waiting, error: LaminarError) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)
        waiting.done.exception()  # nobody may wait for it any more


def shared(store: SharedStore, room: str) -> Ordering:
    """The order of the log which gateways share in this store. `room`: of the state."""
    return lambda machine, hooks: Replicated(store.log(room), machine, hooks, store, room)
