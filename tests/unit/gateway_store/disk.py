"""A disk that is full, and what waits for it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from gateway.store import Database


@dataclass
class Disk:
    """One that SQLite finds full, from its own limit of pages, for whatever is written by `write`."""

    full: bool = False

    async def make(self, database: Database) -> None:
        await database.run(lambda connection: connection.execute("CREATE TABLE b(x BLOB)") and None)

    def write(self, connection: sqlite3.Connection) -> None:
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages if self.full else 1_000_000}")
        connection.execute("INSERT INTO b VALUES (zeroblob(100000))")


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert condition(), what
