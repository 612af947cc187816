"""Where every byte of a snapshot lies, computed from names, dtypes and shapes alone.

Invariants:
- a file laid out here is byte for byte what `safetensors.torch.save_file` writes for the same tensors
  (tensors by dtype from the widest kind down, then by name; JSON header padded with spaces to 8 bytes);
- sizes and offsets are known before the first byte moves; a later byte never changes them.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from paramserver.core.records import FileSpec
from protos.errors import InvalidRequest, UnsupportedField

DTYPES: dict[str, int] = {
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "I16": 2,
    "F8_E8M0": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per element, in the order in which safetensors writes the dtypes."""

_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}
HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit: readers refuse a longer header
DIMENSIONS_MAX = 64  # numpy's and torch's own limit
INT64_MAX = (1 << 63) - 1  # what a message's field holds
LAYOUTS_KEPT = 2
"""A trainer publishes the same tensors again and again; a layout of 300 takes 1.2 ms, for which the trainer waits."""
KEPT_TENSORS_MAX = 50_000
"""A layout of so many takes some 30 MB."""
RELAY = -1
"""Owner of a file that the master relay writes by itself."""
INDEX_NAME = "model.safetensors.index.json"
PLAIN = "file:"
"""Before the name of a plain file, where tensors are named."""
PLAIN_FILES_MAX = 256
"""Of one rank. A model directory has a dozen beside its weights."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as announced."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor's bytes lie in its file."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file: `head` (the safetensors header, or the whole of a plain file), then the tensors."""

    name: str
    size_bytes: int
    head: bytes
    tensors: tuple[TensorPlace, ...]


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A file that rides along with the tensors as it is, such as config.json."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a version. `metadata` goes into the headers of its files.

    `refuse_change`: the version is refused when it has another architecture than the one before. `wait_room_s`: how
    long this rank waits for room. `labels`: of the version, as this rank has them.
    """

    tensors: Sequence[TensorSpec]
    file_bytes_max: int = 4 << 30
    metadata: Mapping[str, str] | None = None
    refuse_change: bool = False
    plain: Sequence[PlainFile] = ()
    wait_room_s: float = 0.0
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """All files of a version, and per file the rank that writes it; RELAY writes what no rank can know."""

    files: tuple[FileLayout, ...]
    owners: tuple[int, ...]


def check_text(what: str, text: str) -> None:
    """InvalidRequest for a text without a form in UTF-8: a Python string may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is {text!r}, which is not valid Unicode", hint="leave out surrogates") from error


def check_step(step: int) -> int:
    """The trainer's step, a label that travels in 64 bits."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise InvalidRequest(f"step is {step!r}", hint="give a whole number") from error
    if not 0 <= number <= INT64_MAX:
        raise InvalidRequest(f"step is {number}", hint="give the trainer's step, from 0 on and of at most 63 bits")
    return number


def plan_layout(
    tensors: Sequence[TensorSpec],
    *,
    file_bytes_max: int = 4 << 30,
    metadata: Mapping[str, str] | None = None,
    plain: Sequence[PlainFile] = (),
) -> tuple[FileLayout, ...]:
    """Lays `tensors` out in one file, or in several of at most `file_bytes_max` tensor bytes plus their index.

    A tensor larger than `file_bytes_max` gets a file of its own. Raises InvalidRequest or UnsupportedField.
    """
    return plan_ranks([Part(tensors, file_bytes_max, metadata, plain=plain)]).files


def plan_ranks(parts: Sequence[Part]) -> Layout:
    """Like `plan_layout`, with files of its own for each rank's tensors, in the order of ranks, and one index."""
    plan = _plan_kept if sum(len(part.tensors) for part in parts) <= KEPT_TENSORS_MAX else _plan
    return plan(tuple(_FixedPart.of(part) for part in parts))


@dataclass(frozen=True, slots=True)
class _FixedPart:
    """The inputs of a part's layout, hashable."""

    tensors: tuple[TensorSpec, ...]
    file_bytes_max: int
    items: tuple[tuple[str, str], ...] | None
    plain: tuple[PlainFile, ...]

    @classmethod
    def of(cls, part: Part) -> Self:
        items = None if part.metadata is None else tuple(sorted(part.metadata.items()))
        return cls(tuple(part.tensors), part.file_bytes_max, items, tuple(part.plain))

    @property
    def metadata(self) -> Mapping[str, str] | None:
        return None if self.items is None else dict(self.items)


def _plan(parts: tuple[_FixedPart, ...]) -> Layout:
    for part in parts:
        _check(part.tensors, part.file_bytes_max)
    _check_parted(parts)
    _check_plain(parts)
    plain = [(_plain_layout(file), rank) for rank, part in enumerate(parts) for file in part.plain]
    beside, theirs = tuple(file for file, _ in plain), tuple(rank for _, rank in plain)
    split = [(rank, group) for rank, part in enumerate(parts) for group in _split(part.tensors, part.file_bytes_max)]
    if len(split) == 1:
        return Layout((_lay_out("model.safetensors", parts[0].tensors, parts[0].metadata), *beside), (0, *theirs))
    names = [f"model-{i:05d}-of-{len(split):05d}.safetensors" for i in range(1, len(split) + 1)]
    files = [_lay_out(name, group, parts[rank].metadata) for name, (rank, group) in zip(names, split, strict=True)]
    index = _index(names, [group for _, group in split])
    owners = (*(rank for rank, _ in split), 0 if len(parts) == 1 else RELAY, *theirs)
    return Layout((*files, index, *beside), owners)


_plan_kept = functools.lru_cache(maxsize=LAYOUTS_KEPT)(_plan)


def _check_parted(parts: Sequence[_FixedPart]) -> None:
    seen: dict[str, int] = {}
    for rank, part in enumerate(parts):
        for tensor in part.tensors:
            if tensor.name in seen:
                raise InvalidRequest(
                    f"tensor {tensor.name!r} was announced by rank {seen[tensor.name]} and by rank {rank}",
                    hint="each rank publishes tensors of its own: shards of one tensor need a name each",
                )
            seen[tensor.name] = rank


def _check_plain(parts: Sequence[_FixedPart]) -> None:
    seen: set[str] = set()
    for file in (file for part in parts for file in part.plain):
        if file.name.endswith((".safetensors", ".safetensors.index.json")):
            raise InvalidRequest(f"{file.name!r} would stand beside the weights", hint="they come as tensors")
        if file.name in seen:
            raise InvalidRequest(f"file {file.name!r} was announced twice", hint="one rank writes it")
        FileSpec(file.name, file.size_bytes)  # refuses what is no plain name
        seen.add(file.name)
    if len(seen) > PLAIN_FILES_MAX * len(parts):
        raise InvalidRequest(f"{len(seen)} plain files", hint=f"a rank writes {PLAIN_FILES_MAX} at most")


def _plain_layout(file: PlainFile) -> FileLayout:
    """A file without a head; all its bytes are those of one place."""
    return FileLayout(file.name, file.size_bytes, b"", (TensorPlace(PLAIN + file.name, 0, file.size_bytes),))


def _check(tensors: Sequence[TensorSpec], file_bytes_max: int) -> None:
    if not tensors:
        raise InvalidRequest("a version without tensors", hint="announce at least one tensor")
    if file_bytes_max <= 0:
        raise InvalidRequest(f"file_bytes_max is {file_bytes_max}", hint="give a positive number of bytes")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise UnsupportedField(
                f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which is not supported",
                hint=f"use one of {', '.join(DTYPES)}",
            )
        if len(tensor.shape) > DIMENSIONS_MAX:
            raise InvalidRequest(
                f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions", hint=f"at most {DIMENSIONS_MAX} are taken"
            )
        if any(not 0 <= size <= INT64_MAX for size in tensor.shape):
            raise InvalidRequest(
                f"tensor {tensor.name!r} has the shape {list(tensor.shape)}", hint="no size below 0, none above 64 bits"
            )
        if tensor.name in seen:
            raise InvalidRequest(f"tensor {tensor.name!r} was announced twice", hint="give each tensor its own name")
        if tensor.name in ("", "__metadata__"):
            raise InvalidRequest(f"{tensor.name!r} cannot name a tensor", hint="safetensors reserves it")
        if tensor.name.startswith(PLAIN):
            raise InvalidRequest(f"{tensor.name!r} cannot name a tensor", hint=f"{PLAIN!r} stands for plain files")
        check_text("a tensor's name", tensor.name)
        seen.add(tensor.name)


def _split(tensors: Sequence[TensorSpec], file_bytes_max: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size_bytes > file_bytes_max:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size_bytes
    return groups


def _lay_out(name: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> FileLayout:
    ordered = sorted(tensors, key=lambda tensor: (_RANK[tensor.dtype], tensor.name.encode()))
    entries: dict[str, object] = {}
    if metadata is not None:
        for key, value in metadata.items():
            check_text("a key of the metadata", key)
            check_text(f"the metadata's {key!r}", value)
        entries["__metadata__"] = dict(sorted(metadata.items()))
    offset = 0
    for tensor in ordered:
        end = offset + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidRequest(f"the header of {name} takes {len(text)} bytes", hint="use a lower file_bytes_max")
    head = struct.pack("<Q", len(text)) + text
    places, position = [], len(head)
    for tensor in ordered:
        places.append(TensorPlace(tensor.name, position, tensor.size_bytes))
        position += tensor.size_bytes
    return FileLayout(name, position, head, tuple(places))


def _index(names: Sequence[str], groups: Sequence[Sequence[TensorSpec]]) -> FileLayout:
    """The index that `transformers` writes beside several files."""
    weight_map = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    total = sum(tensor.size_bytes for group in groups for tensor in group)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    body = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return FileLayout(INDEX_NAME, len(body), body, ())
