"""Snapshots that leave this relay: their memory goes back to the pool once nobody is inside.

Invariants:
- a snapshot is removed once, whatever ends it twice, and after its fetch has ended;
- memory goes back only when `Store.remove` finds no reader inside: a reader that cannot be broken off, such as a disk
  that hangs, keeps the memory, never the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from paramserver.config import show_bytes
from paramserver.memory.store import Snapshot, Store
from paramserver.relay.changes import Changes
from protos.errors import Conflict
from protos.tasks import Tasks

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Removals:
    """Owned by the relay's event loop. `num_running`: snapshots whose memory is expected back soon."""

    def __init__(self, store: Store, tasks: Tasks, changes: Changes) -> None:
        self._store, self._tasks, self._changes = store, tasks, changes
        self.num_running = 0

    def start(self, snapshot: Snapshot, why: str, after: asyncio.Task[None] | None = None) -> asyncio.Task[None]:
        """The task ends when the memory is back, or when a reader keeps it: then it is tried again in background."""
        self.num_running += 1  # at once: the next to need room must not have pins end for what is coming anyway
        return self._tasks.start(self._run(snapshot, why, after))

    async def _run(self, snapshot: Snapshot, why: str, after: asyncio.Task[None] | None) -> None:
        try:
            if after is not None:
                await asyncio.wait([after])
            if snapshot.leaving:  # its fetch failed and its version ended, at the same time
                return
            snapshot.leaving = True
            try:
                await self._remove(snapshot, why)
            except Conflict as error:
                log.error("its memory is kept until they leave: %s", error)
                self._tasks.start(self._retry(snapshot, why))
        finally:
            self.num_running -= 1

    async def _retry(self, snapshot: Snapshot, why: str) -> None:
        while not self._changes.closed:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(Conflict):  # it was logged
                await self._remove(snapshot, why)
                return

    async def _remove(self, snapshot: Snapshot, why: str) -> None:
        quarantined = await asyncio.to_thread(self._store.remove, snapshot, why)
        log.info("dropped %s (%s), quarantined %s", snapshot, why, show_bytes(quarantined))
        self._changes.notify()
