"""The commands of a gateway that is alone: carried out at once, in the order in which they come."""

from __future__ import annotations

from typing import Any

from gateway.core.commands import Effect
from gateway.log.base import Hooks, Machine, Ordering, Timed
from gateway.runtime.clock import unix_s
from gateway.store.database import Database


class Local:
    """`database`: where the machine keeps its state. Its owner closes it."""

    def __init__(self, machine: Machine, hooks: Hooks, database: Database) -> None:
        self._machine, self._hooks, self._database = machine, hooks, database

    async def open(self) -> None:
        await self._machine.resume(self.now())
        self._hooks.restored()

    async def close(self) -> None:
        pass

    def now(self) -> float:
        return unix_s()

    def check(self) -> None:
        self._database.check()

    async def synced(self) -> None:
        await self._database.synced()

    async def look(self) -> None:
        """Nobody else changes anything."""

    async def run(self, command: Any) -> Any:
        [outcome] = await self._machine.apply([Timed(command, self.now())])
        self._hooks.applied(command, outcome, True)
        if isinstance(outcome, Effect):
            return outcome.answer
        raise outcome


def alone(database: Database) -> Ordering:
    return lambda machine, hooks: Local(machine, hooks, database)
