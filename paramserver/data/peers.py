"""Who is at the other end of a unix socket, by the kernel's word: as it was when it connected."""

from __future__ import annotations

import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_SO_PEERGROUPS = 59  # Linux 4.13: include/uapi/asm-generic/socket.h; `socket` does not have it


def user_of(sock: socket.socket) -> int:
    return _credentials(sock)[1]


def groups_of(sock: socket.socket) -> set[int]:
    """Its group, and those that it is in besides."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)  # as many as Python gives room for
    except OSError:  # it has more, or an older kernel does not say
        raw = b""
    return {_credentials(sock)[2], *struct.unpack(f"{len(raw) // 4}I", raw)}


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    process, user, group = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user, group
