"""Answers whose HTTP status is decided as late as can be: a server-sent event stream, and one body that takes long.

Invariants:
- nothing is sent before the first event, or the body, so an error until then is an HTTP error;
- once an engine has taken the turn (`begin`), a comment is sent after `KEEP_ALIVE_S` of silence, or a space before the
  body's JSON, headers included: a prefill or a move never looks dead to a client or to what stands between;
- before that, nothing for `QUIET_S_MAX`: a queue that is too long is told as 429 with Retry-After;
- an error after that is never said with a status of 200 where JSON is expected: the connection is cut, and the client's
  retry gets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Self

from aiohttp import web

from gateway.api.openai.shapes import KEEP_ALIVE
from gateway.ports import KEEP_ALIVE_S

QUIET_S_MAX = 75.0
"""Beyond the 60 s that a turn waits for an engine by default; longer waits are kept alive from then on."""


class _KeptAlive:
    """Sends `filler` whenever nothing was sent for `KEEP_ALIVE_S`."""

    filler: bytes

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request, self._protocol = request, request.protocol
        self.response = web.StreamResponse(headers=headers)
        self._transport: asyncio.Transport | None = None  # once the status line is out, where chunks are ours to write
        self._starting = asyncio.Lock()
        self._sent = False
        self._begun = False
        self._opened_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None  # a handle, no task: thousands of answers wait at once
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
        filling.cancel()
        await asyncio.wait([filling])
        failure = None if filling.cancelled() else filling.exception()
        if failure is not None and not isinstance(failure, ConnectionError):  # a client that left is no failure
            raise failure

    @property
    def started(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    def set_header(self, name: str, value: str) -> None:
        """Adds a header that is known late; none once the status line is out."""
        if not self.started:
            self.response.headers[name] = value

    def begin(self) -> None:
        """From now on silence is broken: the answer's status can only be 200, or a connection that breaks."""
        self._begun = True

    def send_soon(self, data: bytes) -> Awaitable[None] | None:
        """Sends now; returns what to wait for when nothing was sent before, or when the client is slow.

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
        writer = await self.response.prepare(self._request)  # the one it has
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
        await self.response.write_eof()
        return self.response

    def _arm(self) -> None:
        self._sent = False
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._look)

    def _look(self) -> None:
        """Every `KEEP_ALIVE_S`, until a filler failed: the end tells why."""
        silent, filling = not self._sent, self._filling
        if filling is not None and filling.done() and filling.exception() is not None:
            return
        self._arm()
        waits = filling is not None and not filling.done()  # for a client that does not read
        if silent and not waits and (self._begun or time.monotonic() - self._opened_at > QUIET_S_MAX):
            self._filling = asyncio.create_task(self._fill(), name="keep-alive")

    async def _fill(self) -> None:
        await self.send(self.filler)
        self._sent = False


class LateBody(_KeptAlive):
    """`async with LateBody(request, headers) as late: ... return await late.answer(body)`: one JSON body."""

    filler = b" "

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        super().__init__(request, {**headers, "Content-Type": "application/json; charset=utf-8"})

    async def answer(self, body: bytes) -> web.StreamResponse:
        if not self.started:
            return web.Response(body=body, headers=self.response.headers)
        await self.send(body)
        return await self.end()

    def cut(self) -> web.StreamResponse:
        """For an error after the status line: the client sees a connection that broke, not an answer."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self.response


class EventStream(_KeptAlive):
    """`async with EventStream(request, headers) as events`: `send` events, then `end`."""

    filler = KEEP_ALIVE

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        super().__init__(request, {**headers, **kind})
