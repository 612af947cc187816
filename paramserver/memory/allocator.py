"""Allocates pool memory for versions off the event loop, and cuts files in advance for the next version.

Invariants:
- the event loop never waits for the kernel to allocate or free: a thread of its own does that for the whole relay;
- an allocation whose caller left is finished and stays in the pool: the next call for the same version takes it over.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paramserver.config import show_bytes
from paramserver.memory.pool import Allotment, Pool
from protos.errors import OutOfCapacity, Preparing
from protos.tasks import Tasks

log = logging.getLogger(__name__)

PROGRESS_LOG_S = 5.0


@dataclass(eq=False, slots=True)
class _Work:
    """An allotment that is being filled."""

    model: str
    allotment: Allotment
    task: asyncio.Future[None]


class PoolAllocator:
    """The pool as the event loop uses it."""

    def __init__(self, pool: Pool, tasks: Tasks) -> None:
        self._pool, self._tasks = pool, tasks
        self._threads = ThreadPoolExecutor(1, "pool")
        self._cutting: asyncio.Task[None] | None = None
        self._left: list[_Work] = []  # being allocated, and nobody waits for it now

    async def take(self, model: str, sizes: Sequence[int], what: str, *, patience_s: float | None = None) -> Allotment:
        """Memory for a version, to be claimed or released; without any waiting where files of these sizes are free.

        OutOfCapacity when there is no room. Preparing after `patience_s`: the next call goes on waiting for the same.
        """
        self._pool.expect(model, sizes)
        work = next((one for one in self._left if (one.model, one.allotment.sizes) == (model, tuple(sizes))), None)
        if work is not None:
            self._left.remove(work)
        else:
            allotment = self._pool.reserve(sizes)
            if allotment.ready:
                return allotment
            work = _Work(model, allotment, asyncio.ensure_future(self._fill(allotment, what)))
        try:
            await self._wait(work, what, patience_s)
        except OSError as error:  # of one version: others may be smaller, or in fewer files
            raise OutOfCapacity(
                f"memory for {what}, in {len(sizes)} files, cannot be had: {error.strerror}",
                hint="raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else "",
            ) from error
        return work.allotment

    async def _wait(self, work: _Work, what: str, patience_s: float | None) -> None:
        over = False
        try:
            over = bool((await asyncio.wait([work.task], timeout=patience_s))[0])
        finally:
            if not over:
                self._left.append(work)
                self._tasks.start(self._release_after(work))
        if not over:
            raise Preparing(
                f"memory for {what} is being allocated, {_progress(work.allotment)} are there",
                hint="announce it again: this goes on meanwhile",
            )
        work.task.result()

    async def _release_after(self, work: _Work) -> None:
        await asyncio.wait([work.task])
        if work not in self._left:  # another call took it over
            return
        self._left.remove(work)
        if (error := work.task.exception()) is None:
            self._pool.release(work.allotment)
        else:  # the pool took it all back
            log.info("memory for a version that was given up was not allocated: %s", error)

    async def _fill(self, allotment: Allotment, what: str) -> None:
        filling = asyncio.get_running_loop().run_in_executor(self._threads, self._pool.fill, allotment)
        began_at = time.monotonic()
        while not (await asyncio.wait([filling], timeout=PROGRESS_LOG_S))[0]:
            log.info("allocating memory for %s: %s", what, _progress(allotment))
        filling.result()
        log.info("memory for %s: %s in %.2f s", what, show_bytes(allotment.size_bytes), time.monotonic() - began_at)

    def cut(self) -> None:
        """Cuts free memory for the versions that are expected, in the background; does nothing while that goes on."""
        if self._pool.uncut and (self._cutting is None or self._cutting.done()):
            self._cutting = self._tasks.start(self._cut())

    async def _cut(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.cut)

    def stop(self) -> None:
        """Ends allocations at their next piece, and their tasks with them."""
        self._pool.stop()


def _progress(allotment: Allotment) -> str:
    return f"{show_bytes(allotment.bytes_done)} of {show_bytes(allotment.size_bytes)}"
