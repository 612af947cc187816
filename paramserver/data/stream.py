"""Copying large pieces of memory beside the caches, by the library made of `stream.c`; without it, as numpy copies.

Invariants: source and target do not overlap; other threads run meanwhile; what was copied is there for whoever is told.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Protocol

import numpy as np

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_stream.so")
STREAM_BYTES_MIN = 256 << 10
"""A smaller piece may be in a cache, and stay there."""


class _Copy(Protocol):
    def __call__(self, target: int, source: int, size: int, /) -> None: ...


def _load() -> _Copy | None:
    try:
        found: _Copy = _typed(ctypes.CDLL(str(LIBRARY)))
    except OSError as error:
        log.info("large copies go through the caches, which takes up to twice as long: %s", error)
        return None
    return found


def _typed(library: ctypes.CDLL) -> _Copy:
    function = library.laminar_stream_copy
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function


_copy = _load()


def copy(target: memoryview, source: memoryview) -> None:
    """Copies all of `source` into `target`, which is as long."""
    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if to.nbytes != of.nbytes:
        raise ValueError(f"{of.nbytes} bytes do not fit {to.nbytes}")
    if not to.flags.writeable:
        raise ValueError("the target is read-only")
    if _copy is None or of.nbytes < STREAM_BYTES_MIN:
        np.copyto(to, of)
    else:
        _copy(to.ctypes.data, of.ctypes.data, of.nbytes)


def through_caches(target: memoryview, source: memoryview) -> None:
    """As `copy`, for a target that is read soon."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
