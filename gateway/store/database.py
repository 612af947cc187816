"""The SQLite file and the one thread that touches it.

Invariants:
- only the owner thread uses the connection; all others post operations, which run in the order posted;
- operations that are queued together commit together (group commit); results are returned after the commit;
- a posted operation runs, even if its caller is cancelled;
- an operation that fails, whatever it raises, undoes only itself: the batch is rolled back, and each runs by itself;
- while the disk cannot be written, `run` fails without any effect. An `owe` records what has happened already: it is
  kept and retried, in order and overtaken by nothing, until it is committed. `failure` has the reason.

Why both: a request that has no effect yet may be refused with 503, and its client tries again. A turn that ended, or a
lease that was given back, cannot be refused any more, so its record waits for the disk, and everything behind it.

A file belongs to one process: a second gateway would continue the same turns.

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

DATABASE_NAME = "gateway.sqlite"
"""In the directory of `--data`."""
BATCH_MAX = 256
"""Operations of one transaction: bounds how long a reader waits behind writers."""
WAITING_MAX = 1024
"""Callers that may wait for an operation at once; the next one waits for a place, so the queue is bounded."""
RETRY_S = 0.5
"""Between two attempts to write what is owed, or to check whether the disk can be written again."""

CACHE_BYTES = 64 << 20
"""Of the pages of a file with trajectories, kept in memory: some five thousand of 2,000 tokens, which a reader takes
soon after they finished. Reading them from the file costs twice the processor time."""
CACHE_BYTES_WITHOUT = 4 << 20
"""Of a file without them: it is read when a gateway starts, and a cache of what is only written grows for nothing."""

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
"""Errors of the file or the disk, not of the statement: the same operation may succeed later."""


def in_use(path: Path) -> bool:
    """Whether a running gateway has the file."""
    try:
        lock = os.open(_lock_of(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


class _Caller:
    """A coroutine's wait for an operation. The owner thread settles it with one call into the event loop, at a fifth
    of the cost of a concurrent future with its lock, an asyncio future chained to it, and a shield.

    A caller that was cancelled gets nothing; its operation runs all the same.
    """

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def set_result(self, result: Any) -> None:
        self._settle(self._set_result, result)

    def set_exception(self, error: Exception) -> None:
        self._settle(self._set_exception, error)

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(settle, value)
        except RuntimeError:
            if not self._loop.is_closed():  # else the caller went with its loop
                raise

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
    """`async with Database(path) as db: await db.run(lambda connection: ...)`. `path` None: in memory.

    `cache_bytes`: of the file's pages, at most."""

    def __init__(self, path: Path | None, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._path, self._cache_bytes = path, cache_bytes
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

    @property
    def path(self) -> Path | None:
        """The file, in the directory of `--data`; None in memory."""
        return self._path

    async def __aenter__(self) -> Database:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Opens (or creates) the file. Raises Unavailable, with the path, when that is impossible, and Conflict when
        another process has it or its layout cannot be read."""
        self._thread.start()
        await asyncio.wrap_future(self._opened)
        if self._syncer is not None:
            self._syncer.start()

    async def close(self) -> None:
        """Runs all posted operations, then closes the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._syncer is not None and self._syncer.started:
            await asyncio.to_thread(self._syncer.close)
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def hurry(self) -> None:
        """The process is about to end: owed operations are tried once more, and then fail like all others."""
        self._patient = False

    @property
    def failure(self) -> str:
        """The reason why the store cannot be written, or synced, now; empty while it can."""
        return self._write_failure or (self._syncer.failure if self._syncer is not None else "")

    def check(self) -> None:
        """Raises Unavailable while the store cannot be written: nothing should begin that needs a record."""
        if self.failure:
            raise self._unavailable(self.failure)

    def post(self, operation: Operation[T]) -> Future[T]:
        """Queues without waiting, for callers that bound themselves (one outstanding operation each)."""
        return self._post(operation, owed=False)

    def post_owed(self, operation: Operation[T]) -> Future[T]:
        """As `post`, for what has happened already: see `owe`."""
        return self._post(operation, owed=True)

    def _post(self, operation: Operation[T], *, owed: bool) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from now on no caller can cancel it
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

        The operation may run more than once; only the last run counts.
        """
        return await self._result(operation, owed=False)

    async def owe(self, operation: Operation[T]) -> T:
        """As `run`, for what has happened already and needs a record: waits while the store cannot be written."""
        return await self._result(operation, owed=True)

    async def synced(self) -> None:
        """When this returns, everything committed before survives a power cut. Callers that wait share one sync."""
        if self._syncer is None:
            return
        if self._closed:
            raise Unavailable(f"the gateway's store {self._name} is closed")
        async with self._places:
            await asyncio.shield(asyncio.wrap_future(self._syncer.request()))

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
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has sessions' keys
            self._take_lock(self._path)
            for folder in (self._path.parent, *(new.parent for new in made)):
                sync_folder(folder)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._name, isolation_level=None)
        try:
            prepare(connection, self._name)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA cache_size=-{self._cache_bytes >> 10}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _take_lock(self, path: Path) -> None:
        """On a file beside it: a lock of SQLite's own would also keep out readers."""
        self._lock = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        """The jobs that are owed, and those queued behind them. Blocks for one job; None once closed and empty.

        While the store fails it blocks for `RETRY_S` at most: then the owed jobs are tried again, or, without any, a
        write that changes nothing, to see whether the disk has recovered.
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
        except Exception as e:  # noqa: BLE001 (whatever it is, the callers get it)
            self._failed(e)
            if len(batch) == 1:
                self._keep_or_fail(batch[0], e)
            else:
                self._commit_one_by_one(batch)

    def _commit_one_by_one(self, batch: Iterable[_Job]) -> None:
        """Commits in order, up to the first owed job that the store refuses: no later job may overtake it."""
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
            job.future.set_exception(self._callers_error(error))

    def _transact(self, batch: Sequence[_Job]) -> None:
        """Runs all in one transaction. Raises what the store or one of them raised; then none has had an effect, and no
        caller has a result yet.

        There is no savepoint for each: operations hardly ever fail, and a statement waits for the interpreter's lock.
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
        for job, result in zip(batch, results, strict=True):  # only after the commit: a result promises that it is kept
            job.future.set_result(result)

    def _roll_back(self) -> None:
        """Replaces a connection that cannot even roll back."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as e:
            log.error("store %s: cannot roll back, and is opened again: %s", self._name, e)
            self._connection.close()
            self._connection = self._connect()

    def _failed(self, error: Exception) -> None:
        """Notes the store's failure, and logs it once until a write succeeds."""
        if _store_failed(error) and self._write_failure != str(error):
            self._write_failure = str(error)
            log.error("store %s cannot be written: %s; it is tried again each %g s", self._name, error, RETRY_S)

    def _callers_error(self, error: Exception) -> LaminarError:
        if isinstance(error, LaminarError):
            return error
        if isinstance(error, sqlite3.Error):
            return self._unavailable(str(error))
        log.error("store %s: an operation failed", self._name, exc_info=error)
        refused = LaminarError(
            f"the gateway's store {self._name} refused an operation: {type(error).__name__}: {error}"
        )
        refused.__cause__ = error
        return refused

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(
            f"the gateway's store {self._name} failed: {why}", hint="check free space and rights of its directory"
        )

    def _give_up_owed(self) -> None:
        """Tries the owed jobs once more, at the close; then their callers get the failure."""
        if self._owed:
            self._commit(self._take_owed())
        for job in self._take_owed():
            job.future.set_exception(self._unavailable(self._write_failure))

    # -- the syncer's thread

    def _checkpoint(self) -> bool:
        """Copies the whole log into the database file, synced; False when that is impossible now.

        The owner thread has the connection, so the syncer's thread leaves a future for it and wakes it with an empty
        job: the checkpoint runs between two batches, when no transaction is open.
        """
        if self._closed and not self._thread.is_alive():
            return False
        done: Future[bool] = Future()
        self._checkpoint_wanted = done
        self._jobs.put(_Job(_nothing, Future()))
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
    """Whether the disk or the file failed, not the operation."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _STORE_FAILED


def _nothing(connection: sqlite3.Connection) -> None:
    return None


def _write_nothing(connection: sqlite3.Connection) -> None:
    """Writes a page, to check whether the disk can be written."""
    connection.execute(f"PRAGMA user_version = {LAYOUT}")
