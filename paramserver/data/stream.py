"""Copying large pieces of memory beside the caches and digesting them on the way, by the library made of `stream.c`.

Where that is missing, or does not fit the processor, numpy copies and xxhash digests, block by block. Numpy is imported
by the first copy: it is a fifth of a relay's start, and most relays receive from sockets alone.
Invariants: target and pieces do not overlap; other threads run meanwhile; when a call returns, every byte is visible to
any thread or process that sees something written after it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import xxhash

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_stream.so")
STREAM_BYTES_MIN = 256 << 10
"""A smaller target may be in a cache, and stay there."""
BLOCK_BYTES = 1 << 20  # digested, then copied out of the cache
DIGEST_BYTES = 16


class _Copy(Protocol):
    def __call__(self, to: int, pieces: int, sizes: int, counts: int, num_chunks: int, digests: object, /) -> int: ...


def _load() -> _Copy | None:
    try:
        function = ctypes.CDLL(str(LIBRARY)).laminar_copy_digest
    except (OSError, AttributeError) as error:  # not compiled, or by an older version of this file
        log.info("large copies go through the caches, which takes up to twice as long: %s", error)
        return None
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, pointer, pointer, pointer, ctypes.c_size_t, pointer)
    function.restype = ctypes.c_int
    found: _Copy = function
    return found


_copy = _load()


def copy(target: memoryview, chunks: Sequence[Sequence[memoryview]]) -> list[bytes]:
    """Copies chunks, each given in pieces, one after the other into `target`, which is as long.

    Returns the digest of each as it was read. Several at once cost less: after a chunk the caches hold nothing of
    Python's, and what is done between two takes some 50 µs.
    """
    import numpy as np

    if _copy is not None and len(target) >= STREAM_BYTES_MIN:
        to, of = np.frombuffer(target, np.uint8), [np.frombuffer(piece, np.uint8) for one in chunks for piece in one]
        sizes = np.array([piece.nbytes for piece in of], np.uintp)
        if not to.flags.writeable or sizes.sum() != to.nbytes:
            raise ValueError(f"{sizes.sum()} bytes do not fit {to.nbytes}, or it is read-only")
        pieces = np.array([_address(piece) for piece in of], np.uintp)
        counts = np.array([len(one) for one in chunks], np.uintp)
        found = ctypes.create_string_buffer(DIGEST_BYTES * len(chunks))
        if _copy(_address(to), _address(pieces), _address(sizes), _address(counts), len(chunks), found):
            return [found.raw[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)]
    return _copy_each(target, chunks)


def _copy_each(target: memoryview, chunks: Sequence[Sequence[memoryview]]) -> list[bytes]:
    digests, at = [], 0
    for pieces in chunks:
        size = sum(map(len, pieces))
        digests.append(through_caches(target[at : at + size], pieces))
        at += size
    if at != len(target):
        raise ValueError(f"{at} bytes do not fit {len(target)}")
    return digests


def _address(array: np.ndarray[tuple[int], np.dtype[np.generic]]) -> int:
    return int(array.__array_interface__["data"][0])


def through_caches(target: memoryview, pieces: Sequence[memoryview]) -> bytes:
    """Copies one chunk like `copy`, to a target that is read soon."""
    import numpy as np

    hasher, at = xxhash.xxh3_128(), 0
    for piece in pieces:
        for start in range(0, len(piece), BLOCK_BYTES):
            block = piece[start : start + BLOCK_BYTES]
            hasher.update(block)
            np.copyto(np.frombuffer(target[at : at + len(block)], np.uint8), np.frombuffer(block, np.uint8))
            at += len(block)
    if at != len(target):
        raise ValueError(f"{at} bytes do not fit {len(target)}")
    return hasher.digest()
