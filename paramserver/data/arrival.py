"""A chunk that arrives on a socket: its bytes are received into their place and digested on the way.

By the library made of `receive.c`, in one call for many pieces; where that is missing, or does not fit the processor or
a chunk of few bytes, in Python. Invariants:
- the place stays mapped as long as the arrival lives;
- a call comes back after `ENOUGH_S`, one piece and the socket's own time limit at most.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from typing import Protocol

from paramserver.core.records import DIGEST_BYTES, Digest
from paramserver.data.frames import is_plain
from paramserver.data.stream import LIBRARY

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
"""Received, then digested, at once: less than a core's own cache, so that the digest reads it from there."""
ENOUGH_S = 0.02  # after which a call returns, so that the fetch can report how far a chunk is


class Arrival(Protocol):
    """The bytes of one chunk from some byte on; for one thread."""

    def receive(self) -> int:
        """Receives some of what is missing: how many bytes came, 0 at the stream's end. Raises OSError as `recv`."""

    def digest(self) -> bytes:
        """The digest of the whole chunk, once it is here."""


class PieceArrival:
    """In Python, a piece at a time."""

    def __init__(self, sock: socket.socket, place: memoryview, upto: int) -> None:
        self._sock, self._place, self._upto = sock, place, upto
        self._found = Digest(place[:upto])

    def receive(self) -> int:
        num = self._sock.recv_into(self._place[self._upto : self._upto + PIECE_BYTES], 0, socket.MSG_WAITALL)
        self._found.update(self._place[self._upto : self._upto + num])
        self._upto += num
        return num

    def digest(self) -> bytes:
        return self._found.digest()


class _Chunk(ctypes.Structure):
    """`Chunk` of receive.c."""

    _fields_ = (
        ("place", ctypes.c_void_p),
        ("total", ctypes.c_uint64),
        ("upto", ctypes.c_uint64),
        ("lanes", ctypes.c_uint64 * 8),
        ("num_stripes", ctypes.c_uint64),
        ("digest", ctypes.c_uint8 * DIGEST_BYTES),
    )


class _Library:
    """The two functions of receive.c. OSError or AttributeError where they are not there."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(LIBRARY))
        self.begin, self.receive = library.laminar_receive_begin, library.laminar_receive
        self.begin.argtypes = (ctypes.c_void_p,)
        self.receive.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double)
        self.receive.restype = ctypes.c_ssize_t


def _load() -> _Library | None:
    try:
        return _Library()
    except (OSError, AttributeError) as error:  # not compiled, or by an older version of this file
        log.info(
            "chunks are received piece by piece in Python, which takes half as much processor time again: %s", error
        )
        return None


_library = _load()


class ChunkArrival:
    """By the library: most often the whole chunk in one call, in which other threads run."""

    def __init__(self, by: _Library, sock: socket.socket, chunk: _Chunk, place: memoryview) -> None:
        self._by, self._sock, self._chunk = by, sock, chunk
        self._place = place  # keeps it mapped

    def receive(self) -> int:
        num = int(self._by.receive(self._sock.fileno(), ctypes.byref(self._chunk), PIECE_BYTES, ENOUGH_S))
        if num < 0:
            raise OSError(-num, os.strerror(-num))
        return num

    def digest(self) -> bytes:
        return bytes(self._chunk.digest)


def begin(sock: socket.socket, place: memoryview, upto: int) -> Arrival:
    """Begins a chunk whose first `upto` bytes lie in `place`. The socket's calls must wait (`wait_in_kernel`)."""
    if _library is not None and is_plain(sock):
        address = ctypes.addressof(ctypes.c_char.from_buffer(place))
        chunk = _Chunk(place=address, total=len(place), upto=upto)
        if _library.begin(ctypes.byref(chunk)):
            return ChunkArrival(_library, sock, chunk, place)
    return PieceArrival(sock, place, upto)
