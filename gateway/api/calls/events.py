"""Responses whose HTTP status is decided as late as possible: a server-sent event stream, or one body that takes long.

Invariants:
- nothing is sent before the first event or the body, so an error until then has an HTTP status of its own;
- once an engine has taken the turn (`begin`), `KEEP_ALIVE_S` of silence are followed by a filler, headers included: a
  comment between events, or a space before the body's JSON. A prefill or a move then looks alive to the client and to
  every proxy between;
- before that, nothing is sent for `QUIET_S_MAX`: a request that no engine takes in time gets 429 with Retry-After;
- an error after the status line ends an event stream with an error event, and breaks the connection where JSON is
  expected. The client's retry gets the error's own status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Self

from aiohttp import web

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment of server-sent events: every client skips it, and proxies see a living connection."""
KEEP_ALIVE_S = 15.0
"""Period of the check for silence: a filler follows after one to two periods. Proxies commonly wait for 60 s."""
QUIET_S_MAX = 75.0
"""Beyond the 60 s that a turn waits for an engine by default; longer waits are kept alive from then on."""


class KeptAlive:
    """A response that is kept alive with `filler` while the client is sent nothing else."""

    filler: bytes

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request, self._protocol = request, request.protocol
        self.response = web.StreamResponse(headers=headers)
        self._transport: asyncio.Transport | None = None  # once the status line is out, where chunks are ours to write
        self._starting = asyncio.Lock()  # a filler and an event may both find that the head has to be sent
        self._sent = False  # anything, in this period
        self._begun = False
        self._ended = False
        self._opened_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None  # a handle, not a task: thousands of responses wait at once
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        filling, self._filling = self._filling, None
        if filling is None:
            return
        filling.cancel()  # it may still wait for a client that does not read
        await asyncio.wait([filling])
        failure = None if filling.cancelled() else filling.exception()
        if failure is not None and not isinstance(failure, ConnectionError):  # a client that left is no failure
            raise failure

    @property
    def started(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    def set_header(self, name: str, value: str) -> None:
        """Sets a header that is known late; without effect once the status line is out."""
        if not self.started:
            self.response.headers[name] = value

    def begin(self) -> None:
        """Fillers may be sent from now on: the status can only be 200, or a connection that breaks."""
        self._begun = True

    def send_soon(self, data: bytes) -> Awaitable[None] | None:
        """Sends now; returns an awaitable when nothing was sent before, or when the client is slow.

        Raises ConnectionError when the client is gone.
        """
        transport = self._transport
        if transport is None:
            return self.send(data)
        if transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._sent = True
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self._drained() if self._protocol.writing_paused else None

    async def _drained(self) -> None:
        writer = await self.response.prepare(self._request)  # returns the writer that it has
        assert writer is not None
        await writer.drain()

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError when the client is gone."""
        if not self.response.prepared:
            async with self._starting:
                if not self.response.prepared:
                    await self.response.prepare(self._request)
        self._sent = True
        await self.response.write(data)
        if self._transport is None and self.response.headers.get("Transfer-Encoding") == "chunked":
            self._transport = self._request.transport

    async def end(self) -> web.StreamResponse:
        """Raises ConnectionError when the client is gone."""
        self._ended = True  # a filler behind the last chunk would be read as the beginning of the next response
        await self.response.write_eof()
        return self.response

    async def end_with(self, data: bytes) -> web.StreamResponse:
        """Sends `data` and ends, unless the client is gone."""
        try:
            await self.send(data)
            return await self.end()
        except ConnectionError:  # nobody is left to notify
            return self.response

    def cut(self) -> web.StreamResponse:
        """Aborts the connection, so that the client takes what it has for no complete response."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self.response

    async def fail(self, error: bytes) -> web.StreamResponse:
        """Ends a response whose status line is out so that no client takes it for complete. `error`: the last event,
        where it is a stream."""
        return self.cut()

    @property
    def _fills(self) -> bool:
        """Whether a filler may be sent now."""
        return not self._ended and (self._begun or time.monotonic() - self._opened_at > QUIET_S_MAX)

    def _arm(self) -> None:
        self._sent = False
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._check_silence)

    def _check_silence(self) -> None:
        """Every `KEEP_ALIVE_S`, until a filler failed: `__aexit__` raises why."""
        silent, filling = not self._sent, self._filling
        if filling is not None and filling.done() and filling.exception() is not None:
            return
        self._arm()
        blocked = filling is not None and not filling.done()  # by a client that does not read
        if silent and not blocked and self._fills:
            self._filling = asyncio.create_task(self._fill(), name="keep-alive")

    async def _fill(self) -> None:
        if self._fills:  # a round of the event loop has passed since that was decided
            await self.send(self.filler)
            self._sent = False


class LateBody(KeptAlive):
    """`async with LateBody(request, headers) as late: ... return await late.answer(body)`: one JSON body."""

    filler = b" "

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        super().__init__(request, {**headers, "Content-Type": "application/json; charset=utf-8"})

    async def answer(self, body: bytes) -> web.StreamResponse:
        if not self.started:
            return web.Response(body=body, headers=self.response.headers)
        await self.send(body)
        return await self.end()


class EventStream(KeptAlive):
    """`async with EventStream(request, headers) as events`: `send` events, then `end`."""

    filler = KEEP_ALIVE

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        super().__init__(request, {**headers, **kind})

    async def fail(self, error: bytes) -> web.StreamResponse:
        return await self.end_with(error)
