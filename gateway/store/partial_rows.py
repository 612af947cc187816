"""The partial-response pool on disk: tables `turns`, `turn_journal`, `turn_parts`, `turn_segments` and `turn_seen`;
and the writes to `turn_messages`, a table of `gateway.store.sessions`.

Invariants:
- a flush is one row of the journal, however many turns have tokens in it: a row for each turn cost about 25 us and,
  beside a busy event loop, as many waits for the interpreter's lock;
- a turn's row has only the part of its prompt that its parent's path lacks: else each turn would write its session's
  whole history again;
- `fold` turns the journal into rows of its turns, each token once: before any read, and before the journal has more
  than `JOURNAL_TOKENS_MAX` tokens.

Everything here runs in the database's thread, within its transaction.
"""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gateway.core.types import SessionId, TopLogprob, TurnId, TurnRecord, TurnRequest
from gateway.store.damage import reading
from protos.decoding import decode_msgpack
from protos.errors import Corrupt
from protos.trajectories import Segment

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Outcome = Literal["stop", "length", "aborted", "lost"]
"""How a turn ended: a finish reason, "aborted" by its client, or "lost" by the gateway."""

JOURNAL_TOKENS_MAX = 500_000
"""About 8 MB, which a fold handles in some 30 ms, in the database's thread. A start folds at most so much."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS turns(
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, request BLOB NOT NULL, begun_unix_s REAL NOT NULL,
    outcome TEXT, num_tokens INTEGER, ended_unix_s REAL, end_number INTEGER, num_inherited INTEGER);
CREATE INDEX IF NOT EXISTS turns_by_session ON turns(session_id);
CREATE TABLE IF NOT EXISTS turn_journal(flush INTEGER PRIMARY KEY, parts BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS turn_parts(
    part INTEGER PRIMARY KEY, turn_id TEXT NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    top_logprobs BLOB);
CREATE INDEX IF NOT EXISTS turn_parts_by_turn ON turn_parts(turn_id);
CREATE TABLE IF NOT EXISTS turn_segments(
    turn_id TEXT NOT NULL, position INTEGER NOT NULL, segment BLOB NOT NULL, PRIMARY KEY(turn_id, position));
CREATE TABLE IF NOT EXISTS turn_seen(turn_id TEXT PRIMARY KEY, num_tokens INTEGER);
"""


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn on disk; in flight when it has no outcome. `seen`: how many of its tokens a client was sent; None: all, or
    there is no record of it."""

    record: TurnRecord
    outcome: Outcome | None
    ended_unix_s: float | None
    end_number: int | None = None  # None also for a turn that ended before layout 4
    seen: int | None = None


Begun = tuple[TurnId, SessionId, bytes, float, int]
"""A row of `turns`: its request, when it began, and how many ids of its prompt stand in its parent's path instead."""


@dataclass(slots=True)
class Tokens:
    """Tokens of one turn, in order; alternatives where they were requested."""

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Unwritten:
    """All that is not on disk yet, of all turns."""

    begun: list[Begun] = field(default_factory=list)
    tokens: dict[TurnId, Tokens] = field(default_factory=dict)
    segments: list[tuple[TurnId, int, bytes]] = field(default_factory=list)
    ended: list[tuple[Outcome, int | None, float, int, TurnId]] = field(default_factory=list)
    seen: list[tuple[int | None, TurnId]] = field(default_factory=list)
    messages: list[tuple[bytes, bytes, SessionId, TurnId]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.begun or self.segments or self.ended or self.seen or self.messages)

    def by_turn(self) -> dict[TurnId, Unwritten]:
        found: defaultdict[TurnId, Unwritten] = defaultdict(Unwritten)
        for begun in self.begun:
            found[begun[0]].begun.append(begun)
        for turn_id, tokens in self.tokens.items():
            found[turn_id].tokens[turn_id] = tokens
        for segment in self.segments:
            found[segment[0]].segments.append(segment)
        for ended in self.ended:
            found[ended[-1]].ended.append(ended)
        for seen in self.seen:
            found[seen[-1]].seen.append(seen)
        for messages in self.messages:
            found[messages[-1]].messages.append(messages)
        return found


class _Part(msgspec.Struct, array_like=True):
    """Tokens of a turn in one row of the journal."""

    turn_id: str
    token_ids: bytes
    logprobs: bytes
    top_logprobs: list[tuple[TopLogprob, ...]]


_encode_parts = msgspec.msgpack.Encoder().encode
_decode_parts = msgspec.msgpack.Decoder(list[_Part]).decode


def make_tables(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)


def count_segments(connection: sqlite3.Connection) -> list[tuple[TurnId, int]]:
    return connection.execute(
        "SELECT turn_id, (SELECT count(*) FROM turn_segments s WHERE s.turn_id = t.turn_id)"
        " FROM turns t WHERE outcome IS NULL"
    ).fetchall()


def last_end(connection: sqlite3.Connection) -> int:
    """The number of the turn that ended last."""
    [number] = connection.execute("SELECT max(end_number) FROM turns").fetchone()
    return number or 0


def reopen(connection: sqlite3.Connection, turn_id: TurnId) -> int:
    connection.execute(
        "UPDATE turns SET outcome=NULL, num_tokens=NULL, ended_unix_s=NULL, end_number=NULL WHERE turn_id=?", (turn_id,)
    )
    [count] = connection.execute("SELECT count(*) FROM turn_segments WHERE turn_id=?", (turn_id,)).fetchone()
    return int(count)


def write(connection: sqlite3.Connection, taken: Unwritten) -> None:
    """Writes the set. Each statement waits for the interpreter's lock: those without rows are left out."""
    if taken.begun:
        connection.executemany(
            "INSERT INTO turns(turn_id, session_id, request, begun_unix_s, num_inherited) VALUES (?,?,?,?,?)",
            taken.begun,
        )
    if taken.tokens:
        connection.execute("INSERT INTO turn_journal(parts) VALUES (?)", (_encode_parts(_parts(taken.tokens)),))
    if taken.segments:
        connection.executemany("INSERT OR REPLACE INTO turn_segments VALUES (?,?,?)", taken.segments)
    if taken.ended:
        connection.executemany(
            "UPDATE turns SET outcome=?, num_tokens=?, ended_unix_s=?, end_number=? WHERE turn_id=?", taken.ended
        )
    # Only of turns that are kept: a client may read or leave an answer after its session was forgotten.
    if taken.messages:
        connection.executemany(
            "INSERT OR REPLACE INTO turn_messages(head, messages, session_id, turn_id)"
            " SELECT ?, ?, session_id, turn_id FROM turns WHERE session_id=? AND turn_id=?",
            taken.messages,
        )
    if taken.seen:
        connection.executemany(
            "INSERT OR REPLACE INTO turn_seen(num_tokens, turn_id) SELECT ?, turn_id FROM turns WHERE turn_id=?",
            taken.seen,
        )


def _parts(tokens: Mapping[TurnId, Tokens]) -> list[_Part]:
    """One for each turn."""
    return [
        _Part(turn_id, t.token_ids.tobytes(), t.logprobs.tobytes(), t.top_logprobs) for turn_id, t in tokens.items()
    ]


def fold(connection: sqlite3.Connection) -> None:
    """The journal's tokens become rows of their turns; those of forgotten turns are dropped.

    Everything from a damaged row on is dropped, too: a turn may lose its last tokens, never some from its middle.
    Turns in flight continue from what is left.
    """
    found: dict[str, Tokens] = {}
    rows = connection.execute("SELECT flush, parts FROM turn_journal ORDER BY flush").fetchall()
    if not rows:
        return
    try:
        for flush, blob in rows:
            with reading("turn_journal", flush):
                parts = _decode_parts(blob)
            for part in parts:
                turn = found.setdefault(part.turn_id, Tokens())
                turn.token_ids.frombytes(part.token_ids)
                turn.logprobs.frombytes(part.logprobs)
                turn.top_logprobs += part.top_logprobs
    except Corrupt as e:
        log.error("%s; turns lack their tokens since", e)
    connection.executemany(
        "INSERT INTO turn_parts(turn_id, token_ids, logprobs, top_logprobs)"
        " SELECT turn_id, ?, ?, ? FROM turns WHERE turn_id=?",
        _rows(found.items()),
    )
    connection.execute("DELETE FROM turn_journal")


def _rows(turns: Iterable[tuple[str, Tokens]]) -> list[tuple[bytes, bytes, bytes | None, str]]:
    return [
        (
            u.token_ids.tobytes(),
            u.logprobs.tobytes(),
            msgspec.msgpack.encode(u.top_logprobs) if u.top_logprobs else None,
            turn_id,
        )
        for turn_id, u in turns
    ]


def delete_sessions(connection: sqlite3.Connection, session_ids: Sequence[SessionId]) -> list[TurnId]:
    gone = [
        turn_id
        for session_id in session_ids
        for (turn_id,) in connection.execute("SELECT turn_id FROM turns WHERE session_id=?", (session_id,))
    ]
    for table in ("turn_parts", "turn_segments", "turn_seen", "turns"):
        connection.executemany(f"DELETE FROM {table} WHERE turn_id=?", [(turn_id,) for turn_id in gone])  # noqa: S608 - names above
    return gone


def read_in_flight(connection: sqlite3.Connection) -> list[TurnRecord]:
    rows = connection.execute("SELECT turn_id, session_id FROM turns WHERE outcome IS NULL ORDER BY rowid").fetchall()
    kept = {
        turn.record.request.turn_id: turn.record
        for session_id in dict.fromkeys(session_id for _, session_id in rows)
        for turn in read_kept(connection, session_id)
    }
    return [kept[turn_id] for turn_id, _ in rows]


def read_sessions(connection: sqlite3.Connection) -> list[SessionId]:
    return [
        row[0] for row in connection.execute("SELECT session_id FROM turns GROUP BY session_id ORDER BY min(rowid)")
    ]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of `turns`. `request` lacks the `num_inherited` ids of its parent's path."""

    request: TurnRequest
    num_inherited: int
    outcome: Outcome | None
    num_tokens: int | None
    ended_unix_s: float | None
    end_number: int | None
    seen: int | None


def read_kept(connection: sqlite3.Connection, session_id: SessionId) -> list[KeptTurn]:
    """In the order in which they ended, those in flight last, but none before its parent. Corrupt when one of them is
    damaged."""
    fold(connection)
    rows = connection.execute(
        "SELECT turn_id, request, num_inherited, outcome, num_tokens, ended_unix_s, end_number,"
        " (SELECT s.num_tokens FROM turn_seen s WHERE s.turn_id = turns.turn_id) FROM turns WHERE session_id=?"
        " ORDER BY outcome IS NULL, end_number, ended_unix_s, rowid",
        (session_id,),
    )
    read: list[_Row] = []
    for turn_id, request, num_inherited, *rest in rows.fetchall():
        with reading("turns", turn_id):
            read.append(_Row(decode_msgpack(request, TurnRequest), num_inherited or 0, *rest))
    found: list[KeptTurn] = []
    paths: dict[TurnId, tuple[int, ...]] = {}  # all ids up to each turn's end
    for row in _parents_first(read):
        record = _read_turn(connection, _whole(row, paths), row.outcome, row.num_tokens)
        paths[row.request.turn_id] = (*record.request.prompt_ids, *record.token_ids)
        found.append(KeptTurn(record, row.outcome, row.ended_unix_s, row.end_number, row.seen))
    return found


def _parents_first(rows: Sequence[_Row]) -> list[_Row]:
    """In their order, unless a turn stands before its parent: ends were ordered by a clock once, and clocks go back."""
    known = {row.request.turn_id for row in rows}
    placed: dict[TurnId, _Row] = {}
    waiting = list(rows)
    while waiting:
        ready = (row for row in waiting if (parent := row.request.parent) not in known or parent in placed)
        row = next(ready, None)
        if row is None:
            raise Corrupt(f"{len(waiting)} of its turns extend each other in a ring")
        placed[row.request.turn_id] = row
        waiting.remove(row)
    return list(placed.values())


def _whole(row: _Row, paths: Mapping[TurnId, tuple[int, ...]]) -> TurnRequest:
    """The request with the ids of its parent's path. Corrupt when that has fewer."""
    request = row.request
    if not row.num_inherited:
        return request
    inherited = () if request.parent is None else paths.get(request.parent, ())[: row.num_inherited]
    if len(inherited) < row.num_inherited:
        lacks = row.num_inherited - len(inherited)
        raise Corrupt(
            f"turn {request.turn_id} lacks {lacks} of the {row.num_inherited} ids that it shares with {request.parent}"
        )
    return dataclasses.replace(request, prompt_ids=(*inherited, *request.prompt_ids))


def _read_turn(
    connection: sqlite3.Connection, request: TurnRequest, outcome: Outcome | None, num_tokens: int | None
) -> TurnRecord:
    turn_id = request.turn_id
    token_ids, logprobs = array("q"), array("d")
    top_logprobs: list[tuple[TopLogprob, ...]] = []
    for part, ids, probs, tops in connection.execute(
        "SELECT part, token_ids, logprobs, top_logprobs FROM turn_parts WHERE turn_id=? ORDER BY part", (turn_id,)
    ):
        with reading("turn_parts", part):
            token_ids.frombytes(ids)
            logprobs.frombytes(probs)
            if tops is not None:
                top_logprobs += decode_msgpack(tops, list[tuple[TopLogprob, ...]])
    segments: list[Segment] = []
    for position, blob in connection.execute(
        "SELECT position, segment FROM turn_segments WHERE turn_id=? ORDER BY position", (turn_id,)
    ):
        with reading("turn_segments", (turn_id, position)):
            segments.append(decode_msgpack(blob, Segment))
    kept = len(token_ids) if num_tokens is None else num_tokens
    if len(token_ids) < kept:
        raise Corrupt(f"turn {turn_id} lacks {kept - len(token_ids)} of its {kept} tokens")
    return TurnRecord(
        request=request,
        token_ids=list(token_ids[:kept]),
        logprobs=list(logprobs[:kept]),
        top_logprobs=top_logprobs[:kept],
        segments=close_segments([s for s in segments if s.start < max(1, kept)], kept),
        finish_reason=outcome if outcome in ("stop", "length") else None,
    )


def close_segments(segments: list[Segment], num_tokens: int) -> list[Segment]:
    """Each segment ends where the next one begins, the last one with the turn's tokens."""
    ends = [*(later.start for later in segments[1:]), num_tokens][: len(segments)]
    return [msgspec.structs.replace(segment, end=end) for segment, end in zip(segments, ends, strict=True)]
