"""What outlives the gateway of its live sessions, beside their turns: who they are, their keys, and what turns said.

Invariants:
- a session is here from its making to its end; its end in the experience buffer and its end here are one commit;
- a turn's messages are here once its answer was told.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.sessions import SessionSpec
from gateway.core.types import SessionId, TurnId
from gateway.data.database import Database

Message = Mapping[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions(
    session_id TEXT PRIMARY KEY, spec BLOB NOT NULL, api_key TEXT NOT NULL, created_unix_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS turn_messages(
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, head BLOB NOT NULL, messages BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS turn_messages_by_session ON turn_messages(session_id);
CREATE TRIGGER IF NOT EXISTS finished AFTER INSERT ON trajectories BEGIN
    DELETE FROM sessions WHERE session_id = NEW.session_id;
END
"""
"""The trigger: a gateway that dies between a session's two ends would otherwise give out its trajectory twice."""


class KeptSession(msgspec.Struct, frozen=True):
    """`messages`: by turn, its head and what it added to its parent's."""

    spec: SessionSpec
    api_key: str
    created_unix_s: float
    messages: dict[str, tuple[Message, tuple[Message, ...]]]


class SessionStore:
    """Opened after the experience buffer, whose table it watches."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> None:
        await self._database.run(_make_tables)

    def add(self, spec: SessionSpec, api_key: str, created_unix_s: float) -> None:
        """Never waits: it is on disk before what is written after it. `sessions_max` bounds them."""
        row = (spec.session_id, msgspec.msgpack.encode(spec), api_key, created_unix_s)
        self._database.post(
            lambda connection: connection.execute("INSERT OR REPLACE INTO sessions VALUES (?,?,?,?)", row)
        )

    async def written(self) -> None:
        """Everything added before is on disk."""
        await self._database.run(lambda connection: None)

    async def told(self, session_id: SessionId, turn_id: TurnId, head: Message, messages: Sequence[Message]) -> None:
        row = (turn_id, session_id, msgspec.msgpack.encode(head), msgspec.msgpack.encode(list(messages)))
        await self._database.run(
            lambda connection: connection.execute("INSERT OR REPLACE INTO turn_messages VALUES (?,?,?,?)", row) and None
        )

    async def forget(self, session_id: SessionId) -> None:
        await self._database.run(lambda connection: _delete(connection, session_id))

    async def load(self) -> list[KeptSession]:
        """Every live session, oldest first."""
        return await self._database.run(_load)


def _make_tables(connection: sqlite3.Connection) -> None:
    statements, _, trigger = _SCHEMA.partition("CREATE TRIGGER")
    for statement in statements.split(";"):
        connection.execute(statement)
    connection.execute("CREATE TRIGGER" + trigger)


def _delete(connection: sqlite3.Connection, session_id: SessionId) -> None:
    for table in ("sessions", "turn_messages"):
        connection.execute(f"DELETE FROM {table} WHERE session_id=?", (session_id,))


def _load(connection: sqlite3.Connection) -> list[KeptSession]:
    rows = connection.execute("SELECT spec, api_key, created_unix_s FROM sessions ORDER BY rowid").fetchall()
    return [_kept(connection, *row) for row in rows]


def _kept(connection: sqlite3.Connection, spec: bytes, api_key: str, created_unix_s: float) -> KeptSession:
    made = msgspec.msgpack.decode(spec, type=SessionSpec)
    messages = connection.execute(
        "SELECT turn_id, head, messages FROM turn_messages WHERE session_id=?", (made.session_id,)
    )
    return KeptSession(
        made,
        api_key,
        created_unix_s,
        {turn: (msgspec.msgpack.decode(head), tuple(msgspec.msgpack.decode(said))) for turn, head, said in messages},
    )
