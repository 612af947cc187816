"""The feed of the dashboard: one reading per tick, sent to every client that watches.

Invariants:
- nothing is read while nobody watches;
- a tick is read, compared and encoded once, however many clients there are;
- a client holds up neither the others nor the gateway: what it has not taken is in its bounded mailbox.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from gateway.core.feed import Frame, Mailbox, TableDelta, Tables, compare, whole
from gateway.runtime.clock import unix_s
from gateway.runtime.supervisor import log_failure
from protos.errors import OutOfCapacity, Unavailable

TICK_S = 0.25
"""Between two readings: what a person sees as live, at a hundredth of the gateway's time with a thousand sessions."""
CLIENTS_MAX = 32
"""Browsers and terminals at once."""

Event = Mapping[str, Any]


class Source(Protocol):
    """What the feed reads."""

    async def read(self) -> Tables:
        """All tables as they are now; always the same ones."""
        ...

    def events(self, after: int) -> tuple[int, Sequence[Event]]:
        """The fleet's last events beyond the number `after`, in order; and the `after` of the next call."""
        ...

    async def follow(self) -> None:
        """Runs beside the ticks, until cancelled."""
        ...


@dataclass(eq=False, slots=True)
class _Client:
    mailbox: Mailbox = field(default_factory=Mailbox)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Feed:
    """Owner of the ticks, the clients, and the tables as they were at the last tick."""

    def __init__(self, source: Source, *, tick_s: float = TICK_S, clients_max: int = CLIENTS_MAX) -> None:
        self._source, self._tick_s, self._clients_max = source, tick_s, clients_max
        self._life = secrets.token_hex(8)
        self._clients: set[_Client] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._tables: Tables | None = None  # None: not read yet
        self._snapshot: bytes | None = None  # of the last tick, once a client needed it
        self._t_unix_s = 0.0
        self._seen = 0  # the number of the last event that was sent
        self._closed = False

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    async def close(self) -> None:
        """Ends every client's stream."""
        self._closed = True
        await self._stop()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `snapshot`, then `delta`s, until the gateway closes. Raises OutOfCapacity at once when
        too many watch, Unavailable when the gateway shuts down."""
        if self._closed:
            raise Unavailable("the gateway is shutting down", hint="connect again soon")
        if len(self._clients) >= self._clients_max:
            raise OutOfCapacity(f"{len(self._clients)} clients watch already", hint="close some", retry_after_s=10.0)
        client = _Client()
        self._clients.add(client)
        if self._ticking is None or self._ticking.done():
            self._tables, self._ticking = None, asyncio.create_task(self._run(), name="ui-feed")
            self._ticking.add_done_callback(log_failure)
        try:
            while (ticking := self._ticking) is not None and not ticking.done():
                await client.ready.wait()
                client.ready.clear()
                while (message := self._next(client)) is not None:
                    yield message
        finally:
            self._clients.discard(client)
            if not self._clients:
                await self._stop()

    def _next(self, client: _Client) -> bytes | None:
        if not client.mailbox.behind:
            return client.mailbox.take()
        if self._tables is None:
            return None
        client.mailbox.behind = False
        if self._snapshot is None:
            # It may have events that are in the next delta, too: they have numbers.
            self._snapshot = self._message("snapshot", whole(self._tables), self._source.events(0)[1])
        return self._snapshot

    async def _stop(self) -> None:
        ticking, self._ticking = self._ticking, None
        self._tables = self._snapshot = None  # before the wait: a client that comes meanwhile begins anew
        self._wake()
        if ticking is not None:
            ticking.cancel()
            await asyncio.wait([ticking])

    def _wake(self) -> None:
        for client in self._clients:
            client.ready.set()

    async def _run(self) -> None:
        """An error ends it, and all streams; clients connect again."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._source.follow(), name="ui-feed-follow")
                group.create_task(self._tick_regularly(), name="ui-feed-tick")
        finally:
            self._wake()

    async def _tick_regularly(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self._tick()
            await asyncio.sleep(max(0.0, self._tick_s - (loop.time() - began)))

    async def _tick(self) -> None:
        tables = await self._source.read()
        before, changes = self._tables, dict[str, TableDelta]()
        for _ in () if before is None else compare(before, tables, changes):
            await asyncio.sleep(0)
        self._tables, self._snapshot, self._t_unix_s = tables, None, unix_s()
        self._seen, events = self._source.events(self._seen)
        if before is not None:
            message = self._message("delta", changes, events)
            for client in self._clients:
                client.mailbox.put(message)
        self._wake()

    def _message(self, kind: str, tables: Mapping[str, TableDelta], events: Sequence[Event]) -> bytes:
        frame = Frame(self._life, round(self._t_unix_s, 3), tables, events)
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(frame) + b"\n\n"
