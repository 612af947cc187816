"""Where a table is imported to: the database of a stopped gateway, or a running gateway."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from gateway.experience import ExperienceBuffer
from gateway.store.database import Database
from gateway.store.layout import claim
from gateway.store.sessions import SessionStore
from gateway.tables.schema import KeptFor
from protos.errors import Conflict
from protos.trajectories import Trajectory


class Target(Protocol):
    async def add(self, leaves: Sequence[Trajectory]) -> bool:
        """Adds a session, as one that no reader has had; False if the store has it already. Conflict while it is
        live."""
        ...

    async def close_group(self, group_id: str, members: int) -> None:
        """The group ended with so many members, fewer than its size."""
        ...


class DatabaseTarget:
    """A `--data` directory, new or of a gateway that is stopped. It keeps ids of `kept_for` from then on."""

    def __init__(self, path: Path, kept_for: KeptFor) -> None:
        self._path, self._kept_for = path, kept_for
        self._stack = AsyncExitStack()
        self._buffer: ExperienceBuffer
        self._live: set[str] = set()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            database = await stack.enter_async_context(Database(self._path))
            kept_for = self._kept_for
            await database.run(lambda opened: claim(opened, str(self._path), kept_for.model, kept_for.vocabulary))
            # Without bounds: the gateway that starts on it next evicts what is beyond its own.
            self._buffer = ExperienceBuffer(database, capacity=sys.maxsize, bytes_max=sys.maxsize)
            sessions = SessionStore(database)
            await self._buffer.open()
            await sessions.open()
            stack.push_async_callback(database.synced)
            stack.push_async_callback(self._buffer.close)
            self._live = {name for name, _ in await sessions.load()}
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def add(self, leaves: Sequence[Trajectory]) -> bool:
        name = leaves[0].session_id
        if name in self._live:
            raise Conflict(
                f"session {name!r} is live in {self._path}: an import would end it",
                hint="start its gateway, finish or abandon the session, then import",
            )
        if self._buffer.has(name):
            return False
        await self._buffer.add(*leaves)
        return True

    async def close_group(self, group_id: str, members: int) -> None:
        await self._buffer.close_group(group_id, members)
