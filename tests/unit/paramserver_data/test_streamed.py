"""Tensors in any order, whole or in pieces, make the file that `safetensors` writes, chunk by chunk."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from safetensors.numpy import save

from paramserver.core.layout import TensorSpec, plan_layout
from paramserver.core.records import Chunk, digest
from paramserver.data.streamed import Assembly
from protos.errors import InvalidRequest
from tests.support.weights import NUMPY_DTYPES, Arrays, weights

CHUNK = 4096


class Memory:
    """A sink that keeps one file, and refuses bytes that come twice."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.order: list[int] = []
        self.waiting: set[int] = set()

    def place(self, chunk: Chunk) -> memoryview:
        assert chunk.index not in self.order, "a chunk that was reported is written again"
        self.waiting.add(chunk.index)
        return memoryview(self.data)[chunk.offset : chunk.offset + chunk.length]

    def whole(self, chunks: Sequence[Chunk], data: memoryview) -> list[bytes]:
        assert not self.waiting & {one.index for one in chunks}
        start = chunks[0].offset
        self.data[start : start + len(data)] = data
        self.order += [one.index for one in chunks]
        return [digest(data[one.offset - start : one.offset - start + one.length]) for one in chunks]

    def joined(self, chunk: Chunk) -> bytes:
        self.waiting.remove(chunk.index)
        self.order.append(chunk.index)
        return digest(bytes(self.data[chunk.offset : chunk.offset + chunk.length]))

    def close(self) -> None: ...


def assembly_of(tensors: Arrays) -> tuple[Assembly, Memory]:
    specs = [TensorSpec(name, NUMPY_DTYPES[array.dtype.name], array.shape) for name, array in tensors.items()]
    (file,) = plan_layout(specs)
    sink, assembly = Memory(file.size_bytes), Assembly([file.size_bytes], {0: file}, CHUNK)
    assembly.heads({0: file}, sink)
    return assembly, sink


def bytes_of(tensors: Arrays, name: str) -> memoryview:
    return memoryview(tensors[name].tobytes())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bytes_max", [None, 100, CHUNK, 10 * CHUNK])
def test_any_order_makes_the_same_file_with_every_chunk_reported_once(seed: int, bytes_max: int | None) -> None:
    tensors = {
        name: array[: array.shape[0] // 4 + 1] if array.ndim > 1 else array for name, array in weights(1).items()
    }
    assembly, sink = assembly_of(tensors)
    names = list(tensors)
    random.Random(seed).shuffle(names)
    for name in names:
        data = bytes_of(tensors, name)
        for start, end in [(0, len(data))] if bytes_max is None else assembly.pieces(name, bytes_max):
            assembly.take(name, data[start:end], sink)
    expected = save(tensors)
    assert assembly.absent() == []
    assert bytes(sink.data) == expected
    assert sorted(sink.order) == assembly.indices
    assert [assembly.digests[index] for index in assembly.indices] == [
        digest(expected[at : at + CHUNK]) for at in range(0, len(expected), CHUNK)
    ]


def test_pieces_end_where_chunks_end_so_that_hardly_any_is_joined() -> None:
    tensors = {"a": np.arange(50_000, dtype=np.uint8), "b": np.arange(50_000, dtype=np.uint8)}
    assembly, sink = assembly_of(tensors)
    for name in ("b", "a"):
        ranges = list(assembly.pieces(name, 2 * CHUNK))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == 50_000
        assert all(end - start <= 2 * CHUNK for start, end in ranges)
        for start, end in ranges:
            before = set(sink.waiting)
            assembly.take(name, bytes_of(tensors, name)[start:end], sink)
            assert len(sink.waiting - before) <= 1
    assert sink.waiting == set()


def test_what_was_not_announced_comes_twice_or_is_absent_is_named() -> None:
    tensors = {"w": np.arange(8, dtype=np.uint8), "late": np.arange(8, dtype=np.uint8)}
    assembly, sink = assembly_of(tensors)
    with pytest.raises(InvalidRequest, match="'x' was not announced"):
        assembly.take("x", memoryview(b"1"), sink)
    assembly.take("w", bytes_of(tensors, "w")[:5], sink)
    assert sorted(assembly.absent()) == ["late", "w"]
    with pytest.raises(InvalidRequest, match="'w' came with more than its 8 bytes"):
        assembly.take("w", bytes_of(tensors, "w"), sink)
    assembly.take("w", bytes_of(tensors, "w")[5:], sink)
    with pytest.raises(InvalidRequest, match="'w' came with more"):
        assembly.take("w", bytes_of(tensors, "w"), sink)
    assert assembly.absent() == ["late"]
