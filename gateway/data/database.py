"""The SQLite file and the one thread that touches it.

Invariants:
- only the owner thread uses the connection; everybody else posts operations, which run in the order posted;
- what was queued together commits together (group commit), and an operation's result is given out after its commit;
- an operation once posted runs, even if who waits for it is cancelled;
- an operation that fails undoes only itself (savepoint); the others of its batch stand.

A file has one process: a second gateway would go on with the same turns.

Durability: WAL with `synchronous=NORMAL`. A commit survives the death of this process at any instant (kill -9); a power
cut may take the last commits, never the file's integrity.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gateway.data.layout import prepare
from protos.errors import Conflict, LaminarError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]

BATCH_MAX = 256
"""Operations of one transaction: bounds how long a reader waits behind writers."""
WAITING_MAX = 1024
"""Callers that may wait for an operation at once; the next one waits for a place, so the queue is bounded."""


@dataclass(frozen=True, slots=True)
class _Job:
    operation: Operation[Any]
    future: Future[Any]


class Database:
    """`async with Database(path) as db: await db.run(lambda connection: ...)`. `path` None: in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._places = asyncio.Semaphore(WAITING_MAX)
        self._thread = threading.Thread(target=self._own, name="gateway-sqlite", daemon=True)
        self._opened: Future[None] = Future()
        self._closed = False
        self._lock: int | None = None

    async def __aenter__(self) -> Database:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Opens (and makes) the file; raises Unavailable with the path if that cannot be,
        Conflict when another process has it, or a gateway of another time wrote it."""
        self._thread.start()
        await asyncio.wrap_future(self._opened)

    async def close(self) -> None:
        """Runs what was posted, then closes the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def post(self, operation: Operation[T]) -> Future[T]:
        """Queues without waiting, for callers that bound themselves (one outstanding operation each)."""
        if self._closed:
            raise Unavailable(f"the gateway's store {self._name} is closed")
        future: Future[T] = Future()
        self._jobs.put(_Job(operation, future))
        return future

    async def run(self, operation: Operation[T]) -> T:
        """Runs the operation in the owner thread and returns its result once committed."""
        async with self._places:
            return await asyncio.shield(asyncio.wrap_future(self.post(operation)))

    @property
    def _name(self) -> str:
        return str(self._path) if self._path is not None else ":memory:"

    def _own(self) -> None:
        try:
            connection = self._connect()
        except LaminarError as e:
            self._unlock()
            self._opened.set_exception(e)
            return
        except (sqlite3.Error, OSError) as e:
            self._unlock()
            why = e.strerror if isinstance(e, OSError) else e
            hint = "give a --data directory that can be written, and is a gateway's or empty"
            self._opened.set_exception(Unavailable(f"cannot open the gateway's store {self._name}: {why}", hint=hint))
            return
        self._opened.set_result(None)
        try:
            while (batch := self._next_batch()) is not None:
                self._commit(connection, batch)
        finally:
            connection.close()
            self._unlock()

    def _connect(self) -> sqlite3.Connection:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock(self._path)
        connection = sqlite3.connect(self._name, isolation_level=None)
        prepare(connection, self._name)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def _take_lock(self, path: Path) -> None:
        """On a file beside it: SQLite's own would also keep out who only reads."""
        self._lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise Conflict(
                f"{path} is in use by another gateway",
                hint="stop that one, or give this one its own --data directory",
            ) from e

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _next_batch(self) -> list[_Job] | None:
        """Blocks for one job, then takes what else is there; None once closed and empty."""
        job = self._jobs.get()
        batch: list[_Job] = []
        while job is not None:
            batch.append(job)
            if len(batch) >= BATCH_MAX or self._jobs.empty():
                return batch
            job = self._jobs.get()
        if batch:
            self._jobs.put(None)
            return batch
        return None

    def _commit(self, connection: sqlite3.Connection, batch: list[_Job]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                self._run_one(connection, job, done)
            connection.execute("COMMIT")
        except sqlite3.Error as e:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            log.error("store %s: a batch of %d operations failed: %s", self._name, len(batch), e)
            for job in batch:
                if not job.future.done():
                    job.future.set_exception(self._unavailable(e))
            return
        for future, result in done:
            future.set_result(result)

    def _run_one(self, connection: sqlite3.Connection, job: _Job, done: list[tuple[Future[Any], Any]]) -> None:
        connection.execute("SAVEPOINT job")
        try:
            result = job.operation(connection)
        except (sqlite3.Error, LaminarError, ValueError) as e:
            if not connection.in_transaction:
                raise  # SQLite itself gave up the whole transaction: disk full, I/O error
            connection.execute("ROLLBACK TO job")
            job.future.set_exception(self._unavailable(e) if isinstance(e, sqlite3.Error) else e)
        else:
            done.append((job.future, result))
        connection.execute("RELEASE job")

    def _unavailable(self, error: sqlite3.Error) -> Unavailable:
        return Unavailable(
            f"the gateway's store {self._name} failed: {error}", hint="check free space and rights of its directory"
        )
