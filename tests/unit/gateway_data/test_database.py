"""The owner thread: order, isolation of failures, and errors that name the file."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from gateway.data import Database
from protos.errors import Unavailable


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
