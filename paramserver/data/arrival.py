"""A chunk that arrives on a socket: its bytes are received into their place and digested while the cache has them.

By the library made of `receive.c` and the host's libxxhash, in one call for many pieces; without either in Python.
Invariants:
- the place stays mapped as long as the arrival lives;
- a call comes back after `ENOUGH_S`, one piece and the socket's own time limit at most.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
from typing import Protocol

from paramserver.core.records import DIGEST_BYTES, Digest
from paramserver.data.stream import LIBRARY

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
"""Received, then digested, at once: less than a core's own cache, so that the digest reads it from there."""
ENOUGH_S = 0.02  # after which whoever waits hears how far a chunk is
XXHASH_VERSION_MIN = 800  # before it XXH3 was not final


class Arrival(Protocol):
    """One chunk's bytes from some byte on. One thread's."""

    def receive(self, upto: int) -> int:
        """Receives from byte `upto` on: how many bytes came, 0 at the stream's end. OSError as `recv` has it."""

    def digest(self) -> bytes:
        """That of the whole chunk, once it is here."""


class PieceArrival:
    """In Python, a piece at a time."""

    def __init__(self, sock: socket.socket, place: memoryview, upto: int) -> None:
        self._sock, self._place = sock, place
        self._found = Digest(place[:upto])

    def receive(self, upto: int) -> int:
        num = self._sock.recv_into(self._place[upto : upto + PIECE_BYTES], 0, socket.MSG_WAITALL)
        self._found.update(self._place[upto : upto + num])
        return num

    def digest(self) -> bytes:
        return self._found.digest()


class _Found(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


class _Libraries:
    """What the two libraries do. OSError or AttributeError where they are not there."""

    def __init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.receive = ctypes.CDLL(str(LIBRARY)).laminar_receive
        self.receive.argtypes = (ctypes.c_int, pointer, size, size, ctypes.c_double, pointer, pointer)
        self.receive.restype = ctypes.c_ssize_t
        xxhash = ctypes.CDLL("libxxhash.so.0")
        if xxhash.XXH_versionNumber() < XXHASH_VERSION_MIN:
            raise OSError(errno.ENOSYS, f"libxxhash is of version {xxhash.XXH_versionNumber()}")
        # On x86-64 the one that chooses by the processor; elsewhere there is only one.
        self.update = getattr(xxhash, "XXH3_128bits_update_dispatch", None) or xxhash.XXH3_128bits_update
        self.update.argtypes = (pointer, pointer, size)
        self.update_address = ctypes.cast(self.update, pointer)
        self.create, self.free = xxhash.XXH3_createState, xxhash.XXH3_freeState
        self.reset, self.digest = xxhash.XXH3_128bits_reset, xxhash.XXH3_128bits_digest
        self.create.argtypes, self.create.restype = (), pointer
        self.digest.restype = _Found
        for function in (self.free, self.reset, self.digest):
            function.argtypes = (pointer,)


def _load() -> _Libraries | None:
    try:
        return _Libraries()
    except (OSError, AttributeError) as error:  # not there, or of an older version
        log.info("chunks are received piece by piece in Python, which takes more processor time: %s", error)
        return None


_libraries = _load()


class ChunkArrival:
    """By the libraries: most often the whole chunk in one call, in which other threads run."""

    def __init__(self, of: _Libraries, sock: socket.socket, place: memoryview, upto: int) -> None:
        self._of, self._sock, self._size = of, sock, len(place)
        self._held = ctypes.c_char.from_buffer(place)  # keeps it mapped
        self._address = ctypes.addressof(self._held)
        self._state = of.create()
        if not self._state:
            raise MemoryError("no memory for a digest")
        of.reset(self._state)
        of.update(self._state, self._address, upto)

    def receive(self, upto: int) -> int:
        of, left = self._of, self._size - upto
        num = int(
            of.receive(
                self._sock.fileno(), self._address + upto, left, PIECE_BYTES, ENOUGH_S, of.update_address, self._state
            )
        )
        if num < 0:
            raise OSError(-num, os.strerror(-num))
        return num

    def digest(self) -> bytes:
        found = self._of.digest(self._state)
        return int(found.high << 64 | found.low).to_bytes(DIGEST_BYTES, "big")

    def __del__(self) -> None:
        if getattr(self, "_state", None):
            self._of.free(self._state)


def begin(sock: socket.socket, place: memoryview, upto: int) -> Arrival:
    """Of a chunk whose first `upto` bytes lie in `place` already. The socket's calls wait (`wire.wait_in_kernel`)."""
    if _libraries is None:
        return PieceArrival(sock, place, upto)
    return ChunkArrival(_libraries, sock, place, upto)
