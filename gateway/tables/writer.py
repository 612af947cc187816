"""A Parquet file of trajectories as it is written: by row groups, under a temporary name until it is complete.

Invariants:
- memory holds one row group, of `ROW_GROUP_TOKENS` tokens and the session that went beyond, however long the table;
- the file has its name only when it is complete and on disk; whatever fails before leaves nothing behind;
- without `force`, no file is ever replaced, also not one that appeared meanwhile.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gateway.store.sync import sync_folder
from gateway.tables.schema import KeptFor, Leaf, record_batch, schema_of
from protos.errors import Conflict, InvalidRequest

ROW_GROUP_TOKENS = 1 << 20
"""Some 20 MB as arrays, and a third of it in the file."""
ROW_GROUP_ROWS = 16_384


class TableWriter:
    """`with TableWriter(path, kept_for) as out: out.add(leaves)`: the file is there when the block ends without an
    error. `rounded` counts logprobs that float32 does not hold exactly."""

    def __init__(self, path: Path, kept_for: KeptFor, *, force: bool = False) -> None:
        """Conflict if the file is there, unless `force`; InvalidRequest if its folder cannot be written."""
        self._path, self._force = path, force
        self._refuse_present()
        self._schema = schema_of(kept_for)
        self._part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            self._file = self._part.open("xb")
        except OSError as error:
            raise InvalidRequest(
                f"cannot write {self._part}: {error.strerror}", hint="name a file in a folder that can be written"
            ) from error
        self._parquet = pq.ParquetWriter(self._file, self._schema, compression="zstd", write_page_checksum=True)
        self._waiting: list[Leaf] = []
        self._waiting_tokens = 0
        self.num_sessions = self.num_rows = self.num_tokens = self.rounded = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file, self._parquet:
                if error is None:
                    self._write()
                    self._parquet.close()
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if error is None:
                self._name_it()
        finally:
            self._part.unlink(missing_ok=True)

    def add(self, leaves: Sequence[Leaf]) -> None:
        """Adds a session."""
        self._waiting += leaves
        self.num_sessions += 1
        for leaf in leaves:
            tokens = len(leaf.tokens["token_ids"])
            self.num_tokens += tokens
            self._waiting_tokens += tokens
            self.rounded += _rounded(leaf)
        if self._waiting_tokens >= ROW_GROUP_TOKENS or len(self._waiting) >= ROW_GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        batch = record_batch(self._waiting, self._schema)
        self._parquet.write_table(pa.Table.from_batches([batch]), row_group_size=len(batch))
        self.num_rows += len(batch)
        self._waiting, self._waiting_tokens = [], 0

    def _name_it(self) -> None:
        if self._force:
            self._part.replace(self._path)
        else:
            try:
                self._path.hardlink_to(self._part)
            except FileExistsError:
                self._refuse_present()
        sync_folder(self._path.parent)

    def _refuse_present(self) -> None:
        if self._path.exists() and not self._force:
            raise Conflict(f"{self._path} is there already", hint="--force replaces it")


def _rounded(leaf: Leaf) -> int:
    exact = leaf.tokens["logprobs"]
    if exact.dtype == np.float32:
        return 0
    with np.errstate(over="ignore"):
        return int(np.count_nonzero(exact.astype(np.float32) != exact))
