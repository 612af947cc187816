"""The sync of what was committed to the disk itself, so that it survives a power cut: one for all that wait for it.

Invariants:
- a sync that begins after a caller asked covers all that was committed before it asked;
- commits go on while a sync is under way: it has a thread of its own;
- a sync that failed is never tried again: the kernel has marked the pages as written, and the next one would succeed
  without them. Everything is copied into the database file instead, by a checkpoint, whose own sync proves it.

SQLite syncs its write-ahead log before it copies from it, and the file afterwards. So at any moment all that was
committed and not yet synced is in the log, and the log is all that has to be synced here.
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
        self.failure = ""  # why what was committed is not known to be on the disk

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def ask(self) -> Future[None]:
        """Done once all that was committed before is on the disk. Who asks bounds how many wait."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self._waiting.put(future)
        return future

    def close(self) -> None:
        """Serves who waits already, then ends the thread."""
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
        """All that wait, at least one; None once it is closed and nobody does."""
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
        """Returns when it is done, however long the disk fails; at the close only if it can be done at once."""
        try:
            if not self.failure:
                _sync_file(self._wal)
                return None
        except OSError as e:
            self.failure = f"{self._wal} cannot be synced: {e.strerror}"
            log.error("%s; what is acknowledged waits until all of it is in the database's file", self.failure)
        while not self._checkpoint():
            if self._closing.wait(RETRY_S):
                return InDoubt(
                    f"{self.failure}: what was written may not survive a power cut", hint="ask again after a restart"
                )
        self.failure = ""
        log.info("%s is synced again", self._wal)
        return None


def _sync_file(path: Path) -> None:
    """Of the log alone: closing another descriptor of the database's own file would drop SQLite's locks on it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # all is in the database's file, synced
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """So that a file made in it survives a power cut, too."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
