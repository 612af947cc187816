"""What this gateway has committed and a shared store may not have yet: rows of its own database, in order.

Invariants:
- a row is committed together with the end of its session (`along`), and synced, before it is sent;
- it is deleted after the shared store has it. So what was committed lands, over any number of deaths of either, and the
  store, which knows what landed, takes each once;
- the gateway has a name of its own, which stays with its `--data`: the store knows by it what this gateway sent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from gateway.store.damage import leaving_out
from gateway.store.database import Database, Operation
from gateway.store.layout import gateway_name
from protos.decoding import decode_msgpack

_SCHEMA = """
CREATE TABLE IF NOT EXISTS outbox(
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, name TEXT NOT NULL, content BLOB NOT NULL)
"""

Kind = Literal["finish", "close_group", "drop_group"]


class Finish(msgspec.Struct, frozen=True):
    """A finished session. `facts`: encoded, as they are kept; `row`: `protos.packed`."""

    group_id: str
    oldest_version: int
    facts: bytes
    row: bytes


@dataclass(frozen=True, slots=True)
class Sending:
    """A row. `name`: the session's or group's id. `content`: a `Finish`; for `close_group` the number of members."""

    number: int
    kind: Kind
    name: str
    content: Finish | int

    @property
    def num_bytes(self) -> int:
        return len(self.content.row) if isinstance(self.content, Finish) else 0


class Outbox:
    """Rows of the gateway's database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.gateway = ""

    async def open(self) -> list[Sending]:
        """Makes the tables; returns what an earlier life left, oldest first."""
        self.gateway, rows = await self._database.run(_open)
        return [sending for row in rows if (sending := _sending(*row)) is not None]

    async def put(
        self, kind: Kind, name: str, content: Finish | int, along: Operation[object] | None = None
    ) -> Sending:
        """On disk, synced, with `along`, when it returns. Raises LaminarError without any effect."""
        body = msgspec.msgpack.encode(content)

        def write(connection: sqlite3.Connection) -> int:
            insert = "INSERT INTO outbox(kind, name, content) VALUES (?,?,?) RETURNING number"
            [number] = connection.execute(insert, (kind, name, body)).fetchone()
            if along is not None:
                along(connection)
            return int(number)

        number = await self._database.run(write)
        # Sent before it is synced, a finish would be in the store although a power cut gave its session back.
        await self._database.synced()
        return Sending(number, kind, name, content)

    async def delete(self, sent: Sequence[Sending]) -> None:
        """The store has them; synced, so that no power cut brings them back."""
        numbers = [(sending.number,) for sending in sent]
        await self._database.owe(
            lambda connection: connection.executemany("DELETE FROM outbox WHERE number=?", numbers) and None
        )
        await self._database.synced()


def _open(connection: sqlite3.Connection) -> tuple[str, list[tuple[int, Kind, str, bytes]]]:
    connection.execute(_SCHEMA)
    rows = connection.execute("SELECT number, kind, name, content FROM outbox ORDER BY number").fetchall()
    return gateway_name(connection), rows


def _sending(number: int, kind: Kind, name: str, content: bytes) -> Sending | None:
    with leaving_out("outbox", number):
        if kind == "finish":
            return Sending(number, kind, name, decode_msgpack(content, Finish))
        return Sending(number, kind, name, decode_msgpack(content, int))
    return None
