"""The reader whose batches bound admission, on disk: the bound holds after a restart, too."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.store.database import Database

_SCHEMA = """CREATE TABLE IF NOT EXISTS reader(
    one INTEGER PRIMARY KEY, name TEXT NOT NULL, batch INTEGER NOT NULL, group_size INTEGER,
    staleness_max INTEGER NOT NULL)"""


@dataclass(frozen=True, slots=True)
class KeptReader:
    """The size of its batches. `group_size` None: it takes trajectories one by one."""

    name: str
    batch: int
    group_size: int | None
    staleness_max: int


class ReaderStore:
    """`reader`: the one that bounds admission; None before the first."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reader: KeptReader | None = None

    async def open(self) -> None:
        await self._database.run(lambda connection: connection.execute(_SCHEMA) and None)
        row = await self._database.run(
            lambda connection: connection.execute(
                "SELECT name, batch, group_size, staleness_max FROM reader"
            ).fetchone()
        )
        if row is not None:
            self.reader = KeptReader(*row)

    def keep(self, reader: KeptReader) -> None:
        """Queues the write if the reader changed; it is retried while the disk is full."""
        if reader == self.reader:
            return
        self.reader = reader
        row = (reader.name, reader.batch, reader.group_size, reader.staleness_max)
        self._database.post_owed(
            lambda connection: connection.execute("INSERT OR REPLACE INTO reader VALUES (1,?,?,?,?)", row) and None
        )
