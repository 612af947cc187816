"""The timeline: the fleet's events in order, bounded in memory and on disk.

Invariants:
- `seq` grows by one per event and never restarts, not even with the gateway;
- a reader that continues `after` the last seq it received misses none of the last `capacity` events.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from gateway.store.damage import leaving_out
from gateway.store.database import Database
from protos.decoding import decode_msgpack
from protos.errors import LaminarError

log = logging.getLogger(__name__)

CAPACITY = 100_000
"""Events kept: about 20 MB, hours of a small fleet."""
READ_MAX = 10_000
"""Events in one response."""

_SCHEMA = "CREATE TABLE IF NOT EXISTS timeline(seq INTEGER PRIMARY KEY, event BLOB NOT NULL)"


class TimelineEvent(msgspec.Struct, frozen=True):
    seq: int
    t_unix_s: float
    kind: str
    fields: dict[str, Any]

    def flat(self) -> dict[str, Any]:
        """In the format of `/admin/timeline`: the fields beside seq, t_unix_s and kind."""
        return {"seq": self.seq, "t_unix_s": self.t_unix_s, "kind": self.kind, **self.fields}


class Timeline:
    """`add` from the event loop, never waiting; written to disk in batches; `read` from memory.

    In memory an event is what it is on disk, encoded: its objects would take three times as much."""

    def __init__(self, database: Database, *, capacity: int = CAPACITY, flush_interval_s: float = 0.2) -> None:
        self._database = database
        self._capacity = capacity
        self._flush_interval_s = flush_interval_s
        self._events: deque[bytes] = deque(maxlen=capacity)  # of each seq below the next; b"": its row is lost
        self._written_seq = 0
        self._next_seq = 1
        self._dirty = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        for seq, blob in await self._database.run(lambda connection: _load(connection, self._capacity)):
            event = b""
            with leaving_out("timeline", seq):
                decode_msgpack(blob, TimelineEvent)
                event = blob
            lost = seq - self._next_seq if self._events else 0
            self._events.extend([b""] * min(lost, self._capacity))
            self._events.append(event)
            self._next_seq = seq + 1
        self._written_seq = self._next_seq - 1
        self._flusher = asyncio.create_task(self._flush_regularly(), name="timeline-flush")

    async def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.wait([self._flusher])
        await self.flush()

    def add(self, kind: str, /, **fields: Any) -> int:
        """Adds an event with the current time; returns its seq. Fields must be JSON values."""
        event = TimelineEvent(self._next_seq, time.time(), kind, fields)
        self._events.append(msgspec.msgpack.encode(event))
        self._next_seq += 1
        self._dirty.set()
        return event.seq

    def read(self, after: int = 0, limit: int = 1000) -> tuple[int, list[TimelineEvent]]:
        """The oldest events with seq above `after`, and the `after` of the next call."""
        rows = self._rows(after, min(limit, READ_MAX))
        return (rows[-1][0] if rows else after), [_decoded(event) for _, event in rows]

    def newest(self, after: int, limit: int) -> list[TimelineEvent]:
        """The newest events with seq above `after`, in order. Takes time for those alone, however many are kept."""
        num = max(0, min(limit, self._next_seq - 1 - after))
        return [_decoded(event) for event in islice(reversed(self._events), num) if event][::-1]

    def _rows(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        first = self._next_seq - len(self._events)
        skip = max(0, after + 1 - first)
        numbered = enumerate(islice(self._events, skip, None), first + skip)
        return list(islice(((seq, event) for seq, event in numbered if event), limit))

    async def flush(self) -> None:
        """Returns when all events added before are on disk."""
        self._dirty.clear()
        while rows := self._rows(self._written_seq, READ_MAX):
            await self._database.owe(partial(_append, rows=rows, capacity=self._capacity))
            self._written_seq = max(self._written_seq, rows[-1][0])

    async def _flush_regularly(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(self._flush_interval_s)
            try:
                await self.flush()
            except LaminarError as e:  # reads are served from memory: only the copy on disk lacks events
                log.error("timeline: %s", e)


def _decoded(event: bytes) -> TimelineEvent:
    return decode_msgpack(event, TimelineEvent)


def _load(connection: sqlite3.Connection, limit: int) -> list[tuple[int, bytes]]:
    connection.execute(_SCHEMA)
    rows = connection.execute("SELECT seq, event FROM timeline ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
    return rows[::-1]


def _append(connection: sqlite3.Connection, rows: list[tuple[int, bytes]], capacity: int) -> None:
    connection.executemany("INSERT OR IGNORE INTO timeline VALUES (?,?)", rows)
    connection.execute("DELETE FROM timeline WHERE seq <= ?", (rows[-1][0] - capacity,))
