"""A Parquet file of trajectories as it is read: checked for what it is before any of it is used.

Invariants:
- a file is refused as a whole, with the column and the row that is wrong and what belongs there: `check` reads all of
  it before anything is added anywhere;
- memory holds one row group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gateway.tables.schema import (
    COLUMNS,
    MODEL_KEY,
    SCHEMA_VERSION,
    VERSION_KEY,
    VOCABULARY_KEY,
    KeptFor,
    trajectory_of,
)
from protos.errors import InvalidRequest
from protos.packed import COLUMNS as TOKEN_COLUMNS
from protos.trajectories import Trajectory

BATCH_ROWS = 256
_READ = [column for column in COLUMNS if not column.derived]
_NAMES = [column.name for column in _READ]
_OTHERS = [name for name in _NAMES if name not in TOKEN_COLUMNS]
_REQUIRED = [column.name for column in _READ if not column.nullable]
_FOREIGN = "`gateway export` writes such files; docs/reference/tables.md has their columns"


class TableReader:
    """An exported file. `ended_groups`: those that ended with fewer members than their size; complete after `check`."""

    def __init__(self, path: Path) -> None:
        """InvalidRequest for a file that is no export, or has another schema."""
        self._path = path
        self.ended_groups: dict[str, int] = {}
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error}", hint="name an exported file") from error
        except pa.ArrowInvalid as error:
            raise InvalidRequest(f"{path} is no Parquet file, or is damaged: {error}", hint=_FOREIGN) from error
        self.kept_for = self._kept_for(self._file.schema_arrow.metadata or {})
        self._check_columns()

    @property
    def num_rows(self) -> int:
        return int(self._file.metadata.num_rows)

    def close(self) -> None:
        self._file.close()

    def check(self) -> int:
        """Reads all of it: the number of sessions. InvalidRequest names the first row that is wrong."""
        seen: set[str] = set()
        for first_row, leaves in self._sessions():
            name = leaves[0].session_id
            if name in seen:
                raise self._wrong(first_row, "session_id", f"{name!r} a second time: a session's rows stand together")
            seen.add(name)
        return len(seen)

    def sessions(self) -> Iterator[Sequence[Trajectory]]:
        """The leaves of each session, in the file's order. Errors as `check`."""
        return (leaves for _, leaves in self._sessions())

    def _kept_for(self, metadata: Mapping[bytes, bytes]) -> KeptFor:
        if VERSION_KEY not in metadata:
            raise InvalidRequest(
                f"{self._path} is not a table of trajectories: its metadata has no {VERSION_KEY.decode()}",
                hint=_FOREIGN,
            )
        found = metadata[VERSION_KEY].decode(errors="replace")
        if found != str(SCHEMA_VERSION):
            raise InvalidRequest(
                f"{self._path} has schema version {found}; this gateway reads {SCHEMA_VERSION}",
                hint="import it with the release that wrote it",
            )
        if MODEL_KEY not in metadata or VOCABULARY_KEY not in metadata:
            raise InvalidRequest(f"{self._path}: its metadata names no model or vocabulary", hint=_FOREIGN)
        return KeptFor(metadata[MODEL_KEY].decode(), metadata[VOCABULARY_KEY].decode())

    def _check_columns(self) -> None:
        found = self._file.schema_arrow
        for column in _READ:
            if column.name not in found.names:
                raise InvalidRequest(
                    f"{self._path} has no column {column.name!r}; expected one of type {column.type}", hint=_FOREIGN
                )
            if (type_ := found.field(column.name).type) != column.type:
                raise InvalidRequest(
                    f"{self._path}: column {column.name!r} has type {type_}; expected {column.type}", hint=_FOREIGN
                )

    def _sessions(self) -> Iterator[tuple[int, Sequence[Trajectory]]]:
        """Each session with the number of its first row."""
        leaves: list[Trajectory] = []
        row = 0
        for trajectory in self._rows():
            expected = len(leaves), leaves[0].leaves if leaves else trajectory.leaves
            if leaves and trajectory.session_id != leaves[0].session_id:
                raise self._wrong(
                    row,
                    "session_id",
                    f"{trajectory.session_id!r}; expected leaf {expected[0]} of "
                    f"{expected[1]} of session {leaves[0].session_id!r}",
                )
            if (trajectory.leaf, trajectory.leaves) != expected:
                raise self._wrong(
                    row, "leaf", f"{trajectory.leaf} of {trajectory.leaves}; expected {expected[0]} of {expected[1]}"
                )
            leaves.append(trajectory)
            row += 1
            if len(leaves) == expected[1]:
                yield row - len(leaves), leaves
                leaves = []
        if leaves:
            raise self._wrong(
                row,
                "leaf",
                f"the end of the file; expected {leaves[0].leaves} rows of session "
                f"{leaves[0].session_id!r}, which has {len(leaves)}",
            )

    def _rows(self) -> Iterator[Trajectory]:
        first = expected = 0
        try:
            for group in range(self._file.num_row_groups):
                for batch in self._file.iter_batches(BATCH_ROWS, row_groups=[group], columns=_NAMES):
                    yield from self._trajectories(batch, first)
                    first += len(batch)
                expected += self._file.metadata.row_group(group).num_rows
                if first != expected:  # the length of a page is in its header, which no checksum covers
                    raise pa.ArrowInvalid(f"row group {group} ends there, and should at row {expected}")
        except (pa.ArrowException, OSError) as error:
            raise InvalidRequest(
                f"{self._path} is damaged behind row {first}: {error}", hint="export it again, or copy it again"
            ) from error

    def _trajectories(self, batch: pa.RecordBatch, first: int) -> Iterator[Trajectory]:
        for name in _REQUIRED:
            if (empty := _first_null(batch.column(name))) is not None:
                raise self._wrong(first + empty, name, f"null; expected {batch.schema.field(name).type}")
        for name in TOKEN_COLUMNS:
            if (empty := _first_null(batch.column(name).values)) is not None:
                row = int(np.searchsorted(batch.column(name).offsets.to_numpy(), empty, "right")) - 1
                raise self._wrong(first + row, name, "a null among its items; expected numbers")
        tokens = {name: _Lists(batch.column(name)) for name in TOKEN_COLUMNS}
        for number, row in enumerate(batch.select(_OTHERS).to_pylist()):
            found = {name: lists.row(number) for name, lists in tokens.items()}
            self._check_tokens(first + number, found)
            try:
                trajectory = trajectory_of(row, {name: values.tolist() for name, values in found.items()})
            except msgspec.ValidationError as error:
                what, _, where = str(error).partition(" - at `$.")
                column, _, rest = where.rstrip("`").replace("[", ".", 1).partition(".")
                raise self._wrong(
                    first + number, column or "?", f"{what} ({column}[{rest})" if rest else what
                ) from error
            self._check_values(first + number, trajectory)
            if row["group_ended_with"] is not None:
                self.ended_groups[trajectory.group_id] = row["group_ended_with"]
            yield trajectory

    def _check_tokens(self, row: int, found: Mapping[str, npt.NDArray[Any]]) -> None:
        length = len(found["token_ids"])
        for name, values in found.items():
            if len(values) != length:
                raise self._wrong(row, name, f"{len(values)} items; expected {length}, as many as `token_ids`")
        if length and found["token_ids"].min() < 0:
            raise self._wrong(row, "token_ids", f"{found['token_ids'].min()}; expected no negative id")
        mask = found["loss_mask"]
        if not np.isin(mask, (0, 1)).all():
            raise self._wrong(row, "loss_mask", f"{mask[~np.isin(mask, (0, 1))][0]}; expected 0 or 1")
        if length and found["versions"][mask == 1].min(initial=0) < 0:
            raise self._wrong(row, "versions", "a negative one where `loss_mask` is 1; expected the weight version")

    def _check_values(self, row: int, trajectory: Trajectory) -> None:
        if trajectory.split != "train":
            raise self._wrong(row, "split", f"{trajectory.split!r}; expected 'train': evaluations are never trained on")
        if not math.isfinite(trajectory.reward):
            raise self._wrong(row, "reward", f"{trajectory.reward}; expected a finite number")
        if not trajectory.session_id:
            raise self._wrong(row, "session_id", "an empty name; expected one")
        if trajectory.leaves < 1:
            raise self._wrong(row, "leaves", f"{trajectory.leaves}; expected 1 or more")
        length = len(trajectory.token_ids)
        for segment in trajectory.segments:
            if not 0 <= segment.start <= segment.end <= length:
                raise self._wrong(
                    row, "segments", f"one of {segment.start} to {segment.end}; expected a range within {length} tokens"
                )

    def _wrong(self, row: int, column: str, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._path}, row {row}, column {column!r}: {what}", hint="rows count from 0")


class _Lists:
    """A column of lists of numbers: row by row as arrays, which share its memory."""

    def __init__(self, column: pa.ListArray) -> None:
        self._offsets, self._values = column.offsets.to_numpy(), column.values.to_numpy()

    def row(self, number: int) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._values[self._offsets[number] : self._offsets[number + 1]]
        return found


def _first_null(column: pa.Array) -> int | None:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))) if column.null_count else None
