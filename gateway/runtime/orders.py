"""Orders: work that changes state in several steps, and comes to its end whether or not its caller stays.

A handler is cancelled when its client hangs up. What it has begun would stop between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Orders:
    """Those of one owner that are under way. Callers bound them: each waits for its own."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[Any]] = set()

    async def carry_out(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Its result, for a caller that stays."""
        return await asyncio.shield(self.begin(work, name))

    def begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """To be shielded by who waits for it."""
        task = asyncio.create_task(work, name=name)
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever still waits

    async def done(self) -> None:
        """Until all have come to their end."""
        while self._under_way:
            await asyncio.wait(self._under_way)
