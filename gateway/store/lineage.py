"""Which registry the versions of the model came from: kept, so that another one is noticed after a restart."""

from __future__ import annotations

from gateway.store.database import Database
from paramserver.client import Lineage

_SCHEMA = "CREATE TABLE IF NOT EXISTS lineage(one INTEGER PRIMARY KEY, store_id TEXT NOT NULL, newest INTEGER NOT NULL)"


class LineageStore:
    """`lineage` is the gateway's one; who changes it calls `keep`."""

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
        """Written in its turn, and tried again while the disk is full."""
        row = (self.lineage.store_id, self.lineage.newest)
        self._database.post_owed(
            lambda connection: connection.execute("INSERT OR REPLACE INTO lineage VALUES (1,?,?)", row) and None
        )
