"""Live sessions on disk, beside their turns: their specifications, API keys, messages and rewards.

Invariants:
- a session is here from its creation to its end; its end here and in the experience buffer are one commit, where that
  is in the database;
- a turn's messages are here before the client sees its finish, its reward before the call that gave it returns;
- of the last `ENDED_MAX` sessions that ended, how each ended stays.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.endings import Ended, Unrewarded
from gateway.core.sessions import SessionSpec
from gateway.core.tree import Turn
from gateway.core.types import SessionId
from gateway.store.damage import leaving_out, reading
from gateway.store.database import Database, Operation
from protos.decoding import decode_msgpack

Message = Mapping[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions(
    session_id TEXT PRIMARY KEY, spec BLOB NOT NULL, api_key TEXT NOT NULL, created_unix_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS turn_messages(
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, head BLOB NOT NULL, messages BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS turn_messages_by_session ON turn_messages(session_id);
CREATE TABLE IF NOT EXISTS turn_rewards(
    turn_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, reward REAL, leaf_reward REAL);
CREATE INDEX IF NOT EXISTS turn_rewards_by_session ON turn_rewards(session_id);
CREATE TABLE IF NOT EXISTS unrewarded(session_id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS secrets(name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS ended(number INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, body BLOB);
CREATE TRIGGER IF NOT EXISTS finished AFTER INSERT ON trajectories BEGIN
    DELETE FROM sessions WHERE session_id = NEW.session_id;
    DELETE FROM turn_messages WHERE session_id = NEW.session_id;
    DELETE FROM turn_rewards WHERE session_id = NEW.session_id;
    DELETE FROM unrewarded WHERE session_id = NEW.session_id;
    INSERT OR REPLACE INTO ended(session_id) VALUES (NEW.session_id);
END
"""
"""The trigger ends the session in the commit that adds its trajectory: a gateway that died between two commits would
recover the session, finish it again, and hand its trajectory to the trainer twice."""
_TABLES = ("sessions", "turn_messages", "turn_rewards", "unrewarded")

ENDED_MAX = 10_000
"""Ended sessions that are kept, so that a second finish gets the result of the first."""


FINISH_SECRET = "finish_keys"  # noqa: S105 - the row's name
SECRET_BYTES = 32


class KeptSession(msgspec.Struct, frozen=True):
    """`messages`: by turn, its head and what it adds to its parent's. `rewards`: by turn, its own and its leaf's."""

    spec: SessionSpec
    api_key: str
    created_unix_s: float
    messages: dict[str, tuple[Message, tuple[Message, ...]]]
    rewards: dict[str, tuple[float | None, float | None]]
    unrewarded: Unrewarded | None


def _nothing(connection: sqlite3.Connection) -> None:
    return None


class SessionStore:
    """Opened after the experience buffer: its trigger is on that buffer's table.

    `end` records what has happened already, so it waits while the disk cannot be written. The partial-response pool
    writes the messages of turns, together with the turns' ends.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.finish_secret = b""  # of which the finish keys of all sessions are made; the same in every life

    async def open(self) -> None:
        await self._database.run(_make_tables)
        self.finish_secret = await self._database.run(_finish_secret)

    def check(self) -> None:
        """Raises Unavailable while nothing can be written."""
        self._database.check()

    def add(self, spec: SessionSpec, api_key: str, created_unix_s: float) -> None:
        """Queues the write and returns: it is on disk before any later write, and waits while the disk cannot be
        written (`check` before). The gateway's `sessions_max` bounds how many are queued.
        """
        row = (spec.session_id, msgspec.msgpack.encode(spec), api_key, created_unix_s)
        self._database.post_owed(
            lambda connection: connection.execute("INSERT OR REPLACE INTO sessions VALUES (?,?,?,?)", row)
        )

    async def written(self) -> None:
        """Everything added before is on disk."""
        await self._database.owe(lambda connection: None)

    async def synced(self) -> None:
        """Everything written before survives a power cut, too."""
        await self._database.synced()

    async def rewarded(self, session_id: SessionId, turns: Sequence[Turn]) -> None:
        rows = [(turn.turn_id, session_id, turn.reward, turn.leaf_reward) for turn in turns]
        await self._database.run(
            lambda connection: (
                connection.executemany("INSERT OR REPLACE INTO turn_rewards VALUES (?,?,?,?)", rows) and None
            )
        )

    async def unrewarded(self, session_id: SessionId, waits: Unrewarded) -> None:
        row = (session_id, msgspec.msgpack.encode(waits))
        await self._database.run(
            lambda connection: connection.execute("INSERT OR REPLACE INTO unrewarded VALUES (?,?)", row) and None
        )

    def ending(self, session_id: SessionId, ended: Ended) -> Operation[None]:
        """The operation that removes the session but for how it ended."""
        row = (session_id, msgspec.msgpack.encode(ended))
        return lambda connection: _end(connection, row)

    async def end(self, session_id: SessionId, ended: Ended, *, along: Operation[object] = _nothing) -> None:
        """Writes `ending`; `along` is the same commit."""
        end = self.ending(session_id, ended)

        def write(connection: sqlite3.Connection) -> None:
            end(connection)
            along(connection)

        await self._database.owe(write)

    async def ended(self) -> list[tuple[SessionId, Ended]]:
        """How the sessions ended that are kept, oldest first."""
        rows = await self._database.run(
            lambda connection: connection.execute("SELECT session_id, body FROM ended ORDER BY number").fetchall()
        )
        return [(name, _ended(name, body)) for name, body in rows]

    async def load(self) -> list[tuple[SessionId, KeptSession | None]]:
        """Every live session, oldest first; None for one with a damaged row."""
        return await self._database.run(_load)


def _ended(name: SessionId, body: bytes | None) -> Ended:
    if body is not None:
        with leaving_out("ended", name):
            return decode_msgpack(body, Ended)
    return Ended("finished")


def _make_tables(connection: sqlite3.Connection) -> None:
    statements, _, trigger = _SCHEMA.partition("CREATE TRIGGER")
    for statement in statements.split(";"):
        connection.execute(statement)
    connection.execute("CREATE TRIGGER" + trigger)


def _finish_secret(connection: sqlite3.Connection) -> bytes:
    found = connection.execute("SELECT value FROM secrets WHERE name=?", (FINISH_SECRET,)).fetchone()
    if found is not None:
        return bytes(found[0])
    made = secrets.token_bytes(SECRET_BYTES)
    connection.execute("INSERT INTO secrets VALUES (?,?)", (FINISH_SECRET, made))
    return made


def _end(connection: sqlite3.Connection, row: tuple[SessionId, bytes]) -> None:
    for table in _TABLES:
        connection.execute(f"DELETE FROM {table} WHERE session_id=?", row[:1])  # noqa: S608 - of `_TABLES`
    connection.execute("INSERT OR REPLACE INTO ended(session_id, body) VALUES (?,?)", row)
    connection.execute("DELETE FROM ended WHERE number <= (SELECT max(number) FROM ended) - ?", (ENDED_MAX,))


def _load(connection: sqlite3.Connection) -> list[tuple[SessionId, KeptSession | None]]:
    rows = connection.execute(
        "SELECT session_id, spec, api_key, created_unix_s FROM sessions ORDER BY rowid"
    ).fetchall()
    found: list[tuple[SessionId, KeptSession | None]] = []
    for session_id, *row in rows:
        kept = None
        with leaving_out("sessions", session_id):
            kept = _kept(connection, *row)
        found.append((session_id, kept))
    return found


def _kept(connection: sqlite3.Connection, spec: bytes, api_key: str, created_unix_s: float) -> KeptSession:
    made = decode_msgpack(spec, SessionSpec)
    messages: dict[str, tuple[Message, tuple[Message, ...]]] = {}
    for turn, head, body in connection.execute(
        "SELECT turn_id, head, messages FROM turn_messages WHERE session_id=?", (made.session_id,)
    ):
        with reading("turn_messages", turn):
            messages[turn] = msgspec.msgpack.decode(head), tuple(msgspec.msgpack.decode(body))
    rewards = connection.execute(
        "SELECT turn_id, reward, leaf_reward FROM turn_rewards WHERE session_id=?", (made.session_id,)
    )
    waits = connection.execute("SELECT body FROM unrewarded WHERE session_id=?", (made.session_id,)).fetchone()
    with reading("unrewarded", made.session_id):
        unrewarded = None if waits is None else decode_msgpack(waits[0], Unrewarded)
    return KeptSession(
        made,
        api_key,
        created_unix_s,
        messages,
        {turn: (own, leaf) for turn, own, leaf in rewards},
        unrewarded,
    )
