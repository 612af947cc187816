"""The owner thread: order, isolation of failures, and errors that name the file."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from gateway.store import Database
from protos.errors import LaminarError, Unavailable
from tests.unit.gateway_store.disk import Disk, until


def fill(connection: sqlite3.Connection, value: int) -> int:
    connection.execute("INSERT INTO t VALUES (?)", (value,))
    return value


async def values(database: Database) -> list[int]:
    rows = await database.run(lambda connection: connection.execute("SELECT x FROM t").fetchall())
    return [row[0] for row in rows]


async def test_operations_run_in_order_and_one_failure_undoes_only_itself(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        await database.run(lambda connection: connection.execute("CREATE TABLE t(x INTEGER UNIQUE)") and None)

        def half(connection: sqlite3.Connection) -> int:
            fill(connection, 100)
            return fill(connection, 1)

        first = database.post(lambda connection: fill(connection, 1))
        torn = database.post(half)
        last = database.post(lambda connection: fill(connection, 2))
        assert await asyncio.wrap_future(first) == 1
        with pytest.raises(Unavailable, match="UNIQUE"):
            await asyncio.wrap_future(torn)
        assert await asyncio.wrap_future(last) == 2
        assert await values(database) == [1, 2]


async def test_what_was_posted_is_written_before_close_returns(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    await database.open()
    await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)
    for value in range(1000):
        database.post(lambda connection, value=value: fill(connection, value))  # type: ignore[misc]
    await database.close()
    await database.close()
    async with Database(tmp_path / "db") as again:
        assert await values(again) == list(range(1000))
    with pytest.raises(Unavailable, match="closed"):
        await database.run(lambda connection: None)


async def test_a_cancelled_waiter_does_not_cancel_the_operation(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)
        waiter = asyncio.create_task(database.run(lambda connection: fill(connection, 5)))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert await values(database) == [5]


async def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="file/db"):
        await Database(tmp_path / "file" / "db").open()
    (tmp_path / "not.sqlite").write_text("this is no database" * 100)
    with pytest.raises(Unavailable, match=r"not\.sqlite"):
        await Database(tmp_path / "not.sqlite").open()


@pytest.mark.parametrize("error", [OverflowError("2**63"), TypeError("no"), KeyError("x"), MemoryError()])
async def test_an_operation_that_raises_anything_costs_itself_alone(tmp_path: Path, error: Exception) -> None:
    async with Database(tmp_path / "db") as database:
        await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)

        def fails(connection: sqlite3.Connection) -> None:
            fill(connection, 100)
            raise error

        first = database.post(lambda connection: fill(connection, 1))
        bad = database.post(fails)
        with pytest.raises(LaminarError, match=type(error).__name__):
            await asyncio.wait_for(asyncio.wrap_future(bad), 30)
        assert await asyncio.wrap_future(first) == 1
        assert await asyncio.wait_for(values(database), 30) == [1]
        assert database.failure == "", "the store itself is well"


async def test_an_operation_alone_in_its_transaction_undoes_itself(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)

        def fails(connection: sqlite3.Connection) -> None:
            fill(connection, 100)
            raise KeyError("x")

        for operate in (database.run, database.owe):
            with pytest.raises(LaminarError, match="KeyError"):
                await asyncio.wait_for(operate(fails), 30)
        await asyncio.wait_for(database.run(lambda connection: fill(connection, 1)), 30)
        assert await values(database) == [1]
        assert database.failure == "", "the store itself is well"


async def test_a_full_disk_fails_what_can_be_refused_and_is_over_by_itself(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        disk = Disk()
        await disk.make(database)
        disk.full = True
        with pytest.raises(Unavailable, match="full"):
            await database.run(disk.write)
        assert "full" in database.failure
        disk.full = False
        await until(lambda: not database.failure, "a store that knows that it can write again")
        await database.run(disk.write)


async def test_what_is_owed_lands_when_the_disk_has_room_again_in_order(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        disk = Disk()
        await disk.make(database)
        await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)
        disk.full = True
        owed = asyncio.create_task(database.owe(disk.write))
        then = asyncio.create_task(database.owe(lambda connection: fill(connection, 2)))
        await until(lambda: database.failure, "the failure")
        with pytest.raises(Unavailable, match="full"):
            await database.run(lambda connection: fill(connection, 3))
        assert not owed.done()
        assert not then.done(), "nothing overtakes what is owed"
        disk.full = False
        await asyncio.wait_for(asyncio.gather(owed, then), 60)
        assert await values(database) == [2]
        assert database.failure == ""


async def test_what_is_owed_at_the_close_is_tried_once_more_and_then_told(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        disk = Disk()
        await disk.make(database)
        disk.full = True
        owed = asyncio.create_task(database.owe(disk.write))
        await until(lambda: database.failure, "the failure")
    with pytest.raises(Unavailable, match="full"):
        await owed


async def test_a_cancelled_future_does_not_end_the_thread(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        assert not database.post(lambda connection: None).cancel()
        await asyncio.wait_for(database.run(lambda connection: None), 30)


async def test_a_sync_covers_what_was_committed_before_it_and_one_serves_all_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, synced, wal = threading.Event(), [], tmp_path / "db-wal"
    sync = os.fdatasync

    def held(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        assert gate.wait(60)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", held)
    async with Database(tmp_path / "db") as database:
        await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)
        first = asyncio.create_task(database.synced())
        await until(lambda: synced, "the first sync")
        await database.run(lambda connection: fill(connection, 1))  # commits go on while a sync is under way
        later = [asyncio.create_task(database.synced()) for _ in range(50)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(asyncio.gather(first, *later), 60)
        assert len(synced) == 2, "one for the fifty"
        assert synced[-1] == wal.stat().st_size


async def test_a_sync_that_failed_is_made_good_by_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel forgets what a failed sync did not write: another one would succeed and prove nothing."""

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with Database(tmp_path / "db") as database:
        await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)
        await database.run(lambda connection: fill(connection, 7))
        monkeypatch.setattr(os, "fdatasync", broken)
        await asyncio.wait_for(database.synced(), 60)
        assert (tmp_path / "db-wal").stat().st_size == 0, "all of it is in the file itself, which SQLite synced"
        await until(lambda: not database.failure, "its recovery")
        assert await values(database) == [7]


def test_its_path_shows_where_the_gateways_data_is(tmp_path: Path) -> None:
    assert Database(tmp_path / "db").path == tmp_path / "db"
    assert Database(None).path is None
