"""Work that changes state in several steps, and is completed whether or not its caller stays.

aiohttp cancels a handler when its client hangs up. Without a task of its own, what the handler began would stop between
two steps, such as a session that has ended in memory and not on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from protos.tasks import Tasks

T = TypeVar("T")


class ShieldedTasks(Tasks):
    """The running tasks of one owner. Callers bound their number: each waits for its own, and gets its error."""

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Starts `work`, and returns its result to a caller that stays."""
        return await asyncio.shield(self.start(work, name))

    async def drain(self) -> None:
        """Returns when every task has ended."""
        await self.join()
