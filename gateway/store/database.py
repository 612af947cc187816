"""The SQLite file and the one thread that touches it.

Invariants:
- only the owner thread uses the connection; everybody else posts operations, which run in the order posted;
- what was queued together commits together (group commit), and an operation's result is given out after its commit;
- an operation once posted runs, even if who waits for it is cancelled;
- an operation that fails, whatever it raises, undoes only itself: the batch is undone, and each runs by itself;
- while the disk cannot be written, `run` fails and has had no effect, and what is owed (`owe`: it records what has
  happened already) is kept and tried again, in order and overtaken by nothing, until it lands. `failure` says why.

A file has one process: a second gateway would go on with the same turns.

Durability: WAL with `synchronous=NORMAL`. A commit survives the death of this process at any instant (kill -9), and a
power cut once `synced` has returned after it; a power cut may take the commits since, never the file's integrity.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gateway.store.layout import LAYOUT, prepare
from gateway.store.sync import Syncer, sync_folder
from protos.errors import Conflict, LaminarError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]

BATCH_MAX = 256
"""Operations of one transaction: bounds how long a reader waits behind writers."""
WAITING_MAX = 1024
"""Callers that may wait for an operation at once; the next one waits for a place, so the queue is bounded."""


RETRY_S = 0.5
"""Between two attempts to write what is owed, or to find out whether the disk can be written again."""

_STORE_FAILED = frozenset(
    {
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)
"""Errors of the file or the disk, not of the statement: the same operation may do later."""


class _Caller:
    """Who awaits an operation on the event loop. Told with one call into the loop, at a fifth of the cost of a
    concurrent future with its lock, an asyncio future chained to it, and a shield.

    One that was cancelled is told nothing; the operation runs all the same.
    """

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def set_result(self, result: Any) -> None:
        self._tell(self._set_result, result)

    def set_exception(self, error: Exception) -> None:
        self._tell(self._set_exception, error)

    def _tell(self, settle: Callable[[Any], None], told: Any) -> None:
        if not self._loop.is_closed():  # nobody waits any more
            self._loop.call_soon_threadsafe(settle, told)

    def _set_result(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _set_exception(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Job:
    operation: Operation[Any]
    future: Future[Any] | _Caller
    owed: bool = False


class Database:
    """`async with Database(path) as db: await db.run(lambda connection: ...)`. `path` None: in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._owed: deque[_Job] = deque()  # the owner thread's: what could not be written yet
        self._places = asyncio.Semaphore(WAITING_MAX)
        self._thread = threading.Thread(target=self._own, name="gateway-sqlite", daemon=True)
        self._syncer = None if path is None else Syncer(path.with_name(f"{path.name}-wal"), self._checkpoint)
        self._opened: Future[None] = Future()
        self._closed = False
        self._patient = True
        self._lock: int | None = None
        self._connection: sqlite3.Connection  # the owner thread's
        self._checkpoint_wanted: Future[bool] | None = None
        self._write_failure = ""

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
        if self._syncer is not None:
            self._syncer.start()

    async def close(self) -> None:
        """Runs what was posted, then closes the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._syncer is not None and self._syncer.started:
            await asyncio.to_thread(self._syncer.close)
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def hurry(self) -> None:
        """The process is about to end: what is owed is tried once more, and then fails as anything else."""
        self._patient = False

    @property
    def failure(self) -> str:
        """Why the store cannot be written, or synced, now; empty while it can."""
        return self._write_failure or (self._syncer.failure if self._syncer is not None else "")

    def check(self) -> None:
        """Raises Unavailable while the store cannot be written: nothing should begin that it has to keep."""
        if self.failure:
            raise self._unavailable(self.failure)

    def post(self, operation: Operation[T]) -> Future[T]:
        """Queues without waiting, for callers that bound themselves (one outstanding operation each)."""
        return self._post(operation, owed=False)

    def post_owed(self, operation: Operation[T]) -> Future[T]:
        """The same, of what has to land: see `owe`."""
        return self._post(operation, owed=True)

    def _post(self, operation: Operation[T], *, owed: bool) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it any more
        self._queue(_Job(operation, future, owed))
        return future

    def _queue(self, job: _Job) -> None:
        if self._closed:
            raise Unavailable(f"the gateway's store {self._name} is closed")
        self._jobs.put(job)

    async def _result(self, operation: Operation[T], *, owed: bool) -> T:
        caller = _Caller()
        async with self._places:
            self._queue(_Job(operation, caller, owed))
            result: T = await caller.future
            return result

    async def run(self, operation: Operation[T]) -> T:
        """Runs the operation in the owner thread and returns its result once committed. Raises what it raises, and
        Unavailable when the store cannot be written: then it has had no effect.

        It may run more than once, as that of `owe` may.
        """
        return await self._result(operation, owed=False)

    async def owe(self, operation: Operation[T]) -> T:
        """As `run`, for what has happened already and has to be kept: while the store cannot be written it waits.

        It may run more than once; only the last time stands.
        """
        return await self._result(operation, owed=True)

    async def synced(self) -> None:
        """All that was committed before survives a power cut when this returns. Callers that wait share one sync."""
        if self._syncer is None:
            return
        if self._closed:
            raise Unavailable(f"the gateway's store {self._name} is closed")
        async with self._places:
            await asyncio.shield(asyncio.wrap_future(self._syncer.ask()))

    @property
    def _name(self) -> str:
        return str(self._path) if self._path is not None else ":memory:"

    # -- the owner thread

    def _own(self) -> None:
        try:
            self._connection = self._open()
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
                self._commit(batch)
                self._serve_checkpoint()
        finally:
            self._give_up_owed()
            self._connection.close()
            self._unlock()

    def _open(self) -> sqlite3.Connection:
        if self._path is not None:
            made = [folder for folder in self._path.parents if not folder.exists()]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock(self._path)
            for folder in (self._path.parent, *(new.parent for new in made)):
                sync_folder(folder)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
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
        """What is owed, and what is queued behind it. Blocks for one job; None once closed and empty.

        While the store fails, no longer than `RETRY_S`: then what is owed is tried again, or a write of no meaning.
        """
        try:
            job = self._jobs.get(timeout=RETRY_S if self._write_failure else None)
        except queue.Empty:
            return [*self._take_owed()] or [_Job(_write_nothing, Future())]
        if job is None:
            return None
        batch = self._take_owed()
        while job is not None:
            batch.append(job)
            if len(batch) >= BATCH_MAX or self._jobs.empty():
                return batch
            job = self._jobs.get()
        self._jobs.put(None)
        return batch

    def _take_owed(self) -> list[_Job]:
        found = list(self._owed)
        self._owed.clear()
        return found

    def _commit(self, batch: list[_Job]) -> None:
        try:
            self._transact(batch)
        except Exception as e:  # noqa: BLE001 (whatever it is, it is told to who waits)
            self._failed(e)
            if len(batch) == 1:
                self._keep_or_fail(batch[0], e)
            else:
                self._commit_one_by_one(batch)

    def _commit_one_by_one(self, batch: Iterable[_Job]) -> None:
        """In order, up to the first that is owed and that the store refuses: nothing overtakes it."""
        error: Exception | None = None
        for job in batch:
            if error is None:
                try:
                    self._transact([job])
                    continue
                except Exception as e:  # noqa: BLE001
                    self._failed(e)
                    self._keep_or_fail(job, e)
                    error = e if self._owed else None
            else:
                self._keep_or_fail(job, error)

    def _keep_or_fail(self, job: _Job, error: Exception) -> None:
        if job.owed and self._patient and _store_failed(error):
            self._owed.append(job)
        else:
            job.future.set_exception(self._told(error))

    def _transact(self, batch: Sequence[_Job]) -> None:
        """All in one transaction. Raises what the store or one of them raised; then none has run, and none was told
        anything.

        There is no savepoint for each: operations hardly ever fail, and each statement is a wait for the interpreter.
        """
        connection = self._connection
        try:
            changes = connection.total_changes
            connection.execute("BEGIN IMMEDIATE")
            results = [job.operation(connection) for job in batch]
            connection.execute("COMMIT")
            wrote = connection.total_changes != changes
        except Exception:
            self._roll_back()
            raise
        if self._write_failure and (wrote or any(job.operation is _write_nothing for job in batch)):
            log.info("store %s can be written again", self._name)
            self._write_failure = ""
        for job, result in zip(batch, results, strict=True):
            job.future.set_result(result)

    def _roll_back(self) -> None:
        """A connection that cannot even do that is replaced."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as e:
            log.error("store %s: cannot roll back, and is opened again: %s", self._name, e)
            self._connection.close()
            self._connection = self._connect()

    def _failed(self, error: Exception) -> None:
        """Noted, and logged once, until a write lands."""
        if _store_failed(error) and self._write_failure != str(error):
            self._write_failure = str(error)
            log.error("store %s cannot be written: %s; it is tried again each %g s", self._name, error, RETRY_S)

    def _told(self, error: Exception) -> LaminarError:
        if isinstance(error, LaminarError):
            return error
        if isinstance(error, sqlite3.Error):
            return self._unavailable(str(error))
        log.error("store %s: an operation failed", self._name, exc_info=error)
        told = LaminarError(f"the gateway's store {self._name} refused an operation: {type(error).__name__}: {error}")
        told.__cause__ = error
        return told

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(
            f"the gateway's store {self._name} failed: {why}", hint="check free space and rights of its directory"
        )

    def _give_up_owed(self) -> None:
        """At the close: one more attempt, and then who waits is told."""
        if self._owed:
            self._commit(self._take_owed())
        for job in self._take_owed():
            job.future.set_exception(self._unavailable(self._write_failure))

    # -- the syncer's thread

    def _checkpoint(self) -> bool:
        """Copies the whole log into the database file, synced; False when that cannot be now."""
        if self._closed and not self._thread.is_alive():
            return False
        done: Future[bool] = Future()
        self._checkpoint_wanted = done
        self._jobs.put(_Job(_nothing, Future()))  # wakes the owner, who serves it after its batch
        return done.result()

    def _serve_checkpoint(self) -> None:
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, None
        if wanted is None:
            return
        try:
            [busy, *_] = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            wanted.set_result(not busy)
        except sqlite3.Error as e:
            log.warning("store %s: no checkpoint: %s", self._name, e)
            wanted.set_result(False)


def _store_failed(error: Exception) -> bool:
    """The disk or the file, not the operation, is to blame."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _STORE_FAILED


def _nothing(connection: sqlite3.Connection) -> None:
    return None


def _write_nothing(connection: sqlite3.Connection) -> None:
    """A page, so that it shows whether the disk can be written."""
    connection.execute(f"PRAGMA user_version = {LAYOUT}")
