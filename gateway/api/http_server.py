"""The HTTP server below the handlers: timeouts of requests, their fair start, and responses to what is no HTTP.

Invariants:
- a head that has begun is whole within `HEAD_TIMEOUT_S`, or its connection is closed with a 408;
- a connection is one of those that `gateway.core.connections` takes, and begins its first head within `SILENCE_S`; one
  that is refused gets a 429, and is closed;
- a body that a handler waits for comes at `BODY_BYTES_PER_S_MIN` at least, with `BODY_GRACE_S` to spare, or is refused;
- bodies that come in at once are no larger, together, than `bodies_bytes_max`;
- requests that arrive together begin in several rounds of the event loop, in their order: a thousand at once would hold
  it for half a second, and every stream would stall;
- bytes that are no HTTP get an error in the API's format, and one line in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from gateway.api.errors import Handler, TooSlow, error_bytes, error_headers, error_response, no_http
from gateway.core.connections import Bound, Connections
from gateway.runtime.rounds import Rounds
from protos.errors import LaminarError, OutOfCapacity

log = logging.getLogger(__name__)

SILENCE_S = 30.0
HEAD_TIMEOUT_S = 30.0
BODY_GRACE_S = 30.0
BODY_BYTES_PER_S_MIN = 100_000
"""Slower than any link over which a model is of use; a body of 32 MiB may take six minutes."""
BODY_LOOK_S = 5.0
REFUSED_S = 2.0
"""How long a connection that is refused may take to send something, so that it gets its answer, and not a reset."""
REFUSED_RETRY_S = 5.0
REFUSED_MAX = 128
"""Of those; what exceeds it is closed at once."""
BACKLOG = 1024
"""Connections that wait in the kernel to be accepted; beyond that clients try again after a second."""


class _Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_admission", "_body", "_head_due", "_held", "_refusal", "_rounds", "_silence_due")

    def __init__(self, server: web.Server, *, rounds: Rounds, admission: Admission, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._admission = admission
        self._refusal: LaminarError | None = None  # this connection is one too many
        self._silence_due: asyncio.TimerHandle | None = None  # until its first byte
        self._body: StreamReader | None = None  # of the newest request; it may be answered before its body has come
        self._head_due: asyncio.TimerHandle | None = None
        self._rounds = rounds
        self._held: list[bytes] = []  # of a request that begins in a later round

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._refusal = self._admission.opened(self, transport)
        silence_s = SILENCE_S if self._refusal is None else REFUSED_S
        self._silence_due = asyncio.get_running_loop().call_later(silence_s, self.make_way)

    def make_way(self) -> None:
        """Ends the connection without an answer: nothing was asked."""
        if self.transport is not None:
            self.transport.abort()

    def let_in(self) -> None:
        """A request of it may be handled: it is no stranger's."""
        self._admission.connections.known(self)

    def data_received(self, data: bytes) -> None:
        self._spoke()
        if self._refusal is not None:
            self._answer_and_close(self._refusal)
        elif self._held:
            self._hold(data)
        elif self._current_request is not None or self._rounds.take(self._let_in):
            self._take(data)
        else:
            self._hold(data)

    def _hold(self, data: bytes) -> None:
        """Until its round. No more is read meanwhile: a thousand bodies would be in memory before anyone was asked for
        a key."""
        self._held.append(data)
        if self.transport is not None:
            self.transport.pause_reading()

    def _let_in(self) -> None:
        held, self._held = self._held, []
        if held and self.transport is not None:
            paused_by_aiohttp = self._reading_paused or getattr(self, "_buffer_paused", False)  # the latter since 3.14
            if not paused_by_aiohttp:
                self.transport.resume_reading()
            self._take(b"".join(held))

    def _take(self, data: bytes) -> None:
        """`data` is empty when aiohttp resumes reading after a pause."""
        heads, in_body = self._request_count, self._body is not None and not self._body.is_eof()
        super().data_received(data)
        if self._request_count != heads:
            self._head_came()
            if not self._admission.strangers:
                self.let_in()
            self._body = self._messages[-1][1] if self._messages else None
        elif data and not in_body and self._current_request is None and self._head_due is None:
            self._head_due = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._spoke()
        self._head_came()
        self._held.clear()
        self._admission.closed(self)
        super().connection_lost(exc)

    def _spoke(self) -> None:
        if self._silence_due is not None:
            self._silence_due.cancel()
            self._silence_due = None

    def _head_came(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        self._head_due = None
        if self._current_request is None:
            self._answer_and_close(TooSlow(f"the request's head was not whole after {HEAD_TIMEOUT_S:g} s"))

    def _answer_and_close(self, error: LaminarError) -> None:
        """Below aiohttp, which has no request to answer."""
        if self.transport is None:
            return
        body = error_bytes(error)
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error_headers(error)}
        lines = [f"HTTP/1.1 {error.http_status} {HTTPStatus(error.http_status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (fields | {"Connection": "close"}).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
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


class Admission:
    """Takes connections, or refuses them, for one server. `strangers`: whoever has no key is one."""

    def __init__(self, connections: Connections[_Connection], *, strangers: bool) -> None:
        self.connections, self.strangers = connections, strangers
        self._refused: set[_Connection] = set()

    def opened(self, connection: _Connection, transport: asyncio.BaseTransport) -> LaminarError | None:
        """Why it is refused; None: it is taken."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        opened = self.connections.opened(connection, address, asyncio.get_running_loop().time())
        if opened.leaves is not None:
            opened.leaves.make_way()
        if opened.refused is None:
            return None
        if len(self._refused) >= REFUSED_MAX:
            connection.make_way()
        self._refused.add(connection)
        return _too_many(opened.refused, self.connections)

    def closed(self, connection: _Connection) -> None:
        self._refused.discard(connection)
        self.connections.closed(connection)


def _too_many(bound: Bound, connections: Connections[_Connection]) -> OutOfCapacity:
    if bound == "per_address":
        return OutOfCapacity(
            f"{connections.per_address} connections of this address are open",
            hint="close some, or start the gateway with a higher --connections-per-address",
            retry_after_s=REFUSED_RETRY_S,
        )
    return OutOfCapacity(
        f"{connections.total} connections are open",
        hint="close some, or start the gateway with a higher --connections-max",
        retry_after_s=REFUSED_RETRY_S,
    )


class _Server(web.Server):
    """aiohttp's server `made`, with connections of our own class."""

    def __init__(self, made: web.Server, admission: Admission) -> None:
        self.__dict__.update(made.__dict__)
        self._rounds, self._admission = Rounds(self._loop, share_s=0.0), admission

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, rounds=self._rounds, admission=self._admission, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """aiohttp's runner, of a server that bounds its connections by `admission`."""

    def __init__(self, app: web.Application, admission: Admission, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._admission = admission

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._admission)


def let_in(request: web.Request) -> None:
    """The request has passed access control: its connection is no stranger's."""
    if isinstance(request.protocol, _Connection):
        request.protocol.let_in()


class Bodies:
    """The bodies that are coming in: how long each may take, and how large they may be together."""

    def __init__(self, bytes_max: int, one_max: int) -> None:
        self._bytes_max, self._one_max = bytes_max, one_max
        self.num_bytes = 0  # of those under way, as they were declared

    @property
    def in_time(self) -> Middleware:
        """Raises TooSlow where a handler reads a body that comes too slowly, OutOfCapacity where too many come, and
        HTTPRequestEntityTooLarge for one that is declared to be too large."""

        @web.middleware
        async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.content.is_eof():  # nearly always: the body came with its head
                return await handler(request)
            reserved = self._reserve(request)
            timer = _Patience(request.content)
            try:
                return await handler(request)
            finally:
                timer.cancel()
                reserved()

        return bounded

    def _reserve(self, request: web.Request) -> Callable[[], None]:
        """Takes what the body was declared to have; calling what is returned, or the body's end, gives it back. One
        that comes in chunks, or packed (a thousand bytes may become a million), counts as the largest."""
        packed = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity"
        size = self._one_max if packed or request.content_length is None else request.content_length
        if max(size, request.content_length or 0) > self._one_max:
            raise web.HTTPRequestEntityTooLarge(self._one_max, request.content_length or size)
        if self.num_bytes and self.num_bytes + size > self._bytes_max:  # one is always taken
            raise OutOfCapacity(
                f"bodies of {self.num_bytes} bytes come in",
                hint="send fewer at once, or start the gateway with a higher --bodies-bytes-max",
            )
        self.num_bytes += size
        held = [size]

        def give_back() -> None:
            self.num_bytes -= held[0]
            held[0] = 0

        request.content.on_eof(give_back)
        return give_back


class _Patience:
    """Looks at a body while it comes, and ends one that is too slow."""

    def __init__(self, content: StreamReader) -> None:
        self._content, self._loop = content, asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer = self._loop.call_later(BODY_LOOK_S, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._content.is_eof():
            return
        waited, came = self._loop.time() - self._began, self._content.total_bytes
        if waited > BODY_GRACE_S + came / BODY_BYTES_PER_S_MIN:
            self._content.set_exception(TooSlow(f"of the request's body {came} bytes came in {waited:.0f} s"))
            return
        self._timer = self._loop.call_later(BODY_LOOK_S, self._look)
