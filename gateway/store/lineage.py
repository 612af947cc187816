"""The registry that the model's versions came from, on disk: a gateway that restarts detects that it was replaced."""

from __future__ import annotations

from gateway.store.database import Database
from paramserver.client import Lineage

_SCHEMA = "CREATE TABLE IF NOT EXISTS lineage(one INTEGER PRIMARY KEY, store_id TEXT NOT NULL, newest INTEGER NOT NULL)"


class LineageStore:
    """Holds the gateway's `lineage`; `keep` after every change."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.lineage = Lineage()

    async def open(self) -> None:
        await self._database.run(lambda connection: connection.execute(_SCHEMA) and None)
        row = await self._database.run(
            lambda connection: connection.execute("SELECT store_id, newest FROM lineage").fetchone()
        )
        if row is not None:
            self.lineage = Lineage(*row)

    def keep(self) -> None:
        """Queues the write; it is retried while the disk is full."""
        row = (self.lineage.store_id, self.lineage.newest)
        self._database.post_owed(
            lambda connection: connection.execute("INSERT OR REPLACE INTO lineage VALUES (1,?,?)", row) and None
        )
