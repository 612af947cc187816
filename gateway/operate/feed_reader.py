"""The reader of a running gateway's feed (`GET /ui/feed`), for terminals."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from gateway.core.feed import Frame, apply
from gateway.operate.repack_view import client, refused, why_unreachable
from protos.decoding import decode_json
from protos.engines import is_address
from protos.errors import InvalidRequest, Unavailable

CONNECT_S = 10.0
SILENT_S = 15.0
"""The gateway sends several messages a second: a connection without any for so long is dead."""
MESSAGE_BYTES_MAX = 256 << 20
EVENTS_KEPT = 50


@dataclass(slots=True)
class Seen:
    """A gateway as its feed shows it. `restarts`: how often another life of it answered."""

    t_unix_s: float = 0.0
    life: str = ""
    restarts: int = 0
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def take(self, kind: str, frame: Frame) -> None:
        if self.life and self.life != frame.life:
            self.restarts += 1
            self.events.clear()  # a gateway without --data counts from 1 again
        self.life, self.t_unix_s = frame.life, frame.t_unix_s
        apply(self.tables, frame.tables, snapshot=kind == "snapshot")
        last = self.events[-1]["seq"] if self.events else 0
        self.events.extend(event for event in frame.events if event["seq"] > last)

    @property
    def status(self) -> Mapping[str, Any]:
        """The fields of `/status`."""
        return {**self.tables["gateway"], "engines": [engine for _, engine in sorted(self.tables["engines"].items())]}


async def frames(url: str, *, limit: int = 0) -> AsyncGenerator[tuple[str, Frame], None]:
    """Each message of one connection, with its kind; `limit` 0: until it ends. Raises Unavailable, InvalidRequest,
    Unauthenticated and Forbidden."""
    if not is_address(url):
        raise InvalidRequest(f"--url {url!r} is no gateway's address", hint="such as http://127.0.0.1:8080")
    timeout = httpx.Timeout(None, connect=CONNECT_S, read=SILENT_S)
    try:
        async with (
            client(timeout=timeout) as http,
            http.stream("GET", f"{url.rstrip('/')}/ui/feed", params={"frames": str(limit)}) as response,
        ):
            if response.status_code != 200:
                raise await _refusal(response, url)
            async for message in _messages(response):
                yield message
    except httpx.TransportError as e:
        raise Unavailable(f"no gateway answers at {url}: {why_unreachable(e)}", hint="name one with --url") from e
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise Unavailable(f"what answers at {url} is no gateway: {e}", hint="name one with --url") from e


async def _refusal(response: httpx.Response, url: str) -> Exception:
    status = response.status_code
    try:
        await response.aread()
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"what answers at {url} has no feed: {status}", hint="name a gateway with --url")
    return refused(status, message) if status in (401, 403) else Unavailable(message)


async def _messages(response: httpx.Response) -> AsyncGenerator[tuple[str, Frame], None]:
    """Server-sent events. A snapshot is one line of megabytes, so lines are put together here."""
    rest = bytearray()
    async for piece in response.aiter_bytes():
        begin = max(0, len(rest) - 1)
        rest += piece
        while (end := rest.find(b"\n\n", begin)) >= 0:
            yield _decoded(bytes(rest[:end]))
            del rest[: end + 2]
            begin = 0
        if len(rest) > MESSAGE_BYTES_MAX:
            raise Unavailable(f"the feed sent a message of more than {MESSAGE_BYTES_MAX} bytes")


def _decoded(message: bytes) -> tuple[str, Frame]:
    kind, data = "", b""
    for line in message.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"event":
            kind = value.decode(errors="replace")
        elif name == b"data":
            data = value
    return kind, decode_json(data, Frame)
