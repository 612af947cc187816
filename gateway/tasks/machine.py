"""The tables of the prompt pool as what commands change: in a gateway's own database, or in one in memory that each of
several gateways has."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from gateway.log.base import Outcome, Timed
from gateway.store.database import Database
from gateway.tasks import rows
from gateway.tasks.commands import Command, LeaseSamples, ReleaseLeases, carry_out
from protos.decoding import decode_msgpack
from protos.errors import LaminarError


class TaskTables:
    """`totals`: the tasks and the leases that there were when the state was taken over, or replaced."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.totals = (0, 0)

    def decode(self, command: bytes) -> Command:
        found: Command = decode_msgpack(command, Command)
        return found

    async def apply(self, commands: Sequence[Timed]) -> Sequence[Outcome]:
        return await self._database.run(lambda connection: [_apply(connection, timed) for timed in commands])

    async def resume(self, now: float) -> None:
        self.totals = await self._database.run(lambda connection: rows.open_tables(connection, now))

    async def dump(self) -> Sequence[bytes]:
        return await self._database.run(rows.dump)

    async def restore(self, dumped: Sequence[bytes]) -> None:
        self.totals = await self._database.run(lambda connection: rows.restore(connection, dumped))

    def undo(self, command: Command) -> Command | None:
        """A request that has a name is sent again, perhaps to another gateway, and gets the same leases; of any other
        no runner will ever know."""
        if not isinstance(command, LeaseSamples) or command.wanted.request is not None:
            return None
        return ReleaseLeases([f"task-{name}" for name in command.wanted.names])

    def keeps(self, body: str) -> bool:
        return False


def _apply(connection: sqlite3.Connection, timed: Timed) -> Outcome:
    """An error of the command is its outcome, on every gateway alike."""
    connection.execute("SAVEPOINT command")
    try:
        return carry_out(connection, timed.command, timed.unix_s)
    except LaminarError as e:
        connection.execute("ROLLBACK TO command")
        return e
    finally:
        connection.execute("RELEASE command")
