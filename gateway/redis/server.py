"""One Redis that several gateways share, as this gateway uses it.

Invariants:
- nothing is called before the Redis was checked: its durability (`durability`), that it takes writes, and that the
  namespace's layout, model and vocabulary are this gateway's; after each loss of the connection it is checked again;
- a call has landed when it returns. One whose reply was lost is repeated, so every script has to be idempotent;
- a call waits for `wait_s` at most, and then raises Unavailable: what it was for may have landed all the same;
- `failure` is the reason why the last call did not get through; empty while they do. One that began before the last
  check says nothing of the Redis as it is now: it sets none;
- a connection of before a loss carries no call after it: it may have ended without a word.

Keys are `{laminar:NAMESPACE}:ROOM:...`; what a room keeps there is documented with the room.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.redis.address import RedisAddress
from gateway.redis.durability import SETTINGS, check_role, check_settings, found_in_info
from protos.errors import Conflict, InvalidRequest, LaminarError, Unavailable
from protos.extras import install

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

Words = tuple[str | bytes | int, ...]
"""A command with its arguments."""

LAYOUT = 2
"""Of everything below a namespace's prefix. Layouts:
- 2: logs of commands (`gateway.log`);
- 1: experience as keys of their own, and a log of the prompt pool."""
CONNECTIONS_MAX = 16
REPLY_TIMEOUT_S = 5.0
"""For one reply; a Redis that is silent for longer is treated as one that went away."""
WAIT_S = 10.0
"""How long a call is repeated by default."""
RETRY_S = 0.05
"""Before the first repetition; doubled after each, up to `RETRY_MAX_S`."""
RETRY_MAX_S = 1.0

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


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script. KEYS[1] is the prefix of the room's keys; it has to be idempotent: it may run twice."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


@dataclass(frozen=True, slots=True)
class RedisStatistics:
    """`failure`: why calls do not get through now; `failed`: attempts that did not; `connected`: how often the Redis
    was checked, which is at the start and after each loss."""

    address: str
    namespace: str
    failure: str
    failed: int
    connected: int
    unchecked: list[str]


class RedisServer:
    """`async with await RedisServer.connect(...)`, or `close`."""

    def __init__(
        self, client: Redis, address: RedisAddress, namespace: str, model: str, vocabulary: str, accept_unchecked: bool
    ) -> None:
        self._client, self.address, self.namespace = client, address, namespace
        self._model, self._vocabulary, self._accept_unchecked = model, vocabulary, accept_unchecked
        self._lost = True  # the connection, so that the next attempt checks first
        self._checking = asyncio.Lock()
        self._connections = asyncio.Semaphore(CONNECTIONS_MAX)  # further calls wait for one
        self._epoch = ""
        self._unchecked: list[str] = []
        self._failed = 0
        self.failure = ""
        self.connected = 0
        """Grows with each check: what was read before may be older than what a Redis that came back has."""

    @classmethod
    async def connect(
        cls,
        address: RedisAddress,
        *,
        namespace: str = "default",
        model: str = "",
        vocabulary: str = "",
        accept_unchecked: bool = False,
    ) -> RedisServer:
        """Raises InvalidRequest for a Redis that does not keep what it acknowledges, Conflict for a namespace of
        another model, vocabulary or layout, Unavailable when it does not answer."""
        server = cls(_client(address), address, namespace, model, vocabulary, accept_unchecked)
        try:
            await server._attempt(_nothing, 0.0)
        except BaseException:
            await server.close()
            raise
        if server._unchecked:
            log.warning("%s: accepted without a check: %s", address, ", ".join(server._unchecked))
        log.info("connected to %s, namespace %s", address, namespace)
        return server

    async def close(self) -> None:
        await self._client.aclose()

    def prefix(self, room: str) -> str:
        """Of the room's keys. In braces, so that a proxy or a cluster keeps a namespace's keys together."""
        return f"{{laminar:{self.namespace}}}:{room}"

    def check(self) -> None:
        """Raises Unavailable while calls do not get through."""
        if self.failure:
            raise self._unavailable(self.failure)

    def statistics(self) -> RedisStatistics:
        return RedisStatistics(
            str(self.address), self.namespace, self.failure, self._failed, self.connected, self._unchecked
        )

    async def call(self, script: Script, room: str, *arguments: str | bytes | int, wait_s: float = WAIT_S) -> Any:
        """The script's reply, with strings as bytes. Repeated while Redis is away, for `wait_s` at most (0: one
        attempt); then Unavailable."""

        async def run() -> Any:
            return await self._run(script, self.prefix(room), *arguments)

        return await self._attempt(run, wait_s)

    async def send(self, *commands: Words, wait_s: float = WAIT_S) -> list[Any]:
        """The replies to idempotent commands, which are sent together over one connection. Each reply has a deadline of
        its own: so many small ones may take long together. Repeated as `call` is."""

        async def run() -> list[Any]:
            return await self._send(commands)

        return await self._attempt(run, wait_s) if commands else []

    async def _attempt(self, work: Callable[[], Awaitable[Any]], wait_s: float, *, check: bool = True) -> Any:
        from redis.exceptions import RedisError

        deadline, retry_s = time.monotonic() + wait_s, RETRY_S
        while True:
            began = self.connected
            try:
                if check and self._lost:
                    await self._check_once()
                    began = self.connected
                found = await work()
            except (RedisError, OSError) as e:
                if not _passes(e):
                    raise
                error: LaminarError = self._unavailable(self._fail(e, began))
                cause: Exception = e
            except (InvalidRequest, Conflict) as e:
                if not self.connected:
                    raise
                error, cause = self._unavailable(self._fail(e, began)), e  # another one came back: this may be mended
            else:
                if self.failure:
                    log.info("%s answers again", self.address)
                    self.failure = ""
                return found
            if time.monotonic() + retry_s > deadline:
                raise error from cause
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_MAX_S, 2 * retry_s)

    def _fail(self, error: Exception, began: int) -> str:
        self._failed += 1
        failure = str(error) or type(error).__name__
        if began < self.connected:
            return failure
        self._lost = True
        if not self.failure and self.connected:
            log.error("%s: %s; what is to be kept there waits", self.address, failure)
        self.failure = failure
        return failure

    def _unavailable(self, failure: str) -> Unavailable:
        return Unavailable(f"{self.address}: {failure}", hint="try again once this Redis answers")

    async def _run(self, script: Script, *arguments: str | bytes | int) -> Any:
        from redis.exceptions import NoScriptError

        key, *rest = arguments
        async with self._connections:
            try:
                return await self._command("EVALSHA", script.sha, 1, key, *rest)
            except NoScriptError:  # a new Redis, or one that was restarted: this loads it, too
                return await self._command("EVAL", script.text, 1, key, *rest)

    async def _send(self, commands: Sequence[Words]) -> list[Any]:
        async with self._connections, self._client.pipeline(transaction=False) as pipeline:
            for words in commands:
                pipeline.execute_command(*words)
            found: list[Any] = await _sent(pipeline.execute(raise_on_error=False))
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found

    async def _command(self, *words: str | bytes | int) -> Any:
        return await _sent(self._client.execute_command(*words))  # type: ignore[no-untyped-call]

    async def _check_once(self) -> None:
        async with self._checking:
            if self._lost:
                await self._client.connection_pool.disconnect(inuse_connections=False)
                await self._check()

    @classmethod
    async def examine(cls, address: RedisAddress, *, accept_unchecked: bool = False) -> list[str]:
        """As `connect`, without a namespace: changes nothing. Returns the settings that cannot be checked."""
        server = cls(_client(address), address, "", "", "", accept_unchecked)
        try:
            await server._attempt(server._check_settings, 0.0, check=False)
        finally:
            await server.close()
        return server._unchecked

    async def _check(self) -> None:
        await self._check_settings()
        await self._claim()
        self.connected += 1
        self._lost = False

    async def _check_settings(self) -> None:
        info = await _sent(self._client.info())
        where = str(self.address)
        check_role(where, info)
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
                if _passes(e):
                    raise
                return str(e)
            pairs = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
            for name, value in pairs.items():
                found[_text(name)] = _text(value)
        return "it answers nothing"

    async def _claim(self) -> None:
        key, epoch = f"{self.prefix('layout')}", secrets.token_hex(8)
        reply = await self._run(Script(_CLAIM), key, LAYOUT, self._model, self._vocabulary, epoch)
        layout, model, vocabulary, epoch = (_text(value) for value in reply)
        where = f"namespace {self.namespace!r} of {self.address}"
        if layout != str(LAYOUT):
            raise Conflict(
                f"{where} has layout {layout}, and this gateway knows {LAYOUT}",
                hint="start the gateway that wrote it, or give another --redis-namespace",
            )
        if model != self._model:
            raise Conflict(
                f"{where} keeps what model {model!r} generated, not {self._model!r}",
                hint=f"serve --model {model}, or give another --redis-namespace",
            )
        if vocabulary != self._vocabulary:
            raise Conflict(
                f"{where} keeps token ids of another vocabulary",
                hint="give the --tokenizer that they were made with, or another --redis-namespace",
            )
        if self._epoch and epoch != self._epoch:
            log.error("%s has lost all that it kept: it came back empty", where)
        self._epoch = epoch


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


async def _nothing() -> None:
    """What a connection is checked for."""


def _client(address: RedisAddress) -> Redis:
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
        host=address.host,
        port=address.port,
        db=address.db,
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
