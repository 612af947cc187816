"""The client of every measurement: HTTP/1.1 over plain asyncio protocols, counting events as bytes.

One connection is one agent. `Call` keeps when its answer began, how many events came and when the last one did.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from tests.bench.gateway.arrivals import Arrivals


class AnswerFailed(Exception):
    """An answer other than a whole HTTP 200."""


@dataclass(slots=True)
class Call:
    """One request under way or done. Times are the loop's."""

    sent_at: float = 0.0
    first_at: float | None = None
    last_at: float = 0.0
    events: int = 0
    longest_gap_s: float = 0.0
    body: bytearray = field(default_factory=bytearray)
    arrivals: Arrivals | None = None


def numbered(body: dict[str, Any], number: int) -> dict[str, Any]:
    """The same chat, told apart from all others at its end: agents do not ask the same thing at once."""
    first, *_ = body["messages"]
    return {**body, "messages": [{**first, "content": f"{first['content']} {number:06d}"}]}


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    """A request's bytes, made once and sent many times."""
    data = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Agent(asyncio.Protocol):
    """A connection that is kept alive; one request at a time. `keep`: whether answers' bodies are kept;
    `arrivals`: makes what counts each answer's tokens as they come."""

    def __init__(self, keep: bool = False, arrivals: Callable[[], Arrivals] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._keep, self._arrivals = keep, arrivals
        self._transport: asyncio.Transport
        self._done: asyncio.Future[Call]
        self._call = Call()
        self._head = b""
        self._length: int | None = None  # of the body still to come; None: chunked
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def call(self) -> Call:
        """The present one."""
        return self._call

    def send(self, request: bytes) -> asyncio.Future[Call]:
        """The call once it is answered; AnswerFailed if it is not."""
        self._call = Call(sent_at=self._loop.time(), arrivals=self._arrivals and self._arrivals())
        self._head, self._tail = b"", b""
        self._done = self._loop.create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self._done.cancel()
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        call, now = self._call, self._loop.time()
        if call.first_at is None:
            self._head += data
            at = self._head.find(b"\r\n\r\n")
            if at < 0:
                return
            head, data = self._head[:at].lower(), self._head[at + 4 :]
            length = head.find(b"content-length:")
            self._length = int(head[length + 15 :].split(b"\r", 1)[0]) if length >= 0 else None
            if not head.startswith(b"http/1.1 200"):
                self._fail(AnswerFailed((head + data)[:500].decode(errors="replace")))
                return
            call.first_at = call.last_at = now
        if not data:
            return
        call.longest_gap_s = max(call.longest_gap_s, now - call.last_at)
        call.last_at = now
        call.events += data.count(b"data: {")
        if self._keep:
            call.body += data
        if call.arrivals is not None:
            call.arrivals.take(data, now)
        if self._length is not None:
            self._length -= len(data)
            ended = self._length <= 0
        else:
            self._tail = (self._tail + data)[-5:]
            ended = self._tail == b"0\r\n\r\n"
        if ended and not self._done.done():
            self._done.set_result(call)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_done"):
            self._fail(AnswerFailed(f"the connection was closed: {exc}"))

    def _fail(self, error: AnswerFailed) -> None:
        if not self._done.done():
            self._done.set_exception(error)


async def connect(
    url: str, num: int, *, keep: bool = False, arrivals: Callable[[], Arrivals] | None = None
) -> list[Agent]:
    """`num` connections, 100 at a time: a listen queue need not hold them all."""
    loop, host, port = asyncio.get_running_loop(), urlsplit(url).hostname, urlsplit(url).port
    agents: list[Agent] = []
    for at in range(0, num, 100):
        made = [loop.create_connection(lambda: Agent(keep, arrivals), host, port) for _ in range(min(100, num - at))]
        agents += [protocol for _, protocol in await asyncio.gather(*made)]
    return agents


def close(agents: Sequence[Agent]) -> None:
    for agent in agents:
        agent.close()
