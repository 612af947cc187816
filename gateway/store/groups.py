"""What outlives the gateway of its groups. One row a group, replaced whenever a member ends."""

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
    """`keys` are the API keys of its live members; `replaced` by which session a failed one was."""

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
        """As it is now, and all that was written before, are on disk when this returns."""
        row = (group.state.group_id, msgspec.msgpack.encode(group))
        await self._database.owe(lambda connection: _save(connection, row))

    async def forget(self, group_id: GroupId) -> None:
        await self._database.owe(
            lambda connection: connection.execute("DELETE FROM groups WHERE group_id=?", (group_id,)) and None
        )

    async def load(self) -> list[Group]:
        """Every group remembered, oldest first."""
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
