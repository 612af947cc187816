"""Tasks that stand beside each other and fail apart: watchers, tethers, loads, loops.

Invariants:
- what one raises ends that one alone; it is logged with its cause, once for as long as the same goes wrong again;
- one that is to last (`keep`) begins again after a wait, and whoever owns it is told why it stood still;
- a task is owned here from its start until it is over, and `close` ends them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from protos.errors import Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5
"""Before a task that failed begins again; twice as long after each further failure."""
RETRY_MAX_S = 30.0


class StandingTasks:
    """Owner of tasks none of which may end another."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` once."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def keep(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        failed: Callable[[Exception], object] = lambda error: None,
    ) -> asyncio.Task[None]:
        """Runs `work` until it returns or is cancelled; after an error, which `failed` is told, again and again."""
        return self.start(_keep(work, name, failed), name)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %r", task.get_name(), error, exc_info=error)

    async def close(self) -> None:
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


async def _keep(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, failed: Callable[[Exception], object]
) -> None:
    loop = asyncio.get_running_loop()
    wait_s, said = RETRY_S, ""
    while True:
        began = loop.time()
        try:
            await own(work())
            return
        except Exception as e:
            if loop.time() - began > RETRY_MAX_S:
                wait_s, said = RETRY_S, ""  # it went well for long: a new fault
            if repr(e) != said:
                log.error("%s failed, and begins again until it does not: %r", name, e, exc_info=e)
                said = repr(e)
            failed(e)
        await asyncio.sleep(wait_s)
        wait_s = min(RETRY_MAX_S, 2 * wait_s)


async def own(work: Awaitable[T]) -> T:
    """What `work` gives. A cancellation that nobody asked this task for is Unavailable.

    gRPC cancels a call whose channel is closed under it: taken for the task's own end, it would end it in silence.
    """
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("its connection was closed meanwhile", hint="it is tried again") from None
