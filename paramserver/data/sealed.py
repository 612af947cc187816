"""A socket whose bytes are encrypted and carry a keyed MAC: nobody in between reads or changes them, or repeats, leaves
out or adds any.

What is sent goes in records: length, bytes, tag, by AES-GCM. Its nonce is the record's number.

Invariants:
- no byte is handed out before the tag of its record was right;
- records are numbered in each direction, under a key of that direction and connection: one that is repeated, left out,
  moved or reflected has a wrong tag;
- a wrong tag, or a record that was sent in part, ends the connection for good;
- nothing passes beside the records: the ways in which other sockets send and receive are closed.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from typing import Any, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paramserver.data.frames import Partly

KEY_BYTES = 16
_LENGTH = struct.Struct("!I")
_NONCE = struct.Struct("!IQ")
_TAG_BYTES = 16
RECORD_BYTES_MAX = 256 << 10
"""Sent or received, and worked on, at once: it stays in a core's own cache."""
PARTLY_S = 0.1
"""A call comes back after so long and the socket's own time limit, whether or not a record is whole by then."""
RECORDS_MAX = 1 << 32
"""Under one key: 1 PiB. GCM is safe for as many by a wide margin."""


class Forged(OSError):
    """A record was not sent so by the other end. An OSError: whoever reads from a socket expects those."""


class SealedSocket(socket.socket):
    """A connected socket, taken over. `sends`, `receives`: the keys of the two directions, KEY_BYTES each."""

    def __init__(self, sock: socket.socket, *, sends: bytes, receives: bytes) -> None:
        timeout_s = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        self.settimeout(timeout_s)
        self._sends, self._receives = AESGCM(sends), AESGCM(receives)
        self._num_sent = self._num_received = 0
        self._outgoing = memoryview(bytearray(_LENGTH.size + RECORD_BYTES_MAX + _TAG_BYTES))
        self._incoming = memoryview(bytearray(_LENGTH.size + RECORD_BYTES_MAX + _TAG_BYTES))
        self._filled = 0  # of the record that is coming
        self._ready = memoryview(b"")  # checked, and not handed out yet
        self._cut, self._forged = False, False  # in sending, in receiving

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Sends one record, whole, and returns how many bytes were in it."""
        piece = memoryview(data).cast("B")[:RECORD_BYTES_MAX]
        if not piece:
            return 0
        _check(self._num_sent, self._cut)
        end = _LENGTH.size + len(piece) + _TAG_BYTES
        _LENGTH.pack_into(self._outgoing, 0, len(piece))
        self._sends.encrypt_into(_NONCE.pack(0, self._num_sent), piece, None, self._outgoing[_LENGTH.size : end])
        self._num_sent += 1
        self._cut = True  # until all of it is gone
        rest = self._outgoing[:end]
        while rest:
            rest = rest[super().send(rest, flags) :]
        self._cut = False
        return len(piece)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """At least one byte; 0 at the end, which anybody in between can bring about. What raises because nothing came
        in time may be called again, and so may what raises `Partly`: a record that trickles, as anybody in between can
        have it, holds no caller."""
        view = memoryview(buffer).cast("B")
        view = view[:nbytes] if nbytes else view
        if not view:
            return 0
        if not self._ready:
            length = self._receive_record()
            if length <= len(view):
                return self._open(length, view)
            self._open(length, whole := memoryview(bytearray(length)))
            self._ready = whole
        num = min(len(view), len(self._ready))
        view[:num], self._ready = self._ready[:num], self._ready[num:]
        return num

    def _receive_record(self) -> int:
        """The length of the next record, once it is here; 0 at the end."""
        _check(self._num_received, self._forged)
        if not self._fill(_LENGTH.size):
            return 0
        (length,) = _LENGTH.unpack_from(self._incoming)
        if not 0 < length <= RECORD_BYTES_MAX:
            self._fail("a record of a length that none has")
        return length if self._fill(_LENGTH.size + length + _TAG_BYTES) else 0

    def _fill(self, upto: int) -> bool:
        returns_at = time.monotonic() + PARTLY_S
        while self._filled < upto:
            if time.monotonic() > returns_at:
                raise Partly(errno.EAGAIN, "a part of a record came")
            num = super().recv_into(self._incoming[self._filled : upto], 0, socket.MSG_WAITALL)
            if num == 0:
                return False
            self._filled += num
        return True

    def _open(self, length: int, into: memoryview) -> int:
        if length == 0:
            return 0
        record = self._incoming[_LENGTH.size : self._filled]
        nonce = _NONCE.pack(0, self._num_received)
        try:
            self._receives.decrypt_into(nonce, record, None, into[:length])
        except InvalidTag:
            into[:length] = bytes(length)  # the library decrypts before it has seen the tag
            self._fail("bytes that the other end did not send so")
        self._num_received, self._filled = self._num_received + 1, 0
        return length

    def _fail(self, why: str) -> NoReturn:
        self._forged = True
        raise Forged(why)

    def _closed(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a sealed connection has send and recv_into alone")

    recv = recvfrom = recvfrom_into = recvmsg = recvmsg_into = _closed
    sendall = sendto = sendmsg = sendfile = sendmsg_afalg = _closed


def _check(number: int, failed: bool) -> None:
    if failed or number >= RECORDS_MAX:
        raise Forged("the connection has failed before" if failed else "too many records on one connection")
