"""Tasks that run beside each other and fail independently: watchers, tethers, loads, loops.

Invariants:
- an error in one task ends that task alone; it is logged with its cause, once for as long as the cause stays the same;
- a task of `keep_running` starts again after a wait, and its owner gets the error;
- a task is owned here from its start to its end, and `close` ends all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from protos.errors import Unavailable
from protos.failures import FailureLog
from protos.tasks import Tasks

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5
"""Before a task that failed starts again; doubled after each further failure."""
RETRY_MAX_S = 30.0


class Supervisor(Tasks):
    """Owner of tasks, none of which may end another."""

    def __init__(self) -> None:
        super().__init__(log)

    def keep_running(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        on_error: Callable[[Exception], object] = lambda error: None,
    ) -> asyncio.Task[None]:
        """Runs `work` until it returns or is cancelled; after an error, which `on_error` gets, again."""
        return self.start(_keep_running(work, name, on_error), name)


def log_failure(task: asyncio.Task[Any]) -> None:
    """A task's done callback: logs what it failed with, at once.

    An error that nobody retrieves is logged by asyncio, too, but only when the collector finds the task: at any time
    later, in the midst of anything, or never.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed: %r", task.get_name(), error, exc_info=error)


async def _keep_running(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, on_error: Callable[[Exception], object]
) -> None:
    loop = asyncio.get_running_loop()
    wait_s, failures = RETRY_S, FailureLog(log)
    while True:
        began = loop.time()
        try:
            await rpc_result(work())
            return
        except Exception as e:  # noqa: BLE001  (whatever it was: it is logged, and the work begins again)
            if loop.time() - began > RETRY_MAX_S:
                wait_s, failures = RETRY_S, FailureLog(log)  # it ran well for long: this is a new fault
            failures.failed(f"{name} failed, and begins again until it does not", e)
            on_error(e)
        await asyncio.sleep(wait_s)
        wait_s = min(RETRY_MAX_S, 2 * wait_s)


async def rpc_result(work: Awaitable[T]) -> T:
    """The result of `work`; Unavailable where gRPC cancelled it.

    gRPC raises CancelledError in a call whose channel is closed by another task. Taken for a cancellation of this task,
    it would end the task in silence. `cancelling()` tells the two apart.
    """
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("its connection was closed meanwhile", hint="it is tried again") from None
