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
"""Events kept: about 30 MB, hours of a small fleet."""
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
    """`add` from the event loop, never waiting; written to disk in batches; `read` from memory."""

    def __init__(self, database: Database, *, capacity: int = CAPACITY, flush_interval_s: float = 0.2) -> None:
        self._database = database
        self._capacity = capacity
        self._flush_interval_s = flush_interval_s
        self._events: deque[TimelineEvent] = deque(maxlen=capacity)
        self._written_seq = 0
        self._next_seq = 1
        self._dirty = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        rows = await self._database.run(lambda connection: _load(connection, self._capacity))
        for seq, blob in rows:
            with leaving_out("timeline", seq):
                self._events.append(decode_msgpack(blob, TimelineEvent))
        if self._events:
            self._written_seq = self._events[-1].seq
            self._next_seq = self._written_seq + 1
        self._flusher = asyncio.create_task(self._flush_regularly(), name="timeline-flush")

    async def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.wait([self._flusher])
        await self.flush()

    def add(self, kind: str, /, **fields: Any) -> int:
        """Adds an event with the current time; returns its seq. Fields must be JSON values."""
        event = TimelineEvent(self._next_seq, time.time(), kind, fields)
        self._next_seq += 1
        self._events.append(event)
        self._dirty.set()
        return event.seq

    def read(self, after: int = 0, limit: int = 1000) -> tuple[int, list[TimelineEvent]]:
        """The oldest events with seq above `after`, and the `after` of the next call."""
        if not self._events:
            return after, []
        skip = max(0, after + 1 - self._events[0].seq)
        found = list(islice(self._events, skip, skip + min(limit, READ_MAX)))
        return (found[-1].seq if found else after), found

    def newest(self, after: int, limit: int) -> list[TimelineEvent]:
        """The newest events with seq above `after`, in order. Takes time for those alone, however many are kept."""
        found: list[TimelineEvent] = []
        for event in islice(reversed(self._events), limit):
            if event.seq <= after:
                break
            found.append(event)
        return found[::-1]

    async def flush(self) -> None:
        """Returns when all events added before are on disk."""
        self._dirty.clear()
        _, unwritten = self.read(self._written_seq, READ_MAX)
        while unwritten:
            rows = [(event.seq, msgspec.msgpack.encode(event)) for event in unwritten]
            await self._database.owe(partial(_append, rows=rows, capacity=self._capacity))
            self._written_seq = max(self._written_seq, rows[-1][0])
            _, unwritten = self.read(self._written_seq, READ_MAX)

    async def _flush_regularly(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(self._flush_interval_s)
            try:
                await self.flush()
            except LaminarError as e:  # reads are served from memory: only the copy on disk lacks events
                log.error("timeline: %s", e)


def _load(connection: sqlite3.Connection, limit: int) -> list[tuple[int, bytes]]:
    connection.execute(_SCHEMA)
    rows = connection.execute("SELECT seq, event FROM timeline ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
    return rows[::-1]


def _append(connection: sqlite3.Connection, rows: list[tuple[int, bytes]], capacity: int) -> None:
    connection.executemany("INSERT OR IGNORE INTO timeline VALUES (?,?)", rows)
    connection.execute("DELETE FROM timeline WHERE seq <= ?", (rows[-1][0] - capacity,))
