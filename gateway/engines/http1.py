"""One connection to an engine: HTTP/1.1 as an asyncio protocol, whose event streams become events as they are read.

- it carries one request at a time, and serves the next one if its response was read to the end;
- events that nobody took are bounded: beyond `EVENTS_WAITING_MAX` the socket is not read, and the engine waits;
  so are the bytes of a response that is passed on, beyond `PASSED_WAITING_BYTES_MAX`;
- a task that waits with `more(push)` is not woken for events: the callback that read them calls `push`. A stream's
  first events are handed over at once. Later ones are read in batches with other streams' (`gateway.engines.sockets`);
  where that is impossible, over TLS, they are handed over in one of the event loop's next rounds once this one is full
  (`gateway.runtime.rounds`).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from gateway.engines import sockets
from gateway.engines.base import StreamCut
from gateway.runtime import rounds

PASSED_WAITING_BYTES_MAX = 1 << 18
"""A few reads' worth: the client's pace limits a response that is passed on, not this."""
END_TIMEOUT_S = 1.0
"""A few bytes follow a complete response: a connection on which they do not come is closed."""
EVENTS_WAITING_MAX = 512
EVENT_BYTES_MAX = 4 << 20
"""One event's line: the first carries the prompt's ids."""
HEAD_BYTES_MAX = 1 << 16
"""Of a response's head, of a chunk's, and of the trailers: beside the bytes of bodies, in a row."""
READ_BYTES = 1 << 16
"""In one read of a socket that is read in batches."""
ERROR_BYTES_MAX = 1 << 16
"""Of an error's body."""


class Refused(Exception):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


Push = Callable[[], bool]
"""Takes events that wait; returns whether the waiting task has to wake."""


class Connection(asyncio.Protocol):
    """`send`, `answered`, `some` or `more`, `end`; then again if `reusable`. `waiting`: events not yet taken."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stall_timeout_s = 0.0  # the present request's
        self._loop = asyncio.get_running_loop()
        self._rounds = rounds.of(self._loop)
        self._queued = False  # to be handed over in a later round
        self._sockets = sockets.of(self._loop)
        self._fd: int | None = None  # of a socket that may be read in batches
        self._batched = False  # its socket is read there, not by its transport
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._push: Push | None = None
        self._lost = False
        self._done = True
        self._begin()

    def _begin(self) -> None:
        self._other_bytes = 0  # since the last ones of a body
        self.status = 0
        self.content_type = ""
        self.location = b""
        self._passes = False  # bytes, not events
        self._has_length = False  # else its body ends with the connection
        self._keep_alive = True
        self._line = b""  # an event that is not whole yet
        self._error = b""
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0  # only of responses that are passed on
        self.paused = False
        self._cut: StreamCut | None = None
        self._ended: Callable[[], None] | None = None
        self._has_begun = False  # something was handed over
        self._received_at = self._loop.time()

    # -- requests

    @property
    def reusable(self) -> bool:
        return self._done and self._keep_alive and not self._lost

    def send(self, request: bytes, *, stall_timeout_s: float, passes: bool = False) -> None:
        self._begin()
        self._done, self._passes, self._stall_timeout_s = False, passes, stall_timeout_s
        self._timer = self._loop.call_later(stall_timeout_s, self._check_stall)
        self._transport.write(request)

    async def answered(self) -> None:
        """Returns with the response's head. Raises StreamCut; for events also Refused, with the error's body."""
        while not self.status or (self.status != 200 and not self._done and not self._passes):
            await self._more()
        if self.status != 200 and not self._passes:
            raise Refused(self.status, self._error.decode(errors="replace"))

    async def some(self) -> bool:
        """Returns True once events wait, False once the response is over. Raises the cut after the events before."""
        while not self.waiting:
            if self._done:
                return False
            await self.more()
        return True

    @property
    def over(self) -> bool:
        """The response has ended."""
        return self._done

    async def more(self, push: Push | None = None) -> None:
        """Returns once anything happened; with `push`, once that was True. Raises the cut, or what `push` raised."""
        self._listen()
        self._push = push
        try:
            await self._more()
        finally:
            self._push = None

    def _listen(self) -> None:
        if self.paused:
            self.paused = False
            self._transport.resume_reading()

    @property
    def ending(self) -> bool:
        return self._ended is not None and not (self._done or self._lost)

    def end(self, ended: Callable[[], None]) -> None:
        """The reader is done: only the response's end may still come. `ended` is called when it came, or never will."""
        if self._done or self._lost:
            return
        self._ended = ended
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(END_TIMEOUT_S, self.close)
        self._listen()

    async def _more(self) -> None:
        """Returns once anything happened. Raises the cut, if there is one."""
        if self._cut is not None:
            raise self._cut
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        self._leave_batches()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()

    def cut(self, cut: StreamCut) -> None:
        if not self._done:
            self._cut = cut
            self._wake()
        self.close()

    # -- read in batches

    def _join_batches(self) -> None:
        """Reads the socket in batches from now on: the stream's first events are handed over, the others may wait."""
        if self._fd is not None and not (self._batched or self.paused or self._done or self._lost):
            self._batched = True
            self._transport.pause_reading()
            self._sockets.add(self._fd, self._read)

    def _leave_batches(self) -> None:
        if self._batched:
            assert self._fd is not None
            self._batched = False
            self._sockets.remove(self._fd)

    def _read_by_itself(self) -> None:
        if self._batched:
            self._leave_batches()
            self._transport.resume_reading()

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.data_received(data)
        else:
            self._read_by_itself()  # its transport reads the end again, and calls `connection_lost`

    # -- the protocol's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._fd = plain_socket(self._transport)
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        del self._parser  # which holds this connection
        self._leave_batches()
        if self._ended is not None:
            self._ended()
        if self._done or self._cut is not None:  # the reason of a cut from this side stays
            return
        if self.status and (self.status != 200 or not (self._has_length or exc is not None)):
            self._finish()  # an error's body that broke off is still an error
        else:
            self.cut(StreamCut("reset", f"{self._url} broke the stream: {exc or 'it closed the connection'}"))

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        if self._done:  # unrequested bytes: the connection is not used again
            self._keep_alive = False
            return
        self._other_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._other_bytes > HEAD_BYTES_MAX and not self._done:
                raise ValueError("an endless head, chunk length or trailer")
        except (httptools.HttpParserError, ValueError) as e:
            self._keep_alive = False
            if not self._done:  # else it is of bytes behind the response
                why = e.__context__ if isinstance(e, httptools.HttpParserCallbackError) else e
                self.cut(StreamCut("protocol", f"{self._url} does not speak HTTP as it should: {why}"))
        if self._done:
            self._finish()
        else:
            self._wake()

    def _wake(self) -> None:
        """Resumes the waiting task, or hands the events over in its place.

        A push may neither run twice for the same events nor be forgotten: `_queued` holds from the moment a later
        round was booked until it came, and whatever is read meanwhile waits with the rest.
        """
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._push is None:
            waiter.set_result(None)
        elif self._queued:
            pass  # the booked round hands these over, too
        elif self._batched or not self._has_begun or self._rounds.take(self._hand_over_later):
            self._hand_over(waiter, self._push)
        else:
            self._queued = True

    def _hand_over_later(self) -> None:
        self._queued = False
        if self._waiter is not None and not self._waiter.done() and self._push is not None:
            self._hand_over(self._waiter, self._push)

    def _hand_over(self, waiter: asyncio.Future[None], push: Push) -> None:
        self._has_begun = self._has_begun or bool(self.waiting)
        try:
            wakes = bool(self.waiting) and push()
        except Exception as e:  # noqa: BLE001 (the event loop called this: the task that reads the stream gets the error)
            waiter.set_exception(e)
            return
        if wakes or self._done or self._cut is not None:
            waiter.set_result(None)
        elif not self.waiting:
            self._listen()
            if not self._batched:
                self._join_batches()

    def _check_stall(self) -> None:
        silent_s = self._loop.time() - self._received_at
        if self.paused:
            silent_s = 0.0  # the gateway does not read: the silence is not the engine's
        if silent_s >= self._stall_timeout_s:
            self.cut(StreamCut("stalled", f"{self._url} was silent for too long"))
        else:
            self._timer = self._loop.call_later(self._stall_timeout_s - silent_s, self._check_stall)

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._done:  # bytes behind the response
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._done or self.status:  # of the trailers
            return
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name == b"location":
            self.location = value
        elif name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._has_length = True

    def on_headers_complete(self) -> None:
        if self._done:
            return
        status = self._parser.get_status_code()
        if not (200 <= status <= 599 and (not self.content_type or self.content_type.isprintable())):
            raise ValueError(f"a status of {status}, content of type {self.content_type[:40]!r}")
        self.status = status

    def on_body(self, body: bytes) -> None:
        if not self._done:
            self._other_bytes = 0
            self._take(body)

    def on_message_complete(self) -> None:
        if not self._done:
            self._done, self._keep_alive = True, self._parser.should_keep_alive()

    # -- events and bytes of bodies

    def _take(self, body: bytes) -> None:
        if self._passes:
            self._take_bytes(body)
            return
        if self.status != 200:
            self._error = (self._error + body)[:ERROR_BYTES_MAX]
            return
        if body.find(b"\n") == len(body) - 2 and body.startswith(b"data: ") and body.endswith(b"\n") and not self._line:
            self.waiting.append(body[6:-2].strip())  # one event in a chunk of its own, as most come
        else:
            self._take_lines(body)
        if len(self.waiting) > EVENTS_WAITING_MAX and not self.paused:
            self._pause()

    def _take_lines(self, body: bytes) -> None:
        lines = (self._line + body).split(b"\n") if self._line else body.split(b"\n")
        self._line = lines.pop()
        if len(self._line) > EVENT_BYTES_MAX:
            raise ValueError("too long a line")
        for line in lines:
            if line.startswith(b"data:"):
                self.waiting.append(line[5:].strip())

    def _take_bytes(self, body: bytes) -> None:
        self.waiting.append(body)
        self.waiting_bytes += len(body)
        if self.waiting_bytes > PASSED_WAITING_BYTES_MAX and not self.paused:
            self._pause()

    def _pause(self) -> None:
        self._read_by_itself()
        self.paused = True
        self._transport.pause_reading()

    def _finish(self) -> None:
        self._read_by_itself()
        self._listen()  # the next response on this connection has to be read
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ended is not None:
            self._loop.call_soon(self._ended)  # once the read that brought the end is parsed
        self._wake()


def plain_socket(transport: asyncio.Transport) -> int | None:
    """Its descriptor; None over TLS, where the socket does not have the plain bytes."""
    if transport.get_extra_info("sslcontext") is not None:
        return None
    return int(transport.get_extra_info("socket").fileno())
