"""The partial-response pool on disk: tables `turns`, `turn_journal`, `turn_parts` and `turn_segments`.

Invariants:
- a flush is one row of the journal, however many turns it has tokens of: a row for each cost some 25 us and, beside a
  busy event loop, as many waits for the interpreter;
- `fold` makes the journal into rows of its turns, each token once: before anything is read, and before the journal has
  more than `JOURNAL_TOKENS_MAX` tokens.

Everything here runs in the database's thread, within its transaction.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gateway.core.types import Segment, SessionId, TopLogprob, TurnId, TurnRecord, TurnRequest

Outcome = Literal["stop", "length", "aborted", "lost"]
"""How a turn ended: a finish reason, given up by the client, or by the gateway."""

JOURNAL_TOKENS_MAX = 500_000
"""About 8 MB: what a start has to fold at most, and a fold takes (some 30 ms in a thread of its own)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS turns(
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, request BLOB NOT NULL, begun_unix_s REAL NOT NULL,
    outcome TEXT, num_tokens INTEGER, ended_unix_s REAL);
CREATE INDEX IF NOT EXISTS turns_by_session ON turns(session_id);
CREATE TABLE IF NOT EXISTS turn_journal(flush INTEGER PRIMARY KEY, parts BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS turn_parts(
    part INTEGER PRIMARY KEY, turn_id TEXT NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    top_logprobs BLOB);
CREATE INDEX IF NOT EXISTS turn_parts_by_turn ON turn_parts(turn_id);
CREATE TABLE IF NOT EXISTS turn_segments(
    turn_id TEXT NOT NULL, position INTEGER NOT NULL, segment BLOB NOT NULL, PRIMARY KEY(turn_id, position));
"""


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn on disk; in flight when it has no outcome."""

    record: TurnRecord
    outcome: Outcome | None
    ended_unix_s: float | None


Begun = tuple[TurnId, SessionId, bytes, float]
"""A row of `turns`: its request, and when it began."""


Appended = tuple[TurnId, Sequence[int], Sequence[float], Sequence[tuple[TopLogprob, ...]]]
"""A turn's tokens that came together: ids, logprobs, and alternatives where they were asked for."""


@dataclass(slots=True)
class Unwritten:
    """What the disk has not, of all turns, in the order in which it came; made into rows by who writes."""

    begun: list[Begun] = field(default_factory=list)
    tokens: list[Appended] = field(default_factory=list)
    segments: list[tuple[TurnId, int, bytes]] = field(default_factory=list)
    ended: list[tuple[Outcome, float, TurnId]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.begun or self.segments or self.ended)


@dataclass(slots=True)
class _Tokens:
    """Of one turn."""

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)


class _Part(msgspec.Struct, array_like=True):
    """Some tokens of a turn, in the journal."""

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


def reopen(connection: sqlite3.Connection, turn_id: TurnId) -> int:
    connection.execute("UPDATE turns SET outcome=NULL, ended_unix_s=NULL WHERE turn_id=?", (turn_id,))
    [count] = connection.execute("SELECT count(*) FROM turn_segments WHERE turn_id=?", (turn_id,)).fetchone()
    return int(count)


def write(connection: sqlite3.Connection, taken: Unwritten) -> None:
    """All that is unwritten. Each statement is a wait for the interpreter: those without rows are left out."""
    if taken.begun:
        connection.executemany(
            "INSERT INTO turns(turn_id, session_id, request, begun_unix_s) VALUES (?,?,?,?)", taken.begun
        )
    if taken.tokens:
        connection.execute("INSERT INTO turn_journal(parts) VALUES (?)", (_encode_parts(_parts(taken.tokens)),))
    if taken.segments:
        connection.executemany("INSERT OR REPLACE INTO turn_segments VALUES (?,?,?)", taken.segments)
    if taken.ended:
        connection.executemany("UPDATE turns SET outcome=?, ended_unix_s=? WHERE turn_id=?", taken.ended)


def _parts(appended: Iterable[Appended]) -> list[_Part]:
    """One for each turn."""
    found: dict[TurnId, _Tokens] = {}
    for turn_id, token_ids, logprobs, top_logprobs in appended:
        turn = found.get(turn_id)
        if turn is None:
            turn = found[turn_id] = _Tokens()
        turn.token_ids.extend(token_ids)
        turn.logprobs.extend(logprobs)
        turn.top_logprobs.extend(top_logprobs)
    return [_Part(turn_id, t.token_ids.tobytes(), t.logprobs.tobytes(), t.top_logprobs) for turn_id, t in found.items()]


def fold(connection: sqlite3.Connection) -> None:
    """The journal's tokens become rows of their turns; those of forgotten turns are dropped."""
    found: dict[str, _Tokens] = {}
    for (blob,) in connection.execute("SELECT parts FROM turn_journal ORDER BY flush"):
        for part in _decode_parts(blob):
            turn = found.setdefault(part.turn_id, _Tokens())
            turn.token_ids.frombytes(part.token_ids)
            turn.logprobs.frombytes(part.logprobs)
            turn.top_logprobs += part.top_logprobs
    if not found:
        return
    connection.executemany(
        "INSERT INTO turn_parts(turn_id, token_ids, logprobs, top_logprobs)"
        " SELECT turn_id, ?, ?, ? FROM turns WHERE turn_id=?",
        _rows(found.items()),
    )
    connection.execute("DELETE FROM turn_journal")


def _rows(turns: Iterable[tuple[str, _Tokens]]) -> list[tuple[bytes, bytes, bytes | None, str]]:
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
    for table in ("turn_parts", "turn_segments", "turns"):
        connection.executemany(f"DELETE FROM {table} WHERE turn_id=?", [(turn_id,) for turn_id in gone])
    return gone


def read_in_flight(connection: sqlite3.Connection) -> list[TurnRecord]:
    fold(connection)
    rows = connection.execute(
        "SELECT turn_id, request, outcome, num_tokens FROM turns WHERE outcome IS NULL ORDER BY rowid"
    )
    return [read_turn(connection, *row) for row in rows.fetchall()]


def read_sessions(connection: sqlite3.Connection) -> list[SessionId]:
    return [
        row[0] for row in connection.execute("SELECT session_id FROM turns GROUP BY session_id ORDER BY min(rowid)")
    ]


def read_kept(connection: sqlite3.Connection, session_id: SessionId) -> list[KeptTurn]:
    fold(connection)
    rows = connection.execute(
        "SELECT turn_id, request, outcome, num_tokens, ended_unix_s FROM turns WHERE session_id=? ORDER BY rowid",
        (session_id,),
    )
    return [KeptTurn(read_turn(connection, *row[:4]), row[2], row[4]) for row in rows.fetchall()]


def read_turn(
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
        segments=close_segments([s for s in segments if s.start < max(1, kept)], kept),
        finish_reason=outcome if outcome in ("stop", "length") else None,
    )


def close_segments(segments: list[Segment], num_tokens: int) -> list[Segment]:
    """Each segment ends where the next begins; the last one with the tokens that are known."""
    ends = [*(later.start for later in segments[1:]), num_tokens][: len(segments)]
    return [msgspec.structs.replace(segment, end=end) for segment, end in zip(segments, ends, strict=True)]
