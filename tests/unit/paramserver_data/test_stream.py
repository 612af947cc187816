"""Copies beside the caches: every byte, at every alignment, no byte more, and the digest that xxhash makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import xxhash

from paramserver.data import stream

GROUP = 2 * 4096  # pages copied side by side
SIZES = [241, 256, 1023, 1024, 1025, GROUP - 1, 2 * GROUP - 1, 2 * GROUP, 3 * GROUP + 65, stream.STREAM_BYTES_MIN + 1]
BYTES = np.random.default_rng(0).integers(1, 256, max(SIZES) + 256, np.uint8)

Pieces = Sequence[memoryview]
Copy = Callable[[memoryview, Pieces], bytes]


def cut(source: memoryview, *at: int) -> list[memoryview]:
    return [source[start:end] for start, end in zip((0, *at), (*at, len(source)), strict=True)]


def aligned(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros from the beginning of a cache line on."""
    found = np.zeros(size + 64, np.uint8)
    start = -found.ctypes.data % 64
    return found[start : start + size]


def check(copy: Copy, to: int, pieces: list[memoryview]) -> None:
    source = b"".join(pieces)
    target = aligned(to + len(source) + 64)
    digest = copy(memoryview(target)[to : to + len(source)], pieces)
    assert digest == xxhash.xxh3_128(source).digest()
    assert target[to : to + len(source)].tobytes() == source
    assert not target[:to].any()
    assert not target[to + len(source) :].any()


def copied(target: memoryview, pieces: Pieces) -> bytes:
    (digest,) = stream.copy(target, [pieces])
    return digest


def streamed(target: memoryview, *chunks: Pieces) -> list[bytes]:
    """What the library does, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "through_caches", lambda *_: pytest.fail("the library did not do it"))
        return stream.copy(target, chunks)


def streamed_one(target: memoryview, pieces: Pieces) -> bytes:
    (digest,) = streamed(target, pieces)
    return digest


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream._copy is not None, "`make env` compiles stream.c"
    monkeypatch.setattr(stream, "STREAM_BYTES_MIN", 1)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_copied_and_digested_and_none_beside_it(size: int) -> None:
    for of in (0, 1, 33, 64):
        source = memoryview(BYTES)[of : of + size]
        check(streamed_one, 64, [source])
        check(copied, 17, [source])
        check(stream.through_caches, 0, [source])


@pytest.mark.usefixtures("built")
def test_pieces_may_end_anywhere() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        size = int(random.integers(2 * GROUP, max(SIZES)))
        source = memoryview(BYTES)[:size]
        near = random.choice([1, 63, 64, 65, 128, 1024, GROUP], 3) + random.integers(0, 2, 3)
        cuts = sorted({*random.integers(0, size, 4).tolist(), *near.tolist(), size - 1, size - 65})
        check(streamed_one, 0, cut(source, *cuts))


@pytest.mark.usefixtures("built")
def test_each_chunk_has_a_digest_of_its_own() -> None:
    chunks = [
        [memoryview(BYTES)[:1000], memoryview(BYTES)[5:29]],
        [memoryview(BYTES)[:4096]],
        [memoryview(BYTES)[:241]],
    ]
    target = aligned(1024 + 4096 + 241)
    digests = streamed(memoryview(target), *chunks)
    assert digests == [xxhash.xxh3_128(b"".join(pieces)).digest() for pieces in chunks]
    assert target.tobytes() == b"".join(piece for pieces in chunks for piece in pieces)
    chunks.append([memoryview(b"few")])
    digests = stream.copy(memoryview(aligned(1024 + 4096 + 241 + 3)), chunks)
    assert digests == [xxhash.xxh3_128(b"".join(pieces)).digest() for pieces in chunks], "one that began amid a line"


@pytest.mark.usefixtures("built")
def test_few_bytes_are_digested_as_well() -> None:
    for size in (0, 1, 16, 17, 128, 129, 240):
        check(copied, 0, [memoryview(BYTES)[:size]])


def test_without_the_library_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_copy", None)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1000)
    check(copied, 0, cut(memoryview(BYTES), 1, 4096, 70_000))


@pytest.mark.parametrize("least", [1, 1 << 30])
def test_what_does_not_fit_or_may_not_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(stream, "STREAM_BYTES_MIN", least)
    for size in (4, 6):
        with pytest.raises(ValueError):
            stream.copy(memoryview(bytearray(size)), [[memoryview(bytes(5))]])
    with pytest.raises(ValueError):
        stream.copy(memoryview(bytes(4)), [[memoryview(bytes(4))]])
