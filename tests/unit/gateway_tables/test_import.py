"""Imports into a gateway's database: once each, and nothing of a file that is wrong anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from gateway.cli import cli
from gateway.experience import ExperienceBuffer
from gateway.store import Database
from gateway.store.database import DATABASE_NAME
from gateway.store.layout import claim
from gateway.tables.imports import import_table
from protos.errors import Conflict
from protos.trajectories import Trajectory
from tests.unit.gateway_store.test_experience import trajectory
from tests.unit.gateway_tables.test_round_trip import write


def put(table: Path, store: Path) -> Result:
    return CliRunner().invoke(cli, ["import", "--store", str(store), str(table)])


async def waiting(store: Path) -> list[Trajectory]:
    """What a reader of groups gets of a gateway that starts on `store`."""
    async with Database(store / DATABASE_NAME) as database:
        buffer = ExperienceBuffer(database)
        await buffer.open()
        sampled = await buffer.sample("t", groups=9, group_size=9, trainer_version=1)
        await buffer.close()
    return sampled.trajectories()


def leaves(name: str, number: int = 1, group: str = "g") -> list[Trajectory]:
    one = trajectory(name, group=group)
    return [msgspec.structs.replace(one, leaf=leaf, leaves=number, reward=leaf) for leaf in range(number)]


async def test_a_new_store_has_what_was_exported_and_a_second_import_adds_nothing(tmp_path: Path) -> None:
    sessions = [leaves("a"), leaves("b", 3), leaves("c", group="h")]
    write(tmp_path / "t.parquet", *sessions, ended_with=2)
    first = await import_table(tmp_path / "t.parquet", tmp_path / "data")
    again = await import_table(tmp_path / "t.parquet", tmp_path / "data")
    assert (first.num_added, first.num_present, again.num_added, again.num_present) == (3, 0, 0, 3)
    assert "0 sessions added, 3 were there already" in again.described(tmp_path / "t.parquet")
    assert await waiting(tmp_path / "data") == [*sessions[0], *sessions[1]], "of g, which ended with two members"


async def test_columns_of_ones_own_may_stand_beside_the_others(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", leaves("a"), leaves("b"))
    table = pq.read_table(tmp_path / "t.parquet").append_column("advantage", pa.array([0.5, -0.5])).drop("num_tokens")
    pq.write_table(table.filter([True, False]), tmp_path / "mine.parquet")
    found = await import_table(tmp_path / "mine.parquet", tmp_path / "data")
    assert found.num_added == 1


async def test_a_running_gateway_and_another_model_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", leaves("a"))
    async with Database(tmp_path / "data" / DATABASE_NAME) as database:
        with pytest.raises(Conflict, match="in use by another gateway"):
            await import_table(tmp_path / "t.parquet", tmp_path / "data")
        await database.run(lambda connection: claim(connection, "there", "critic", "digest"))
    with pytest.raises(Conflict, match="keeps the turns of model 'critic', not of 'policy'"):
        await import_table(tmp_path / "t.parquet", tmp_path / "data")


Change = Callable[[dict[str, Any]], None]


def setting(column: str, value: object) -> Change:
    return lambda row: row.update({column: value})


def first_segment(name: str, value: object) -> Change:
    return lambda row: row["segments"][0].update({name: value})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (setting("session_id", None), "column 'session_id': null; expected string"),
        (setting("session_id", ""), "column 'session_id': an empty name"),
        (setting("session_id", "a"), "column 'session_id': 'a' a second time"),
        (setting("logprobs", [0.0]), "column 'logprobs': 1 items; expected 3, as many as `token_ids`"),
        (setting("token_ids", [1, None, 3]), "column 'token_ids': a null among its items"),
        (setting("token_ids", [1, -2, 3]), "column 'token_ids': -2; expected no negative id"),
        (setting("loss_mask", [0, 2, 1]), "column 'loss_mask': 2; expected 0 or 1"),
        (setting("versions", [-1, -1, 2]), "column 'versions': a negative one where `loss_mask` is 1"),
        (setting("split", "eval"), "column 'split': 'eval'; expected 'train'"),
        (setting("split", "test"), "column 'split': Invalid enum value 'test'"),
        (setting("reward", float("nan")), "column 'reward': nan; expected a finite number"),
        (setting("version_policy", "none"), "column 'version_policy': Invalid enum value 'none'"),
        (setting("leaf", 1), "column 'leaf': 1 of 1; expected 0 of 1"),
        (setting("leaves", 2), "column 'leaf': the end of the file; expected 2 rows of session 'b', which has 1"),
        (setting("leaves", 0), "column 'leaves': 0; expected 1 or more"),
        (setting("segments", [None]), "column 'segments'"),
        (setting("tags", [{"name": "x", "value": None}]), "column 'tags': Expected `str`, got `null`"),
        (setting("metrics", [None]), "column 'metrics': a null among its pairs"),
        (first_segment("end", 9), "column 'segments': one of 1 to 9; expected a range within 3 tokens"),
        (first_segment("cause", None), "column 'segments': Expected `str`, got `null` (segments[0].cause)"),
    ],
)
def test_a_row_that_is_no_trajectory_is_named_and_nothing_is_added(tmp_path: Path, change: Change, what: str) -> None:
    write(tmp_path / "t.parquet", leaves("a"), leaves("b"))
    table = pq.read_table(tmp_path / "t.parquet")
    rows = table.to_pylist()
    change(rows[1])
    loose = pa.schema([field.with_nullable(True) for field in table.schema], table.schema.metadata)
    pq.write_table(pa.Table.from_pylist(rows, loose), tmp_path / "wrong.parquet")
    result = put(tmp_path / "wrong.parquet", tmp_path / "data")
    assert result.exit_code == 1
    assert what in result.output
    assert f"wrong.parquet, row {2 if 'the end of' in what else 1}, " in result.output
    assert not (tmp_path / "data").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("no table")
    assert "is no Parquet file" in put(path, tmp_path / "data").output
    pq.write_table(pa.table({"a": [1]}), path)
    assert "its metadata has no laminar.schema_version" in put(path, tmp_path / "data").output
    write(path, leaves("a"))
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"laminar.schema_version": b"2"}), path)
    assert "has schema version 2; this gateway reads 1" in put(path, tmp_path / "data").output
    pq.write_table(table.drop("versions"), path)
    assert "has no column 'versions'; expected one of type list<item: int64>" in put(path, tmp_path / "data").output
    index = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(index, "reward", pa.array(["1"])), path)
    assert "column 'reward' has type string; expected double" in put(path, tmp_path / "data").output
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_bytes_that_changed_anywhere_are_found_before_anything_is_added(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", *(leaves(f"s{number}") for number in range(20)))
    whole = (tmp_path / "t.parquet").read_bytes()
    data_end = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8
    for place in range(8, data_end, max(1, data_end // 60)):
        path = tmp_path / "changed.parquet"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        result = put(path, tmp_path / "data")
        if result.exit_code == 0:  # in a column that an import does not read
            assert result.output.endswith("20 sessions added, 0 were there already\n"), place
            shutil.rmtree(tmp_path / "data")
        else:
            assert (result.exit_code, "damaged" in result.output) == (1, True), (place, result.output)
    path.write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in put(path, tmp_path / "data").output
    assert not (tmp_path / "data").exists()
