"""Connections to one engine, kept for reuse: event streams, responses that are passed on, and GETs.

aiohttp's client reads a stream through a buffer, a timer per read and three coroutines per line. Here the callback that
read whole events hands them over itself (`Events.deliver`), down to the client's response.

- leaving a stream before it was called complete closes its connection, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from gateway.engines.base import StreamCut, Tls, system_tls
from gateway.engines.http1 import Connection

CONNECT_TIMEOUT_S = 5.0
IDLE_KEPT_S = 3.0
"""Servers close idle connections (uvicorn's after 5 s): one that is younger is not about to be."""
IDLE_MAX = 256
EVENTS_AT_ONCE_MAX = 32
"""Handed over together at most: between two batches the taker may ask to wait."""


class Whole(NamedTuple):
    """A response that was read to its end. `location`: where a redirect leads."""

    status: int
    body: bytes
    location: str


class Wire:
    """Connections for streams from one server. `stall_timeout_s`: silence for longer is a cut. `tls`: for https."""

    def __init__(self, url: str, *, stall_timeout_s: float, tls: Tls = system_tls) -> None:
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self.base = parts.path.rstrip("/")
        self._tls = tls if parts.scheme == "https" else None
        common = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._head, self._passed_head = f"{common}Accept: text/event-stream\r\n", f"{common}Accept: */*\r\n"
        self._get_head = f"Host: {parts.netloc}\r\nAccept: */*\r\n"
        self._stall_timeout_s = stall_timeout_s
        self._idle: deque[tuple[Connection, float]] = deque()
        self._busy: set[Connection] = set()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def close(self) -> None:
        """Cuts every stream; sockets are closed when this returns."""
        for connection in [*self._busy, *(idle for idle, _ in self._idle)]:
            connection.cut(StreamCut("reset", f"{self._url} broke the stream: the engine was taken out"))
        self._idle.clear()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next round

    @asynccontextmanager
    async def post(self, path: str, body: bytes, traceparent: str = "") -> AsyncIterator[Events]:
        """The data of each event, up to and without `[DONE]`. Raises StreamCut, or Refused."""
        trace = f"traceparent: {traceparent}\r\n" if traceparent else ""
        connection = self._idle_one() or await self._connect()
        self._busy.add(connection)
        try:
            head = f"POST {self.base}{path} HTTP/1.1\r\n{self._head}{trace}Content-Length: {len(body)}\r\n\r\n"
            connection.send(head.encode() + body, stall_timeout_s=self._stall_timeout_s)
            await connection.answered()
            events = Events(connection)
            yield events
            if events.is_complete:  # its last bytes are still to come: the connection is kept once they came
                connection.end(lambda: self._release(connection))
        finally:
            if not connection.ending:
                self._release(connection)

    async def pass_on(self, path: str, body: bytes, *, stall_timeout_s: float) -> Passed:
        """Any response, whatever its status, as bytes; it has to be closed. Raises StreamCut.

        `stall_timeout_s`: instead of the wire's, since a response that is not streamed is silent until it is whole.
        """
        connection = self._idle_one() or await self._connect()
        self._busy.add(connection)
        head = f"POST {self.base}{path} HTTP/1.1\r\n{self._passed_head}Content-Length: {len(body)}\r\n\r\n"
        connection.send(head.encode() + body, stall_timeout_s=stall_timeout_s, passes=True)
        return Passed(connection, self._release)

    async def get(self, path: str, *, bytes_max: int) -> Whole:
        """A whole response. Raises StreamCut, and ValueError for one whose body is longer.

        A kept connection may break before the first byte, because the server was about to close it: then the GET is
        sent again on a new one.
        """
        request = f"GET {path} HTTP/1.1\r\n{self._get_head}\r\n".encode()
        kept = self._idle_one()
        if kept is not None:
            try:
                return await self._whole(kept, request, bytes_max, self._stall_timeout_s)
            except StreamCut as e:
                if e.reason != "reset" or kept.status:
                    raise
        return await self._whole(await self._connect(), request, bytes_max, self._stall_timeout_s)

    async def call(self, path: str, body: bytes | None, *, bytes_max: int, silence_s: float) -> Whole:
        """A whole response to a POST on a connection of its own: vLLM closes one after a 500, so the next call on it
        would fail, and a call that changes state must not be sent again. `silence_s`: as of a load, for long."""
        kind = "" if body is None else "Content-Type: application/json\r\n"
        head = (
            f"POST {path} HTTP/1.1\r\n{self._get_head}{kind}Content-Length: {len(body or b'')}\r\nConnection: close\r\n"
        )
        request = head.encode() + b"\r\n" + (body or b"")
        return await self._whole(await self._connect(), request, bytes_max, silence_s)

    async def _whole(self, connection: Connection, request: bytes, bytes_max: int, stall_timeout_s: float) -> Whole:
        self._busy.add(connection)
        connection.send(request, stall_timeout_s=stall_timeout_s, passes=True)
        answer = Passed(connection, self._release)
        try:
            status, _ = await answer.head()
            body = bytearray()
            while some := await answer.some():
                body += some
                if len(body) > bytes_max:
                    raise ValueError(f"an answer of more than {bytes_max} bytes")
            return Whole(status, bytes(body), connection.location.decode("latin-1"))
        finally:
            answer.close()

    def _release(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection.reusable and len(self._idle) < IDLE_MAX:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()

    def _idle_one(self) -> Connection | None:
        """The youngest idle connection that is open; those that are too old are closed."""
        now = time.monotonic()
        while self._idle and (self._idle[0][1] < now - IDLE_KEPT_S or not self._idle[0][0].reusable):
            self._idle.popleft()[0].close()
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._url), self._host, self._port, ssl=self._tls() if self._tls else None
                )
        except (OSError, TimeoutError, ValueError) as e:  # ValueError: a host that cannot be
            reason = str(e) or f"no connection within {CONNECT_TIMEOUT_S:g} s"
            raise StreamCut("refused", f"{self._url} does not accept connections: {reason}") from e
        return connection


TETHER_READ_BYTES = 1 << 12
"""Size of the pieces in which unrequested bytes on a tether are read and dropped."""

Take = Callable[[list[bytes]], Awaitable[object] | None]
"""Takes events that came together; returns an awaitable if the next ones have to wait for it, else None."""


class Events:
    """The data of each event, as it comes: `deliver`, or iterate. Raises StreamCut."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_complete = False

    @property
    def paused(self) -> bool:
        """Whether the engine is held back until the events that wait here are taken."""
        return self._connection.paused

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while await self._connection.some():
            while (data := self._next()) is not None:
                yield data
            if self.is_complete:
                return

    async def deliver(self, take: Take) -> None:
        """Hands over every event, up to `[DONE]` or `complete()`.

        While `take` returns None, events go from the socket's read callback straight to it: `push` runs within that
        callback, and this task sleeps in `connection.more`. Once `take` returns an awaitable, `push` refuses more, the
        task wakes, awaits it here, and goes on with the events that waited meanwhile. So a token costs no switch of
        tasks, and a slow client holds back its own stream alone.
        """
        connection = self._connection
        held: Awaitable[object] | None = None

        def push() -> bool:
            nonlocal held
            while held is None and connection.waiting and (events := self._some()):
                held = take(events)
            return held is not None or self.is_complete

        while True:
            if connection.waiting:
                push()
            if held is not None:
                waited, held = held, None
                await waited
            elif self.is_complete or (connection.over and not connection.waiting):
                return
            else:
                await connection.more(push)

    def _some(self) -> list[bytes]:
        waiting = self._connection.waiting
        if len(waiting) == 1 and waiting[0] != b"[DONE]" and not self.is_complete:
            return [waiting.popleft()]
        found: list[bytes] = []
        while len(found) < EVENTS_AT_ONCE_MAX and (data := self._next()) is not None:
            found.append(data)
        return found

    def _next(self) -> bytes | None:
        waiting = self._connection.waiting
        if not waiting or self.is_complete:
            return None
        if waiting[0] == b"[DONE]":
            self.is_complete = True
            return None
        return waiting.popleft()

    def complete(self) -> None:
        """The response is whole, whatever may still follow: its connection may serve another request."""
        self.is_complete = True


class Passed:
    """Implements `gateway.engines.base.PassedAnswer`."""

    def __init__(self, connection: Connection, release: Callable[[Connection], None]) -> None:
        self._connection, self._release = connection, release

    @property
    def paused(self) -> bool:
        """Whether the engine is held back until the bytes that wait here are taken."""
        return self._connection.paused

    async def head(self) -> tuple[int, str]:
        await self._connection.answered()
        return self._connection.status, self._connection.content_type

    async def some(self) -> bytes:
        connection = self._connection
        if not await connection.some():
            return b""
        waiting = connection.waiting
        data = waiting.popleft() if len(waiting) == 1 else b"".join(waiting)
        waiting.clear()
        connection.waiting_bytes = 0
        return data

    def cut(self, cut: StreamCut) -> None:
        self._connection.cut(cut)

    def close(self) -> None:
        self._release(self._connection)


async def until_broken(url: str, tls: Tls = system_tls) -> bool:
    """Holds a *tether*: an idle connection to an engine. Returns True once it breaks, False when there was none.

    The kernel closes the connection together with the engine's process, so a death or a restart is known within
    milliseconds: before the next turn is placed there, and not at the next poll. It proves nothing else. A proxy may
    close idle connections of an engine that lives, and a host that vanished closes none; so the engine is only
    suspected until it was polled.
    """
    parts = urlsplit(url)
    context = tls() if parts.scheme == "https" else None
    port = parts.port or (443 if context else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    except (OSError, TimeoutError, ValueError):  # ValueError: a host that cannot be
        return False
    try:
        while await reader.read(TETHER_READ_BYTES):
            pass
    except OSError:
        pass  # a reset ends the connection as well as a close
    finally:
        writer.close()
    return True
