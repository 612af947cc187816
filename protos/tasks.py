"""Tasks without a caller, or that outlast theirs: each fails independently, and is owned from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from protos.failures import FailureLog

T = TypeVar("T")


class Tasks:
    """The running tasks of one owner, on one event loop. An error in one ends that one alone."""

    def __init__(self, log: logging.Logger | None = None) -> None:
        """`log`: of their failures, each once for as long as its cause stays the same; None: a failure is the caller's
        that awaits the task, and nobody else's."""
        self._failures = None if log is None else FailureLog(log)
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name or f"background work {getattr(work, '__qualname__', 'unnamed')}")
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error, what = task.exception(), f"{task.get_name()} failed"  # retrieved: nobody has to, who need not
        if self._failures is None:
            return
        if isinstance(error, Exception):
            self._failures.failed(what, error)
        elif error is None:
            self._failures.recovered(what)

    async def join(self) -> None:
        """Returns when every task has ended, those included that they start."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Cancels every task, and those that they start meanwhile, until none is left."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)
