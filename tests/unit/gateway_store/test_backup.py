"""A copy of the database: of one instant while the gateway writes, whole or not there, and refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.store import Database
from gateway.store.backup import back_up
from gateway.store.database import DATABASE_NAME
from protos.errors import Conflict, Corrupt, NotFound, Unavailable

ROWS = 2_000
"""Of a kilobyte each: copying them takes several commits' time."""


def pair(connection: sqlite3.Connection, number: int) -> None:
    """Two rows of one transaction."""
    connection.executemany("INSERT INTO t VALUES (?)", [(number,), (number,)])


async def filled(directory: Path) -> Database:
    database = Database(directory / DATABASE_NAME)
    await database.open()
    await database.run(lambda connection: connection.execute("CREATE TABLE t(x)") and None)
    await database.run(
        lambda connection: connection.executemany("INSERT INTO t VALUES (?)", [("x" * 1024,)] * ROWS) and None
    )
    return database


async def test_a_copy_is_of_one_instant_while_the_gateway_writes(tmp_path: Path) -> None:
    database = await filled(tmp_path / "data")
    copying = asyncio.create_task(asyncio.to_thread(back_up, tmp_path / "data", tmp_path / "out"))
    number = 0
    while not copying.done() or not number:
        number += 1
        await database.run(lambda connection, number=number: pair(connection, number))  # type: ignore[misc]
    await copying
    await database.close()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [DATABASE_NAME], "complete without a log beside it"
    with contextlib.closing(sqlite3.connect(tmp_path / "out" / DATABASE_NAME)) as copy, copy:
        [(rows,)] = copy.execute("SELECT count(*) FROM t WHERE typeof(x) = 'text'").fetchall()
        halves = copy.execute("SELECT x FROM t WHERE typeof(x) = 'integer' GROUP BY x HAVING count(*) != 2").fetchall()
    assert (rows, halves) == (ROWS, [])


async def test_a_copy_is_opened_as_the_gateways_own(tmp_path: Path) -> None:
    database = await filled(tmp_path / "data")
    done = await asyncio.to_thread(
        CliRunner().invoke, cli, ["backup", "--data", str(tmp_path / "data"), str(tmp_path / "new" / "out")]
    )
    assert done.exit_code == 0, done.output
    assert "0 live sessions" in done.output
    await database.close()
    copy = tmp_path / "new" / "out" / DATABASE_NAME
    assert copy.stat().st_mode & 0o777 == 0o600, "it has the sessions' API keys"
    async with Database(copy) as again:
        await again.run(lambda connection: pair(connection, 1))
        [rows] = await again.run(lambda connection: connection.execute("SELECT count(*) FROM t").fetchone())
    assert rows == ROWS + 2


async def test_what_cannot_be_copied_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"gateway\.sqlite is not there"):
        back_up(tmp_path / "nothing", tmp_path / "out")
    database = await filled(tmp_path / "data")
    await database.close()
    back_up(tmp_path / "data", tmp_path / "out")
    before = (tmp_path / "out" / DATABASE_NAME).read_bytes()
    with pytest.raises(Conflict, match="is there already"):
        back_up(tmp_path / "data", tmp_path / "out")
    assert (tmp_path / "out" / DATABASE_NAME).read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot copy"):
        back_up(tmp_path / "data", tmp_path / "file" / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / DATABASE_NAME).write_text("this is no database" * 100)
    with pytest.raises(Unavailable, match="not a database"):
        back_up(tmp_path / "other", tmp_path / "second")
    assert list((tmp_path / "second").iterdir()) == []


async def test_a_damaged_file_is_no_backup(tmp_path: Path) -> None:
    database = await filled(tmp_path / "data")
    await database.close()
    path = tmp_path / "data" / DATABASE_NAME
    content = bytearray(path.read_bytes())
    content[8 * 4096 : 9 * 4096] = b"\xff" * 4096
    path.write_bytes(content)
    with pytest.raises((Corrupt, Unavailable)):
        back_up(tmp_path / "data", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
