"""Finished trajectories as packed arrays: what the gateway's experience store keeps, and what it sends to trainers.

A *row* is one finished session, all its leaves: a prefix, a header (msgpack), and one array for each column, back to
back over the leaves. A *batch* is a header with its lease and the sizes of its rows, and the rows as they were stored:
who serves one does no work by token. All numbers are little-endian; every array begins at a multiple of 8 bytes.

    row    "LMR1", header size (u32), XXH3-64 of all that follows (u64); header; arrays
    batch  "LMB1", header size (u32); header; rows

Invariants:
- `unpack(pack(leaves)) == leaves`, to the bit: a column has the narrower of its formats only if that loses nothing;
- a column is compressed (zstd) only where that takes off at least a quarter;
- a row that was changed or cut anywhere is refused as Damaged, as is one whose header tells other sizes than it has.
"""

from __future__ import annotations

import struct
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from protos.decoding import decode_msgpack
from protos.trajectories import Trajectory

MEDIA_TYPE = "application/vnd.laminar.packed"
COLUMNS = ("token_ids", "logprobs", "loss_mask", "versions")
_FORMATS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "token_ids": (("I", "<u4"), ("q", "<i8")),
    "logprobs": (("f", "<f4"), ("d", "<f8")),
    "loss_mask": (("B", "|u1"), ("q", "<i8")),
    "versions": (("i", "<i4"), ("q", "<i8")),
}
"""Of each column, the formats that it may have, as `array` and as numpy name them: the first that loses nothing."""
_DTYPES = {(name, numpy): np.dtype(numpy) for name, formats in _FORMATS.items() for _, numpy in formats}
_ROW, _BATCH = struct.Struct("<4sIQ"), struct.Struct("<4sI")
_ROW_MAGIC, BATCH_MAGIC = b"LMR1", b"LMB1"
_ALIGNED = 8
ZSTD_LEVEL = -1
"""The fastest level that finds what token ids repeat: against level 1 they take 6 % more of a row, and half the time of
a reader."""
PAYS = 0.75
"""A compressed column has at most this share of its bytes."""
COMPRESSED_BYTES_MIN = 512
"""Shorter columns stay as they are: a batch of them costs more calls than it saves bytes."""
COLUMN_BYTES_MAX = 1 << 31
"""Of one column, decompressed: what a header may ask for."""


class Damaged(ValueError):
    """Not what was packed: changed, cut, or something else altogether."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a finished session without its tokens: what readers choose by."""

    rewards: list[float] = []  # by leaf
    status: str = "completed"
    sample_index: int = 0
    turns: int = 0
    num_tokens: int = 0  # of all leaves
    versions: dict[int, int] = {}  # tokens that are trained on, by the version that sampled them
    num_bytes: int = 0  # packed
    started_unix_s: float = 0.0
    finished_unix_s: float = 0.0
    tags: dict[str, str] = {}
    metrics: dict[str, float] = {}

    @property
    def oldest_version(self) -> int:
        return min(self.versions, default=0)

    @property
    def num_sampled(self) -> int:
        return sum(self.versions.values())

    @property
    def reward(self) -> float:
        """The mean of its leaves'."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0


def facts_of(leaves: Sequence[Trajectory], num_bytes: int) -> Facts:
    first = leaves[0]
    return Facts(
        rewards=[leaf.reward for leaf in leaves],
        status=first.status,
        sample_index=first.sample_index,
        turns=sum(leaf.turns for leaf in leaves),
        num_tokens=sum(len(leaf.token_ids) for leaf in leaves),
        versions=dict(_counted(leaves)),
        num_bytes=num_bytes,
        started_unix_s=min(leaf.started_unix_s for leaf in leaves),
        finished_unix_s=max(leaf.finished_unix_s for leaf in leaves),
        tags=first.tags,
        metrics=first.metrics,
    )


def _counted(leaves: Sequence[Trajectory]) -> Counter[int]:
    counted = Counter[int]()
    for leaf in leaves:
        counted.update(compress(leaf.versions, leaf.loss_mask))
    return counted


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished session in an experience store. `seq`: its number in the order of finishes. `uses`: before. `leased`:
    a reader has it, so it waits for no other."""

    seq: int
    session_id: str
    group_id: str
    uses: int = 0
    leased: bool = False
    facts: Facts


class _Column(msgspec.Struct, array_like=True, gc=False):
    name: str
    format: str  # numpy's name
    codec: str  # "" or "zstd"
    offset: int  # from the end of the header, which is aligned
    stored_bytes: int


class _RowHeader(msgspec.Struct):
    """`heads`: the leaves without their tokens. `lengths`: how many columns' items each leaf has, by column."""

    heads: list[Trajectory]
    lengths: list[list[int]]
    columns: list[_Column]


class Label(msgspec.Struct, frozen=True, gc=False):
    """Of a leaf, what arrays are made with besides its tokens."""

    session_id: str
    group_id: str
    reward: float


class _RowIndex(msgspec.Struct):
    """A `_RowHeader` of which the rest is passed over: it takes a third of the time."""

    heads: list[Label]
    lengths: list[list[int]]
    columns: list[_Column]


class _BatchHeader(msgspec.Struct, omit_defaults=True):
    lease_id: str
    rows: list[int]  # the size of each
    why: str = ""  # there are none


class Row:
    """A session as it was packed. Its heads are decoded, and its columns decompressed, when they are read: a batch that
    waits takes the memory of its packed bytes, and arrays go where they are wanted with no copy between."""

    __slots__ = ("_begin", "_columns", "_row", "labels", "lengths")

    def __init__(self, row: bytes | memoryview) -> None:
        """Damaged if the row is damaged."""
        header, self._begin = _header(row, _RowIndex)
        if len(header.lengths) != len(COLUMNS) or any(len(of) != len(header.heads) for of in header.lengths):
            raise Damaged(f"a packed row of {len(header.heads)} leaves has other lengths of them")
        self._row = memoryview(row)
        self._columns = {column.name: column for column in header.columns}
        self.labels: Sequence[Label] = header.heads
        self.lengths: Mapping[str, Sequence[int]] = dict(zip(COLUMNS, header.lengths, strict=True))  # of each leaf

    @property
    def heads(self) -> Sequence[Trajectory]:
        """The leaves without their tokens. Damaged if one is no trajectory."""
        heads: Sequence[Trajectory] = _header(self._row, _RowHeader)[0].heads
        return heads

    def column(self, name: str) -> npt.NDArray[Any]:
        """One of `COLUMNS`, of all leaves back to back; read-only. Damaged if it is not what the header tells."""
        found = self._columns.get(name)
        values = None if found is None else _array(self._row, self._begin, found)
        if values is None or len(values) != sum(self.lengths[name]):
            raise Damaged(f"a packed row's column {name} has not the length that its header tells")
        return values

    def trajectories(self) -> Iterator[Trajectory]:
        """Its leaves, each when it is taken. Damaged if one is no trajectory, or has other tokens than its header
        tells."""
        ends = dict.fromkeys(COLUMNS, 0)
        columns = {name: self.column(name) for name in COLUMNS}
        for number, head in enumerate(self.heads):
            yield self._leaf(number, head, columns, ends)

    def _leaf(
        self, number: int, head: Trajectory, columns: Mapping[str, npt.NDArray[Any]], ends: dict[str, int]
    ) -> Trajectory:
        lists: dict[str, Any] = {}
        for name in COLUMNS:
            begin = ends[name]
            ends[name] = begin + self.lengths[name][number]
            lists[name] = columns[name][begin : ends[name]].tolist()
        return msgspec.structs.replace(head, **lists)


def pack(leaves: Sequence[Trajectory]) -> bytes:
    """The row of one session. ValueError for numbers that no column takes. It works leaf by leaf: in a thread, no step
    of it keeps the others from running for long."""
    columns: list[_Column] = []
    bodies: list[bytes] = []
    offset = 0
    for name in COLUMNS:
        kind, raw = _numbers(name, [getattr(leaf, name) for leaf in leaves])
        codec, stored = _compressed(raw)
        columns.append(_Column(name, kind, codec, offset, len(stored)))
        bodies.append(stored + bytes(-len(stored) % _ALIGNED))
        offset += len(bodies[-1])
    heads = [msgspec.structs.replace(leaf, token_ids=[], logprobs=[], loss_mask=[], versions=[]) for leaf in leaves]
    lengths = [[len(getattr(leaf, name)) for leaf in leaves] for name in COLUMNS]
    header = msgspec.msgpack.encode(_RowHeader(heads, lengths, columns))
    body = b"".join((header, bytes(-(_ROW.size + len(header)) % _ALIGNED), *bodies))
    return _ROW.pack(_ROW_MAGIC, len(header), xxhash.xxh3_64_intdigest(body)) + body


def unpack(row: bytes | memoryview) -> list[Trajectory]:
    """The leaves of a row. Damaged if it is damaged."""
    return list(Row(row).trajectories())


def check(row: bytes | memoryview) -> None:
    """Damaged if the row is not what was packed. Costs nothing by token but the digest."""
    _header(row, msgspec.Raw)


def batch(lease_id: str, rows: Sequence[bytes]) -> bytes:
    """The answer to a sample: the rows as they are, under one lease."""
    return b"".join(batch_parts(lease_id, rows))


def batch_parts(lease_id: str, rows: Sequence[bytes], why: str = "") -> list[bytes]:
    """What a `batch` is joined of. `why`: there are no rows."""
    header = msgspec.msgpack.encode(_BatchHeader(lease_id, [len(row) for row in rows], why))
    padding = bytes(-(_BATCH.size + len(header)) % _ALIGNED)
    return [_BATCH.pack(BATCH_MAGIC, len(header)), header, padding, *rows]


def rows_of(body: bytes | memoryview) -> tuple[str, list[memoryview]]:
    """A batch's lease and rows, which share its memory, read-only. Damaged if it is cut or no batch."""
    body = memoryview(body).toreadonly()
    header, begin = _batch_header(body)
    return header.lease_id, list(_split(body, begin, header.rows))


def why_empty(body: bytes | memoryview) -> str:
    """In numbers, why the batch has no rows; empty where its gateway does not say. Damaged as `rows_of`."""
    return _batch_header(memoryview(body))[0].why


def _batch_header(body: memoryview) -> tuple[_BatchHeader, int]:
    """A batch's header, and where its rows begin."""
    if len(body) < _BATCH.size:
        raise Damaged("a packed batch without its beginning")
    magic, size = _BATCH.unpack_from(body)
    if magic != BATCH_MAGIC:
        raise Damaged(f"{magic!r} begins no packed batch")
    try:
        header = decode_msgpack(body[_BATCH.size : _BATCH.size + size], _BatchHeader)
    except msgspec.DecodeError as e:
        raise Damaged(f"a packed batch's header: {e}") from e
    begin = _aligned(_BATCH.size + size)
    if begin + sum(header.rows) != len(body) or min(header.rows, default=0) < 0:
        raise Damaged(f"a packed batch of {len(body)} bytes tells of {begin + sum(header.rows)}")
    return header, begin


def _split(body: memoryview, begin: int, sizes: Sequence[int]) -> Iterator[memoryview]:
    for size in sizes:
        yield body[begin : begin + size]
        begin += size


def _header(row: bytes | memoryview, kind: Any) -> tuple[Any, int]:
    """A row's header as a `kind`, and where its arrays begin. The digest does not cover the header's size: a changed
    one leaves no whole header."""
    if len(row) < _ROW.size:
        raise Damaged("a packed row without its beginning")
    magic, size, digest = _ROW.unpack_from(row)
    if magic != _ROW_MAGIC:
        raise Damaged(f"{magic!r} begins no packed row")
    view = memoryview(row)[_ROW.size :]
    if xxhash.xxh3_64_intdigest(view) != digest:
        raise Damaged("a packed row's digest differs")
    try:
        return decode_msgpack(view[:size], kind), _aligned(_ROW.size + size)
    except msgspec.DecodeError as e:
        raise Damaged(f"a packed row's header: {e}") from e


def _numbers(name: str, leaves: Sequence[list[Any]]) -> tuple[str, bytes]:
    """The narrowest format that keeps the items of all leaves as they are, and their bytes."""
    for kind, format in _FORMATS[name]:
        try:
            return format, b"".join([_exact(kind, items) for items in leaves])
        except OverflowError:
            continue
    raise ValueError(f"{name} has numbers of more than 64 bits")


def _exact(kind: str, items: list[Any]) -> bytes:
    """The items' bytes. OverflowError where the format does not keep one as it is."""
    found = array(kind, items)
    if kind == "f" and found.tolist() != items:
        raise OverflowError
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def _compressed(raw: bytes) -> tuple[str, bytes]:
    if len(raw) >= COMPRESSED_BYTES_MIN:
        smaller = _zstd.compressor.compress(raw)
        if len(smaller) <= PAYS * len(raw):
            return "zstd", smaller
    return "", raw


class _Zstd(threading.local):
    """Contexts of this thread: they are dear to make, and take one call at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _array(view: memoryview, begin: int, column: _Column) -> npt.NDArray[Any]:
    dtype = _DTYPES.get((column.name, column.format))
    if dtype is None:
        raise Damaged(f"a packed row's column {column.name} has the unknown format {column.format!r}")
    begin += column.offset
    stored = view[begin : begin + column.stored_bytes]
    if len(stored) != column.stored_bytes or column.offset < 0:
        raise Damaged(f"a packed row's column {column.name} is cut")
    if not column.codec:
        return np.frombuffer(stored, dtype)
    if column.codec != "zstd":
        raise Damaged(f"a packed row's column {column.name} has the unknown codec {column.codec!r}")
    try:
        if zstandard.frame_content_size(stored) > COLUMN_BYTES_MAX:
            raise Damaged(f"a packed row's column {column.name} is larger than {COLUMN_BYTES_MAX} bytes")
        return np.frombuffer(_zstd.decompressor.decompress(stored), dtype)
    except zstandard.ZstdError as e:
        raise Damaged(f"a packed row's column {column.name}: {e}") from e


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED
