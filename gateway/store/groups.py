"""Groups on disk: one row each, replaced whenever a member ends."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field

import msgspec

from gateway.core.groups import GroupState
from gateway.core.sessions import SessionSpec
from gateway.core.types import GroupId, SessionId
from gateway.store.damage import leaving_out
from gateway.store.database import Database
from protos.decoding import decode_msgpack

_SCHEMA = "CREATE TABLE IF NOT EXISTS groups(group_id TEXT PRIMARY KEY, body BLOB NOT NULL)"


@dataclass(slots=True)
class Group:
    """`keys`: the API keys of its live members. `replaced`: failed sessions, each with the session in its place."""

    state: GroupState
    spec: SessionSpec
    keys: dict[SessionId, str] = field(default_factory=dict)
    replaced: dict[SessionId, SessionId] = field(default_factory=dict)


class GroupStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> None:
        await self._database.run(lambda connection: connection.execute(_SCHEMA) and None)

    async def save(self, group: Group) -> None:
        """When this returns the group's current state is on disk, and every write before it."""
        row = (group.state.group_id, msgspec.msgpack.encode(group))
        await self._database.owe(lambda connection: _save(connection, row))

    async def forget(self, group_id: GroupId) -> None:
        await self._database.owe(
            lambda connection: connection.execute("DELETE FROM groups WHERE group_id=?", (group_id,)) and None
        )

    async def load(self) -> list[Group]:
        """Every group in the store, oldest first."""
        rows = await self._database.run(
            lambda connection: connection.execute("SELECT group_id, body FROM groups ORDER BY rowid").fetchall()
        )
        found: list[Group] = []
        for group_id, body in rows:
            with leaving_out("groups", group_id):
                found.append(decode_msgpack(body, Group))
        return found


def _save(connection: sqlite3.Connection, row: tuple[str, bytes]) -> None:
    connection.execute("INSERT INTO groups VALUES (?,?) ON CONFLICT(group_id) DO UPDATE SET body=excluded.body", row)
