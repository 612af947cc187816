"""One Redis that several gateways share, as this gateway uses it: its checks, and scripts that run until they landed.

A connection of before a loss carries no call after it: it may have ended without a word. Keys are
`{laminar:NAMESPACE}:ROOM:...`; what a room keeps there is documented with the room. The package `redis` is imported
only when a gateway connects: it is an optional extra.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.core.addresses import RedisAddress
from gateway.log.attempts import LAYOUT, WAIT_S, Attempts, Namespace
from gateway.log.durability import SETTINGS, check_role, check_settings, found_in_info
from protos.errors import InvalidRequest
from protos.extras import install

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.connection import AbstractConnection

log = logging.getLogger(__name__)

Words = tuple[str | bytes | int, ...]
"""A command with its arguments."""

CONNECTIONS_MAX = 16
REPLY_TIMEOUT_S = 5.0
"""For one reply; a Redis that is silent for longer is treated as one that went away."""
CONFIRM_MS = 1000
"""How long a write waits for a replica before it is sent again."""

_CLAIM = """
local found = redis.call('HMGET', KEYS[1], 'layout', 'model', 'vocabulary', 'epoch')
if found[1] then return found end
redis.call('HSET', KEYS[1], 'layout', ARGV[1], 'model', ARGV[2], 'vocabulary', ARGV[3], 'epoch', ARGV[4])
return {ARGV[1], ARGV[2], ARGV[3], ARGV[4]}
"""
"""Makes the namespace, unless it is there. `epoch`: a random name; another one later means that all was lost."""

_CLOSED = "the handler is closed"
"""How uvloop's RuntimeError ends for what is written to a connection that it has closed."""

_PASSING = frozenset({"MISCONF", "NOREPLICAS", "BUSY", "UNKILLABLE"})
"""Codes of replies that speak of Redis' state, not of the command, and that the package has no class for."""


class Unconfirmed(OSError):
    """It is written at this primary alone, which a failover may lose."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script. KEYS[1] is the prefix of the room's keys; it has to be idempotent: it may run twice."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


class RedisServer(Attempts):
    """`async with await RedisServer.connect(...)`, or `close`."""

    def __init__(self, address: RedisAddress, namespace: Namespace, *, accept_unchecked: bool = False) -> None:
        super().__init__(address, namespace, accept_unchecked=accept_unchecked)
        self._clients = [_client(address, *host) for host in address.hosts]
        self._client = self._clients[0]
        self._connections = asyncio.Semaphore(CONNECTIONS_MAX)  # further calls wait for one
        self._run_id: str | None = None  # of the process that was checked last
        self._replicated = False  # it has had a replica

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    def prefix(self, room: str) -> str:
        """Of the room's keys. In braces, so that a proxy or a cluster keeps a namespace's keys together."""
        return f"{{laminar:{self.namespace.name}}}:{room}"

    async def call(
        self,
        script: Script,
        room: str,
        *arguments: str | bytes | int,
        wait_s: float = WAIT_S,
        confirm: bool = False,
        before: Sequence[Words] = (),
    ) -> Any:
        """The script's reply, with strings as bytes. Repeated while Redis is away, for `wait_s` at most (0: one
        attempt); then Unavailable. `before`: idempotent commands that are sent before it, over the same connection.

        `confirm`: the script writes, and returns once a replica has that, where this primary has had one. A primary
        whose replica is gone confirms nothing any more: it may be the one that a failover has left behind."""

        async def run() -> Any:
            return await self._run(script, self.prefix(room), *arguments, confirm=confirm, before=before)

        return await self.attempt(run, wait_s)

    async def send(self, *commands: Words, wait_s: float = WAIT_S) -> list[Any]:
        """The replies to idempotent commands, which are sent together over one connection. Each reply has a deadline of
        its own: so many small ones may take long together. Repeated as `call` is."""

        async def run() -> list[Any]:
            return await self._send(commands)

        return await self.attempt(run, wait_s) if commands else []

    async def _run(
        self, script: Script, *arguments: str | bytes | int, confirm: bool = False, before: Sequence[Words] = ()
    ) -> Any:
        from redis.exceptions import NoScriptError

        key, *rest = arguments
        async with self._connections:
            try:
                return await self._confirmed([*before, ("EVALSHA", script.sha, 1, key, *rest)], confirm=confirm)
            except NoScriptError:  # a new Redis, or one that was restarted: this loads it, too
                return await self._confirmed([*before, ("EVAL", script.text, 1, key, *rest)], confirm=confirm)

    async def _confirmed(self, commands: Sequence[Words], *, confirm: bool) -> Any:
        """The last one's reply. WAIT counts the replicas that have what was written on its own connection."""
        if not confirm and len(commands) == 1:
            return await self._command(*commands[0])
        wanted = int(self._replicated)
        *_, found, replicas = await self._sent_together([*commands, ("WAIT", wanted, wanted * CONFIRM_MS)])
        if replicas < wanted:
            raise Unconfirmed(f"no replica has confirmed it within {CONFIRM_MS / 1000:g} s")
        self._replicated |= replicas > 0
        return found

    async def _send(self, commands: Sequence[Words]) -> list[Any]:
        async with self._connections:
            return await self._sent_together(commands)

    async def _sent_together(self, commands: Sequence[Words]) -> list[Any]:
        pool = self._client.connection_pool
        connection = await _sent(pool.get_connection())  # type: ignore[no-untyped-call]
        try:
            found: list[Any] = await _sent(_replies(connection, commands))
        finally:
            await pool.release(connection)
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found

    async def _command(self, *words: str | bytes | int) -> Any:
        return await _sent(self._client.execute_command(*words))  # type: ignore[no-untyped-call]

    async def _connect(self) -> None:
        """The first host that passes, beginning with the one that had passed last."""
        at = self._clients.index(self._client)
        error: Exception | None = None
        for client in (*self._clients[at:], *self._clients[:at]):
            self._client = client
            try:
                await client.connection_pool.disconnect(inuse_connections=False)
                return await self._check_settings()
            except Exception as e:
                if not isinstance(e, InvalidRequest) and not self._passes(e):
                    raise
                error = error or e
        assert error is not None
        raise error

    async def _check_settings(self) -> None:
        info = await _sent(self._client.info())
        where = str(self.address)
        check_role(where, info)
        if info.get("run_id") != self._run_id:
            self._run_id, self._replicated = info.get("run_id"), False
        replicas = (value for name, value in info.items() if name.startswith("slave") and isinstance(value, dict))
        self._replicated |= any(replica.get("state") == "online" for replica in replicas)
        found = found_in_info(info)
        forbidden = await self._read_settings(found)
        self._unchecked = check_settings(where, found, accept_unchecked=self._accept_unchecked, forbidden=forbidden)

    async def _read_settings(self, found: dict[str, str]) -> str:
        """Adds what CONFIG GET shows; returns why it is refused."""
        from redis.exceptions import ConnectionError as Lost
        from redis.exceptions import ResponseError

        for setting in SETTINGS:
            try:
                reply = await self._command("CONFIG GET", setting.name)
            except Lost:
                raise
            except ResponseError as e:
                if self._passes(e):
                    raise
                return str(e)
            pairs = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
            for name, value in pairs.items():
                found[_text(name)] = _text(value)
        return "it answers nothing"

    async def _claim(self) -> None:
        key, epoch = f"{self.prefix('layout')}", secrets.token_hex(8)
        reply = await self._run(Script(_CLAIM), key, LAYOUT, self.namespace.model, self.namespace.vocabulary, epoch)
        self._claimed(*map(_text, reply))

    def _passes(self, error: Exception) -> bool:
        return _passes(error)


async def _sent(work: Awaitable[Any]) -> Any:
    """The reply to a command of the package, unless this task was cancelled meanwhile. Raises what the package raises,
    and ConnectionResetError where it meets a connection that was closed before it had written.

    The package writes a command under `asyncio.wait_for`, which in Python 3.11 returns the result of work that ends
    just when its caller is cancelled, and forgets the cancellation. A loop of calls would then never end. For a
    connection that broke in its handshake uvloop has a RuntimeError, which the package passes on.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await work
    except RuntimeError as e:
        if _CLOSED not in str(e):
            raise
        raise ConnectionResetError("it closed the connection before a command was written") from e
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


async def _replies(connection: AbstractConnection, commands: Sequence[Words]) -> list[Any]:
    """Errors that are replies stand among them. A connection that has not read all is closed."""
    from redis.exceptions import ResponseError

    found: list[Any] = []
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
        for _ in commands:
            try:
                found.append(await connection.read_response())
            except ResponseError as e:
                found.append(e)
        return found
    finally:
        if len(found) < len(commands):
            await connection.disconnect(nowait=True)


def _client(address: RedisAddress, host: str, port: int) -> Redis:
    try:
        from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as e:
        raise InvalidRequest(
            f"{address} needs the Python package `redis`, which is not installed",
            hint=f"install it: {install('redis')}",
        ) from e
    pool = ConnectionPool(
        connection_class=SSLConnection if address.tls else Connection,
        host=host,
        port=port,
        db=int(address.name),
        username=address.user,
        password=address.password,
        socket_timeout=REPLY_TIMEOUT_S,
        socket_connect_timeout=REPLY_TIMEOUT_S,
        socket_keepalive=True,
        client_name="laminar-gateway",
        # With RESP 3 the package asks for notices of maintenance, and then hands out connections that the Redis has
        # closed, such as idle ones beyond its `timeout`.
        protocol=2,
        retry=Retry(NoBackoff(), 0),  # `RedisServer` repeats, and checks a Redis that came back first
    )
    return Redis.from_pool(pool)


def _passes(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    from redis import exceptions as known

    # MasterDownError is a ClusterDownError, BusyLoadingError a ConnectionError.
    states = known.ReadOnlyError, known.OutOfMemoryError, known.ClusterDownError, known.TryAgainError
    if isinstance(error, (OSError, known.ConnectionError, known.TimeoutError, *states)):
        return True
    return isinstance(error, known.ResponseError) and str(error).partition(" ")[0] in _PASSING


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
