"""The HTTP server below the handlers: timeouts of requests, their fair start, and responses to what is no HTTP.

Invariants:
- a head that has begun is whole within `HEAD_TIMEOUT_S`, or its connection is closed with a 408;
- a body that a handler waits for comes at `BODY_BYTES_PER_S_MIN` at least, with `BODY_GRACE_S` to spare, or is refused;
- requests that arrive together begin in several rounds of the event loop, in their order: a thousand at once would hold
  it for half a second, and every stream would stall;
- bytes that are no HTTP get an error in the API's format, and one line in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.api.errors import Handler, TooSlow, error_bytes, error_response, no_http

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 30.0
BODY_GRACE_S = 30.0
BODY_BYTES_PER_S_MIN = 100_000
"""Slower than any link over which a model is of use; a body of 64 MiB may take eleven minutes."""
BODY_LOOK_S = 5.0
BACKLOG = 1024
"""Connections that wait in the kernel to be accepted; beyond that clients try again after a second."""


class Turnstile:
    """Lets one request begin in each round of the event loop, in the order of arrival.

    That spreads all later steps, too: each follows its first step by as many rounds as those of other requests.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._turning = False  # a request began in this round

    def take(self, let_in: Callable[[], None]) -> bool:
        """True: the caller may begin now. False: `let_in` is called in a later round."""
        if self._turning:
            self._waiting.append(let_in)
            return False
        self._turning = True
        self._loop.call_soon(self._next)
        return True

    def _next(self) -> None:
        """A new round."""
        self._turning = bool(self._waiting)
        if self._waiting:
            self._loop.call_soon(self._next)
            self._waiting.popleft()()


class _Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_body", "_head_due", "_held", "_rounds")

    def __init__(self, server: web.Server, *, rounds: Turnstile, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._body: StreamReader | None = None  # of the newest request; it may be answered before its body has come
        self._head_due: asyncio.TimerHandle | None = None
        self._rounds = rounds
        self._held: list[bytes] = []  # of a request that begins in a later round

    def data_received(self, data: bytes) -> None:
        if self._held:
            self._held.append(data)
        elif self._current_request is not None or self._rounds.take(self._let_in):
            self._take(data)
        else:
            self._held.append(data)

    def _let_in(self) -> None:
        held, self._held = self._held, []
        if held and self.transport is not None:
            self._take(b"".join(held))

    def _take(self, data: bytes) -> None:
        """`data` is empty when aiohttp resumes reading after a pause."""
        heads, in_body = self._request_count, self._body is not None and not self._body.is_eof()
        super().data_received(data)
        if self._request_count != heads:
            self._head_came()
            self._body = self._messages[-1][1] if self._messages else None
        elif data and not in_body and self._current_request is None and self._head_due is None:
            self._head_due = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_came()
        self._held.clear()
        super().connection_lost(exc)

    def _head_came(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        self._head_due = None
        if self.transport is None or self._current_request is not None:
            return
        body = error_bytes(TooSlow(f"the request's head was not whole after {HEAD_TIMEOUT_S:g} s"))
        head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        self.force_close()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Without a traceback for a body that fails after its request was answered: aiohttp reads on to its end, and
        whoever reaches the port could fill the log."""
        error = kwargs.get("exc_info")
        if isinstance(error, TooSlow | web.RequestPayloadError | HttpProcessingError):
            log.info("a body failed after its request was answered: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kwargs)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """For a request that never reached a handler: its head is no HTTP."""
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        error = no_http(exc.message if isinstance(exc, HttpProcessingError) else message or "")
        log.info("from %s: %s", request.remote, error)  # without the bytes that the parser quotes: a key may be in them
        response = error_response(error)
        response.force_close()
        return response


class _Server(web.Server):
    """aiohttp's server `made`, with connections of our own class."""

    def __init__(self, made: web.Server) -> None:
        self.__dict__.update(made.__dict__)
        self._rounds = Turnstile(self._loop)

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, rounds=self._rounds, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server())


@web.middleware
async def bodies_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises TooSlow where a handler reads a body that comes too slowly."""
    content = request.content
    if content.is_eof():  # nearly always: the body came with its head
        return await handler(request)
    loop = asyncio.get_running_loop()
    began = loop.time()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if content.is_eof():
            return
        waited = loop.time() - began
        if waited > BODY_GRACE_S + content.total_bytes / BODY_BYTES_PER_S_MIN:
            content.set_exception(TooSlow(f"of the request's body {content.total_bytes} bytes came in {waited:.0f} s"))
            return
        timer = loop.call_later(BODY_LOOK_S, look)

    timer = loop.call_later(BODY_LOOK_S, look)
    try:
        return await handler(request)
    finally:
        timer.cancel()
