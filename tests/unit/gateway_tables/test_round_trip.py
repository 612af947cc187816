"""A trajectory that is written to a table and read back is the same, whatever values it has."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tables import writer
from gateway.tables.reader import TableReader
from gateway.tables.schema import COLUMNS, KeptFor, Stored, leaves_of, shown
from gateway.tables.writer import TableWriter
from protos import packed
from protos.packed import Offer
from protos.trajectories import SampledWith, Segment, Trajectory, VersionChange
from tests.support.quick import examples
from tests.unit.gateway_store.test_experience import trajectory

KEPT_FOR = KeptFor("policy", "digest")
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(0, (1 << 63) - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
sampled_with = st.builds(
    SampledWith,
    temperature=floats,
    top_p=floats,
    top_k=st.integers(-1, 100),
    presence_penalty=floats,
    frequency_penalty=floats,
    constrained=st.booleans(),
    logprobs=names,
    logit_bias=st.dictionaries(names, floats, max_size=2),
    min_tokens=numbers,
)


@st.composite
def segments(draw: st.DrawFn, length: int) -> Segment:
    start, end = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
    return Segment(
        turn=draw(numbers),
        engine=draw(names),
        incarnation=draw(names),
        version=draw(numbers),
        start=start,
        end=end,
        cause=draw(st.sampled_from(["start", "move", "cut"])),
        started_unix_s=draw(floats),
        ended_unix_s=draw(floats),
        seed=draw(st.none() | st.integers(-(1 << 63), (1 << 63) - 1)),
        sampled_with=draw(st.none() | sampled_with),
        evidence=draw(names),
        dtype=draw(names),
    )


@st.composite
def sessions(draw: st.DrawFn) -> list[Trajectory]:
    """The leaves of one session, some without a token."""
    leaves = []
    number = draw(st.integers(1, 3))
    tags = draw(st.dictionaries(names | st.sampled_from(["environment", "task_id", "run_id"]), names, max_size=3))
    for leaf in range(number):
        mask = draw(st.lists(st.integers(0, 1), max_size=6))
        exactly = {"min_size": len(mask), "max_size": len(mask)}
        leaves.append(
            Trajectory(
                session_id=draw(st.just("s") | names.filter(bool)) if leaf == 0 else leaves[0].session_id,
                group_id=draw(names),
                sample_index=draw(numbers),
                reward=draw(floats),
                status=draw(st.sampled_from(["completed", "truncated"])),
                mixed=draw(st.booleans()),
                split="train",
                token_ids=draw(st.lists(st.integers(0, 1 << 17) | numbers, **exactly)),
                logprobs=draw(st.lists(st.floats(width=32, allow_nan=False), **exactly)),
                loss_mask=mask,
                versions=draw(st.lists(st.integers(0, 9) | numbers, **exactly)),
                turns=draw(numbers),
                segments=draw(st.lists(segments(len(mask)), max_size=3)),
                started_unix_s=draw(floats),
                finished_unix_s=draw(floats),
                tags=tags,
                metrics=draw(st.dictionaries(names, st.floats(allow_nan=False), max_size=2)),
                leaf=leaf,
                leaves=number,
                version_policy=draw(st.sampled_from(["segment", "strict", "fail"])),
                version_changes=draw(
                    st.lists(st.builds(VersionChange, numbers, names, numbers, numbers, names), max_size=2)
                ),
                turn_ids=draw(st.lists(names, max_size=2)),
                own_reward=draw(st.booleans()),
                turn_rewards=draw(st.lists(st.none() | floats, max_size=3)),
            )
        )
    return leaves


def stored(leaves: Sequence[Trajectory], seq: int = 1, ended_with: int | None = None) -> Stored:
    row = packed.pack(leaves)
    first = leaves[0]
    facts = packed.facts_of(leaves, len(row))
    return Stored(Offer(seq=seq, session_id=first.session_id, group_id=first.group_id, facts=facts), row, ended_with)


def write(path: Path, *found: Sequence[Trajectory], ended_with: int | None = None) -> TableWriter:
    with TableWriter(path, KEPT_FOR, force=True) as table:
        for seq, leaves in enumerate(found, 1):
            table.add(leaves_of(stored(leaves, seq, ended_with), "policy"))
    return table


def read(path: Path) -> list[list[Trajectory]]:
    table = TableReader(path)
    assert table.kept_for == KEPT_FOR
    found = [list(leaves) for leaves in table.sessions()]
    assert table.check() == len(found)
    table.close()
    return found


@pytest.mark.slow
@examples(30)
@given(st.lists(sessions(), max_size=3, unique_by=lambda leaves: leaves[0].session_id))
def test_what_is_read_is_what_was_written(found: list[list[Trajectory]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        assert write(path, *found).rounded == 0
        again = read(path)
    assert again == found
    for leaves, same in zip(found, again, strict=True):
        for one, other in zip(leaves, same, strict=True):
            assert np.float32(one.logprobs).tobytes() == np.float32(other.logprobs).tobytes(), "-0.0 is not 0.0"


def test_logprobs_of_more_digits_become_the_nearest_float32_and_are_counted(tmp_path: Path) -> None:
    exact = msgspec.structs.replace(trajectory("s"), logprobs=[0.0, -0.1, -1e300])
    assert write(tmp_path / "t.parquet", [exact]).rounded == 2
    [[found]] = read(tmp_path / "t.parquet")
    assert found.logprobs == [0.0, float(np.float32(-0.1)), -np.inf]


def test_a_plain_parquet_reader_has_the_columns_that_the_docs_list(tmp_path: Path) -> None:
    one = msgspec.structs.replace(trajectory("s"), tags={"environment": "x", "task_id": "7", "color": "red"})
    write(tmp_path / "t.parquet", [one], ended_with=3)
    table = pq.read_table(tmp_path / "t.parquet")
    [row] = table.to_pylist()
    assert (row["environment"], row["task_id"], row["run_id"]) == ("x", "7", None)
    assert row["tags"] == [{"name": "color", "value": "red"}]
    assert (row["oldest_version"], row["newest_version"], row["num_tokens"], row["num_sampled"]) == (1, 2, 3, 2)
    assert (row["model"], row["group_ended_with"], row["token_ids"]) == ("policy", 3, [1, 2, 3])
    assert table.schema.metadata[b"laminar.schema_version"] == b"1"
    _, docs = (
        (Path(__file__).parents[3] / "docs/reference/tables.md")
        .read_text()
        .split("| column | type | meaning |\n| --- | --- | --- |\n")
    )
    assert docs.partition("\n\n")[0].splitlines() == [
        f"| `{column.name}` | {shown(column.type)} | {column.meaning} |" for column in COLUMNS
    ]


def test_a_row_group_is_written_once_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ROW_GROUP_TOKENS", 1000)
    long = msgspec.structs.replace(
        trajectory("s"),
        token_ids=[7] * 400,
        logprobs=[-0.5] * 400,
        loss_mask=[1] * 400,
        versions=[3] * 400,
    )
    write(tmp_path / "t.parquet", *([msgspec.structs.replace(long, session_id=f"s{n}")] for n in range(7)))
    meta = pq.ParquetFile(tmp_path / "t.parquet").metadata
    assert [meta.row_group(n).num_rows for n in range(meta.num_row_groups)] == [3, 3, 1]
    write(tmp_path / "none.parquet")
    assert read(tmp_path / "none.parquet") == []
