"""Work that no caller waits for: its failures are contained and logged, each once with its cause."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from protos.failures import FailureLog


class BackgroundTasks:
    """Tasks of one event loop without a caller. A task that fails is logged under its coroutine's name."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._failures = FailureLog(log)
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        what = f"background work failed ({getattr(task.get_coro(), '__qualname__', 'unnamed')})"
        error = task.exception()
        if isinstance(error, Exception):
            self._failures.failed(what, error)
        elif error is not None:
            self._log.error(what, exc_info=error)
        else:
            self._failures.recovered(what)

    async def join(self) -> None:
        """Waits until all tasks have ended, those included that they start."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancels all tasks and waits for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
