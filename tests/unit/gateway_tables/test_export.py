"""Exports from a gateway's database: which sessions, from a store in use, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from gateway.cli import cli
from gateway.experience import ExperienceBuffer
from gateway.store.database import DATABASE_NAME, Database
from gateway.store.layout import LAYOUT, claim
from gateway.tables import writer
from gateway.tables.exports import export_table
from gateway.tables.sources import DatabaseFile, Wanted
from protos.errors import Unavailable
from protos.trajectories import Trajectory
from tests.support.experience import experience_app
from tests.support.turns import serving_app
from tests.unit.gateway_store.test_experience import trajectory


def ended(name: str, version: int, finished_unix_s: float) -> Trajectory:
    """Its tokens are of `version` and the next one."""
    return msgspec.structs.replace(trajectory(name, version, group="g"), finished_unix_s=finished_unix_s)


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[ExperienceBuffer]:
    """Of a gateway that runs, with the sessions a, b, c and d, numbered from 1."""
    async with Database(tmp_path / DATABASE_NAME) as database:
        await database.run(lambda connection: claim(connection, "here", "policy", "digest"))
        buffer = ExperienceBuffer(database)
        await buffer.open()
        for number, name in enumerate("abcd", 1):
            await buffer.add(ended(name, number, 1000.0 * number))
        await buffer.close_group("g", 4)
        yield buffer
        await buffer.close()


def export(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["export", "--store", str(directory), str(directory / "t.parquet"), *options])


def parts(directory: Path) -> list[Path]:
    """What an export leaves under a temporary name."""
    return [*directory.glob(".*.part")]


def written(directory: Path, *options: str) -> str:
    """The names of the sessions that such an export writes."""
    result = export(directory, "--force", *options)
    assert result.exit_code == 0, result.output
    return "".join(pq.read_table(directory / "t.parquet", columns=["session_id"])["session_id"].to_pylist())


async def test_all_of_a_store_whose_gateway_runs(buffer: ExperienceBuffer, tmp_path: Path) -> None:
    result = export(tmp_path)
    assert result.exit_code == 0, result.output
    assert "4 sessions, 4 trajectories, 12 tokens; the last session's number is 4" in result.output
    table = pq.read_table(tmp_path / "t.parquet")
    assert table["number"].to_pylist() == [1, 2, 3, 4]
    assert table["model"].to_pylist() == ["policy"] * 4
    assert table["group_ended_with"].to_pylist() == [4] * 4
    assert table.schema.metadata[b"laminar.vocabulary"] == b"digest"
    assert parts(tmp_path) == []
    assert buffer.statistics().trajectories == 4, "nothing was leased"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--version-min=2"], "bcd"),
        (["--version-max=3"], "ab"),
        (["--version-min=2", "--version-max=4"], "bc"),
        (["--since=2000"], "bcd"),
        (["--until=2000"], "a"),
        (["--since", datetime.datetime.fromtimestamp(3000).isoformat()], "cd"),
        (["--after=2"], "cd"),
        (["--limit=3"], "abc"),
        (["--after=1", "--limit=1"], "b"),
        (["--after=4"], ""),
    ],
)
async def test_what_is_wanted(buffer: ExperienceBuffer, tmp_path: Path, options: list[str], names: str) -> None:
    assert written(tmp_path, *options) == names


async def test_leased_and_used_sessions_are_there_unless_unread_ones_are_wanted(
    buffer: ExperienceBuffer, tmp_path: Path
) -> None:
    used = await buffer.sample("t", trajectories=1, trainer_version=1, uses_max=2)
    await buffer.ack(used.lease_id)
    await buffer.sample("t", trajectories=1, trainer_version=1, uses_max=1)
    assert written(tmp_path) == "abcd"
    table = pq.read_table(tmp_path / "t.parquet")
    assert (table["uses"].to_pylist(), table["leased"].to_pylist()) == ([1, 0, 0, 0], [False, True, False, False])
    assert written(tmp_path, "--unread") == "cd"


async def test_what_is_used_up_meanwhile_is_counted(
    buffer: ExperienceBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts are read before bodies: here the trainer is between the two."""
    await buffer.drop_group("g")
    [other] = [ended("e", 5, 1.0)]
    await buffer.add(other)
    source_read = DatabaseFile.read
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection, connection:

        def read(self: DatabaseFile, offer: object) -> object:
            connection.execute("DELETE FROM trajectory_bodies")
            connection.commit()
            return source_read(self, offer)  # type: ignore[arg-type]

        monkeypatch.setattr(DatabaseFile, "read", read)
        found = export_table(str(tmp_path), tmp_path / "t.parquet", Wanted())
    assert (found.num_sessions, found.num_gone) == (0, 1)
    connection.close()


async def test_a_damaged_row_is_named_and_the_others_are_written(buffer: ExperienceBuffer, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection, connection:
        connection.execute("UPDATE trajectory_bodies SET body=x'00' WHERE seq=2")
        connection.execute("UPDATE trajectories SET facts=x'00' WHERE seq=3")
    connection.close()
    result = export(tmp_path)
    assert result.exit_code == 1
    assert "2 sessions of the store are damaged" in result.output
    assert pq.read_table(tmp_path / "t.parquet")["session_id"].to_pylist() == ["a", "d"]


async def test_a_file_that_is_there_is_replaced_only_with_force(buffer: ExperienceBuffer, tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("mine")
    result = export(tmp_path)
    assert result.exit_code == 1
    assert "t.parquet is there already (--force replaces it)" in result.output
    assert (tmp_path / "t.parquet").read_text() == "mine"
    assert written(tmp_path, "--limit=1") == "a"


async def test_a_file_that_appears_meanwhile_is_kept_and_nothing_else_is_left(
    buffer: ExperienceBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_batch = writer.record_batch

    def and_another(*arguments: object) -> object:
        (tmp_path / "t.parquet").write_text("another")
        return record_batch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "record_batch", and_another)
    assert "is there already" in export(tmp_path).output
    assert (tmp_path / "t.parquet").read_text() == "another"
    assert parts(tmp_path) == []


async def test_a_failure_leaves_nothing_behind(
    buffer: ExperienceBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "record_batch", full)
    result = export(tmp_path)
    assert (result.exit_code, "No space left" in result.output) == (1, True)
    assert parts(tmp_path) == []
    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize("layout", [LAYOUT - 1, LAYOUT + 1])
def test_another_layout_is_refused(tmp_path: Path, layout: int) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection, connection:
        connection.execute(f"PRAGMA user_version = {layout}")
    connection.close()
    assert f"has layout {layout}" in export(tmp_path).output


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    assert "--store takes a gateway's --data directory" in export(tmp_path).output
    (tmp_path / DATABASE_NAME).write_text("no database at all")
    assert "file is not a database" in export(tmp_path).output
    assert "is no time, such as 2026-03-31T18:00" in export(tmp_path, "--since=yesterday").output


@pytest.mark.parametrize("kind", ["database", "memory"])
async def test_a_running_gateway_gives_what_it_has_by_its_url(tmp_path: Path, kind: str) -> None:
    async with Database(tmp_path / DATABASE_NAME) as database, experience_app(database, store=kind) as (app, stores, _):
        await database.run(lambda connection: claim(connection, "here", "policy", "digest"))
        for number, name in enumerate("abcd", 1):
            await stores.buffer.add(ended(name, number, 1000.0 * number))
        await stores.buffer.close_group("g", 4)
        used = await stores.buffer.sample("t", trajectories=1, trainer_version=1, uses_max=2)
        await stores.buffer.ack(used.lease_id)
        await stores.buffer.sample("t", trajectories=1, trainer_version=1)
        async with serving_app(app) as url:
            found = await asyncio.to_thread(export_table, url, tmp_path / "t.parquet", Wanted())
            part = await asyncio.to_thread(export_table, url, tmp_path / "u.parquet", Wanted(after=1, unread=True))
            with pytest.raises(Unavailable, match="is no gateway of this release"):
                await asyncio.to_thread(export_table, f"{url}/v1", tmp_path / "v.parquet", Wanted())
        with pytest.raises(Unavailable, match="no gateway answers"):
            await asyncio.to_thread(export_table, url, tmp_path / "v.parquet", Wanted())
        if kind == "database":
            await asyncio.to_thread(export_table, str(tmp_path), tmp_path / "file.parquet", Wanted())
            assert pq.read_table(tmp_path / "t.parquet").equals(pq.read_table(tmp_path / "file.parquet"))
    assert (found.num_sessions, found.last, part.num_sessions) == (4, 4, 2)
    table = pq.read_table(tmp_path / "t.parquet")
    assert (table["uses"].to_pylist(), table["leased"].to_pylist()) == ([1, 0, 0, 0], [False, True, False, False])
    assert table["group_ended_with"].to_pylist() == [4] * 4
    assert table.schema.metadata[b"laminar.vocabulary"] == b"digest"
