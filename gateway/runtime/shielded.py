"""Work that changes state in several steps, and is completed whether or not its caller stays.

aiohttp cancels a handler when its client hangs up. Without a task of its own, what the handler began would stop between
two steps, such as a session that has ended in memory and not on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ShieldedTasks:
    """The running tasks of one owner. Callers bound their number: each waits for its own."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Starts `work`, and returns its result to a caller that stays."""
        return await asyncio.shield(self.start(work, name))

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """The caller awaits it behind a shield."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: whoever still awaits the task gets it, and nobody else has to

    async def drain(self) -> None:
        """Returns when every task has ended."""
        while self._running:
            await asyncio.wait(self._running)
