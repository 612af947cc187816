"""The partial-response pool: what is known of every turn in flight, so that no death of an engine or gateway loses it.

Invariants:
- tokens of a turn are kept in the order appended, each once;
- what was appended is on disk within `flush_interval_s` plus one commit, and at `end` before it returns;
- an ended turn is kept until its session is forgotten; one that came to nothing can be reopened and goes on;
- at most one write of the pool is under way, and at most `BUFFERED_TOKENS_MAX` tokens wait for it before `drain` holds
  the appender back.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gateway.core.types import Segment, SessionId, TopLogprob, TurnId, TurnRecord, TurnRequest
from gateway.data.database import Database
from protos.errors import LaminarError, NotFound

log = logging.getLogger(__name__)

Outcome = Literal["stop", "length", "aborted", "lost"]
"""How a turn ended: a finish reason, given up by the client, or by the gateway."""

BUFFERED_TOKENS_MAX = 1_000_000
"""About 12 MB waiting for the disk; beyond it appenders wait, and with them the engines' streams."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS turns(
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, request BLOB NOT NULL, begun_unix_s REAL NOT NULL,
    outcome TEXT, num_tokens INTEGER, ended_unix_s REAL);
CREATE INDEX IF NOT EXISTS turns_by_session ON turns(session_id);
CREATE TABLE IF NOT EXISTS turn_parts(
    part INTEGER PRIMARY KEY, turn_id TEXT NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    top_logprobs BLOB);
CREATE INDEX IF NOT EXISTS turn_parts_by_turn ON turn_parts(turn_id);
CREATE TABLE IF NOT EXISTS turn_segments(
    turn_id TEXT NOT NULL, position INTEGER NOT NULL, segment BLOB NOT NULL, PRIMARY KEY(turn_id, position));
"""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    in_flight: int
    buffered_tokens: int
    flushes: int
    appended_tokens: int


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn on disk; in flight when it has no outcome."""

    record: TurnRecord
    outcome: Outcome | None
    ended_unix_s: float | None


@dataclass(slots=True)
class _Unwritten:
    """What one turn has that the disk has not."""

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    segments: list[tuple[int, bytes]] = field(default_factory=list)


class PartialResponsePool:
    """One writer (the gateway's event loop): `begin`, `open_segment`, `append`, `end`; `in_flight` after a restart."""

    def __init__(self, database: Database, *, flush_interval_s: float = 0.05) -> None:
        self._database = database
        self._flush_interval_s = flush_interval_s
        self._open: dict[TurnId, int] = {}  # turns in flight, with the segments seen of each
        self._unwritten: dict[TurnId, _Unwritten] = {}
        self._buffered_tokens = 0
        self._dirty = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._writing = asyncio.Lock()
        self._flusher: asyncio.Task[None] | None = None
        self._failure: LaminarError | None = None
        self._flushes = 0
        self._appended_tokens = 0

    async def open(self) -> None:
        """Makes the tables, and takes over the turns that an earlier life left in flight."""
        await self._database.run(_make_tables)
        self._open = dict(await self._database.run(_count_segments))
        self._flusher = asyncio.create_task(self._flush_regularly(), name="partial-response-flush")

    async def close(self) -> None:
        """Writes what is buffered. The database stays open."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.wait([self._flusher])
        await self.flush()

    async def begin(self, request: TurnRequest) -> None:
        """Opens a turn; on disk when this returns."""
        row = (request.turn_id, request.session_id, msgspec.msgpack.encode(request), time.time())
        self._open[request.turn_id] = 0
        await self._database.run(lambda connection: _insert_turn(connection, row))

    async def reopen(self, request: TurnRequest) -> None:
        """A turn in flight, or one that came to nothing, goes on where it was."""
        turn_id = request.turn_id
        self._open[turn_id] = await self._database.run(lambda connection: _reopen(connection, turn_id))

    def append(
        self,
        turn_id: TurnId,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[tuple[TopLogprob, ...]] = (),
    ) -> None:
        """Adds tokens that arrived together. Never waits: `drain` afterwards, as with an asyncio stream's write."""
        unwritten = self._of(turn_id)
        unwritten.token_ids.extend(token_ids)
        unwritten.logprobs.extend(logprobs)
        unwritten.top_logprobs.extend(top_logprobs)
        self._appended_tokens += len(token_ids)
        self._buffered_tokens += len(token_ids)
        if self._buffered_tokens > BUFFERED_TOKENS_MAX:
            self._room.clear()

    def open_segment(self, turn_id: TurnId, segment: Segment) -> None:
        """The tokens from `segment.start` (counted within the turn's generated ones) on are of this segment."""
        unwritten = self._of(turn_id)
        unwritten.segments.append((self._open[turn_id], msgspec.msgpack.encode(segment)))
        self._open[turn_id] += 1

    def close_segment(self, turn_id: TurnId, segment: Segment) -> None:
        """The last segment, as it ended: its time, and the version that its engine told."""
        self._of(turn_id).segments.append((self._open[turn_id] - 1, msgspec.msgpack.encode(segment)))

    async def drain(self) -> None:
        """Returns at once while the disk keeps up, else when there is room. Raises Unavailable if a write failed."""
        self._raise_failure()
        if not self._room.is_set():
            await self._room.wait()
            self._raise_failure()

    async def end(self, turn_id: TurnId, outcome: Outcome) -> None:
        """Closes the turn; its tokens are on disk when this returns, and stay until `forget_session`."""
        self._of(turn_id)
        await self.flush()
        await self._database.run(lambda connection: _set_outcome(connection, turn_id, outcome, time.time()))
        self._open.pop(turn_id, None)

    async def shorten(self, turn_id: TurnId, num_tokens: int) -> None:
        """An ended turn turns out to have stopped after its first `num_tokens` tokens."""
        await self._database.run(
            lambda connection: (
                connection.execute(
                    "UPDATE turns SET outcome='stop', num_tokens=? WHERE turn_id=?", (num_tokens, turn_id)
                )
                and None
            )
        )

    async def forget_session(self, session_id: SessionId) -> None:
        """Drops all turns of a session: its trajectory is in the experience buffer, or nobody wants it."""
        await self.forget_sessions([session_id])

    async def forget_sessions(self, session_ids: Sequence[SessionId]) -> None:
        """The same for many, in one commit."""
        if not session_ids:
            return
        await self.flush()
        for turn_id in await self._database.run(lambda connection: _delete_sessions(connection, session_ids)):
            self._open.pop(turn_id, None)

    async def in_flight(self) -> list[TurnRecord]:
        """Every turn without an end, oldest first."""
        await self.flush()
        return await self._database.run(lambda connection: _read_turns(connection, "outcome IS NULL", ()))

    async def sessions(self) -> list[SessionId]:
        """Every session that has a turn here."""
        return await self._database.run(_read_sessions)

    async def kept_turns(self, session_id: SessionId) -> list[KeptTurn]:
        """All turns kept of one session, with how and when they ended, in the order in which they began."""
        return await self._database.run(lambda connection: _read_kept(connection, session_id))

    async def session_turns(self, session_id: SessionId) -> list[TurnRecord]:
        """All turns kept of one session, oldest first."""
        await self.flush()
        return await self._database.run(lambda connection: _read_turns(connection, "session_id=?", (session_id,)))

    async def flush(self) -> None:
        """Returns when everything appended before the call is on disk. Raises Unavailable if that failed."""
        async with self._writing:
            self._raise_failure()
            if not self._unwritten:
                return
            taken, self._unwritten = self._unwritten, {}
            self._buffered_tokens = 0
            self._dirty.clear()
            try:
                await self._database.run(lambda connection: _write(connection, taken))
            except LaminarError as e:
                self._failure = e
                raise
            finally:
                self._room.set()
            self._flushes += 1

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(len(self._open), self._buffered_tokens, self._flushes, self._appended_tokens)

    async def _flush_regularly(self) -> None:
        while self._failure is None:
            await self._dirty.wait()
            await asyncio.sleep(self._flush_interval_s)
            try:
                await self.flush()
            except LaminarError as e:
                log.error("the partial-response pool can no longer be written: %s", e)

    def _of(self, turn_id: TurnId) -> _Unwritten:
        unwritten = self._unwritten.get(turn_id)
        if unwritten is None:
            if turn_id not in self._open:
                raise NotFound(f"turn {turn_id} is not in flight")
            unwritten = self._unwritten[turn_id] = _Unwritten()
            self._dirty.set()
        return unwritten

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _make_tables(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)


def _count_segments(connection: sqlite3.Connection) -> list[tuple[TurnId, int]]:
    return connection.execute(
        "SELECT turn_id, (SELECT count(*) FROM turn_segments s WHERE s.turn_id = t.turn_id)"
        " FROM turns t WHERE outcome IS NULL"
    ).fetchall()


def _insert_turn(connection: sqlite3.Connection, row: tuple[object, ...]) -> None:
    connection.execute("INSERT INTO turns(turn_id, session_id, request, begun_unix_s) VALUES (?,?,?,?)", row)


def _set_outcome(connection: sqlite3.Connection, turn_id: TurnId, outcome: Outcome, unix_s: float) -> None:
    connection.execute("UPDATE turns SET outcome=?, ended_unix_s=? WHERE turn_id=?", (outcome, unix_s, turn_id))


def _reopen(connection: sqlite3.Connection, turn_id: TurnId) -> int:
    connection.execute("UPDATE turns SET outcome=NULL, ended_unix_s=NULL WHERE turn_id=?", (turn_id,))
    [count] = connection.execute("SELECT count(*) FROM turn_segments WHERE turn_id=?", (turn_id,)).fetchone()
    return int(count)


def _write(connection: sqlite3.Connection, taken: dict[TurnId, _Unwritten]) -> None:
    connection.executemany(
        "INSERT INTO turn_parts(turn_id, token_ids, logprobs, top_logprobs) VALUES (?,?,?,?)",
        [
            (
                turn_id,
                u.token_ids.tobytes(),
                u.logprobs.tobytes(),
                msgspec.msgpack.encode(u.top_logprobs) if u.top_logprobs else None,
            )
            for turn_id, u in taken.items()
            if u.token_ids
        ],
    )
    connection.executemany(
        "INSERT OR REPLACE INTO turn_segments VALUES (?,?,?)",
        [(turn_id, position, segment) for turn_id, u in taken.items() for position, segment in u.segments],
    )


def _delete_sessions(connection: sqlite3.Connection, session_ids: Sequence[SessionId]) -> list[TurnId]:
    gone = [
        turn_id
        for session_id in session_ids
        for (turn_id,) in connection.execute("SELECT turn_id FROM turns WHERE session_id=?", (session_id,))
    ]
    for table in ("turn_parts", "turn_segments", "turns"):
        connection.executemany(f"DELETE FROM {table} WHERE turn_id=?", [(turn_id,) for turn_id in gone])
    return gone


def _read_turns(connection: sqlite3.Connection, where: str, values: tuple[str, ...]) -> list[TurnRecord]:
    rows = connection.execute(
        f"SELECT turn_id, request, outcome, num_tokens FROM turns WHERE {where} ORDER BY rowid", values
    )
    return [_read_turn(connection, *row) for row in rows.fetchall()]


def _read_sessions(connection: sqlite3.Connection) -> list[SessionId]:
    return [
        row[0] for row in connection.execute("SELECT session_id FROM turns GROUP BY session_id ORDER BY min(rowid)")
    ]


def _read_kept(connection: sqlite3.Connection, session_id: SessionId) -> list[KeptTurn]:
    rows = connection.execute(
        "SELECT turn_id, request, outcome, num_tokens, ended_unix_s FROM turns WHERE session_id=? ORDER BY rowid",
        (session_id,),
    )
    return [KeptTurn(_read_turn(connection, *row[:4]), row[2], row[4]) for row in rows.fetchall()]


def _read_turn(
    connection: sqlite3.Connection, turn_id: str, request: bytes, outcome: Outcome | None, num_tokens: int | None
) -> TurnRecord:
    token_ids, logprobs = array("q"), array("d")
    top_logprobs: list[tuple[TopLogprob, ...]] = []
    for ids, probs, tops in connection.execute(
        "SELECT token_ids, logprobs, top_logprobs FROM turn_parts WHERE turn_id=? ORDER BY part", (turn_id,)
    ):
        token_ids.frombytes(ids)
        logprobs.frombytes(probs)
        if tops is not None:
            top_logprobs += msgspec.msgpack.decode(tops, type=list[tuple[TopLogprob, ...]])
    segments = [
        msgspec.msgpack.decode(blob, type=Segment)
        for (blob,) in connection.execute(
            "SELECT segment FROM turn_segments WHERE turn_id=? ORDER BY position", (turn_id,)
        )
    ]
    kept = len(token_ids) if num_tokens is None else num_tokens
    return TurnRecord(
        request=msgspec.msgpack.decode(request, type=TurnRequest),
        token_ids=list(token_ids[:kept]),
        logprobs=list(logprobs[:kept]),
        top_logprobs=top_logprobs[:kept],
        segments=_close_segments([s for s in segments if s.start < max(1, kept)], kept),
        finish_reason=outcome if outcome in ("stop", "length") else None,
    )


def _close_segments(segments: list[Segment], num_tokens: int) -> list[Segment]:
    """Each segment ends where the next begins; the last one with the tokens that are known."""
    ends = [*(later.start for later in segments[1:]), num_tokens][: len(segments)]
    return [msgspec.structs.replace(segment, end=end) for segment, end in zip(segments, ends, strict=True)]
