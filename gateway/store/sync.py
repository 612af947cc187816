"""Syncs commits to the disk itself, so that they survive a power cut: one fdatasync for all callers that wait.

Invariants:
- a sync that begins after a request covers everything that was committed before the request;
- commits continue during a sync: it has a thread of its own;
- a sync that failed is never repeated: the kernel has marked the pages as written, and the next one would succeed
  without them. Everything is copied into the database file instead, by a checkpoint, which ends with a sync of its own.

SQLite syncs its write-ahead log before it copies from it, and the file afterwards. So at any moment whatever was
committed and not yet synced is in the log, and only the log has to be synced here.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from protos.errors import InDoubt

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Syncer:
    """`wal` is the log's path. `checkpoint` copies all of it into the database file, synced; False: it could not."""

    def __init__(self, wal: Path, checkpoint: Callable[[], bool]) -> None:
        self._wal, self._checkpoint = wal, checkpoint
        self._waiting: queue.SimpleQueue[Future[None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway-sync", daemon=True)
        self.failure = ""  # why commits may not be on the disk

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def request(self) -> Future[None]:
        """Done once everything committed before is on the disk. The caller bounds how many requests wait."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self._waiting.put(future)
        return future

    def close(self) -> None:
        """Serves the requests that wait, then ends the thread."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (waiting := self._next()) is not None:
            error = self._sync()
            for future in waiting:
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    def _next(self) -> list[Future[None]] | None:
        """All requests that wait, at least one; None once it is closed and none does."""
        first = self._waiting.get()
        if first is None:
            return None
        found = [first]
        while not self._waiting.empty():
            more = self._waiting.get()
            if more is None:
                self._waiting.put(None)
                break
            found.append(more)
        return found

    def _sync(self) -> InDoubt | None:
        """Returns when the log is synced, however long the disk fails. At the close only one attempt is made."""
        try:
            if not self.failure:
                _sync_file(self._wal)
                return None
        except OSError as e:
            self.failure = f"{self._wal} cannot be synced: {e.strerror}"
            log.error("%s; acknowledgements wait until all of it is in the database's file", self.failure)
        while not self._checkpoint():
            if self._closing.wait(RETRY_S):
                return InDoubt(
                    f"{self.failure}: what was written may not survive a power cut", hint="try again after a restart"
                )
        self.failure = ""
        log.info("%s is synced again", self._wal)
        return None


def _sync_file(path: Path) -> None:
    """Only for the log: opening and closing the database's own file would drop SQLite's POSIX locks on it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # all is in the database's file, synced
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Makes the names of new files in it durable, too."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
