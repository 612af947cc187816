"""Unix sockets that only some users of this host may use: making one, and checking who has connected.

Invariants:
- nobody connects before the socket has its mode and its group;
- a socket on which somebody listens is not taken over, and a file that is no socket is not removed;
- the peer's user is checked besides the mode: whoever loosens the mode of the file lets nobody in.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from protos.errors import Conflict, Forbidden, InvalidRequest

SCHEME = "unix:"
PATH_BYTES_MAX = 107
"""Of a socket's path: Linux has 108, with the zero at the end."""
BACKLOG = 64
_SO_PEERGROUPS = 59
"""Of Linux since 4.13; Python does not name it."""
_GROUPS_BYTES_MAX = 1024
"""The most that Python's getsockopt reads: 256 groups."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a unix socket, as the kernel says. `groups`: all of its groups."""

    pid: int
    uid: int
    groups: frozenset[int]


def socket_path(address: str) -> Path | None:
    """The path of a unix socket, which is written as `unix:PATH`, or as a path with a slash; None for HOST:PORT and
    URLs of HTTP."""
    if address.startswith(SCHEME):
        return Path(address.removeprefix(SCHEME))
    return Path(address) if "/" in address and "://" not in address else None


def group_id(name: str) -> int:
    """Raises InvalidRequest for a group that this host does not have."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise InvalidRequest(f"this host has no group {name!r}", hint="`getent group` lists them") from error


def listen_on(path: Path, group: int | None = None) -> socket.socket:
    """A socket that listens at `path`, for this user alone, or for `group`, too. Raises Conflict and InvalidRequest."""
    if is_stale(path):
        path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        if group is not None:
            os.chown(path, -1, group)
        os.chmod(path, 0o600 if group is None else 0o660)
        listener.listen(BACKLOG)  # until here nobody can connect
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise Conflict(f"cannot listen on {path}: {error.strerror}", hint="choose another path") from error
    return listener


def is_stale(path: Path) -> bool:
    """Whether a process that is gone left a socket at `path`; False where nothing is. Raises Conflict and
    InvalidRequest where no socket could be made."""
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise InvalidRequest(f"{path} is too long for a unix socket", hint=f"at most {PATH_BYTES_MAX} bytes")
    try:
        mode = path.lstat().st_mode
    except OSError:  # it is not there, or its directory is not: bind says which
        return False
    if not stat.S_ISSOCK(mode):
        raise Conflict(f"{path} is there, and no socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(1.0)
        try:
            attempt.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError as error:
            raise Conflict(f"cannot listen on {path}: {error.strerror or error}", hint="choose another path") from error
    raise Conflict(f"another process listens on {path}", hint="choose another path")


def remove(path: Path) -> None:
    """Of a socket that is closed: others need not find out that nobody listens."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def peer_of(descriptor: int) -> Peer:
    """Who connected to a unix socket of this process, as it was then. Raises OSError for a closed one.

    By its descriptor, since what event loops show of a socket has not all of its methods."""
    with socket.socket(fileno=os.dup(descriptor)) as connected:
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        try:
            more = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
        except OSError:  # an old kernel, or more groups than can be read: the first one counts alone
            more = b""
    pid, uid, gid = struct.unpack("iII", raw)
    return Peer(pid, uid, frozenset([gid, *struct.unpack(f"{len(more) // 4}I", more)]))


def admits(peer: Peer, group: int | None) -> bool:
    """Whether the peer is this process's user, root, or of `group`."""
    return peer.uid in (0, os.geteuid()) or (group is not None and group in peer.groups)


def check_peer(peer: Peer, group: int | None = None) -> None:
    """Raises Forbidden for a peer that is not admitted."""
    if not admits(peer, group):
        raise Forbidden(
            f"user {peer.uid} may not use this socket",
            hint="it is for the daemon's own user and root" + ("" if group is None else f", and for group {group}"),
        )
