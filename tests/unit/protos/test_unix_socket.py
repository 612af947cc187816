"""Unix sockets for some users alone: what may stand in their place, and who is let in."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.access.unix_socket import PATH_BYTES_MAX, Peer, check_peer, listen_on, peer_of, remove, socket_path
from protos.errors import Conflict, Forbidden, InvalidRequest


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="unix-") as directory:
        yield Path(directory) / "s.sock"


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("unix:/run/x.sock", "/run/x.sock"),
        ("unix:x.sock", "x.sock"),
        ("/run/x.sock", "/run/x.sock"),
        ("./x.sock", "x.sock"),
        ("127.0.0.1:80", None),
        ("[::1]:80", None),
        ("http://127.0.0.1:80/x", None),
        ("x.sock", None),
    ],
)
def test_what_is_a_path_and_what_is_not(address: str, found: str | None) -> None:
    assert socket_path(address) == (None if found is None else Path(found))


def test_a_socket_is_its_owners_and_names_its_peer(path: Path) -> None:
    before = os.umask(0)
    try:
        with listen_on(path) as listener, socket.socket(socket.AF_UNIX) as client:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            client.connect(str(path))
            listener.setblocking(True)
            accepted, _ = listener.accept()
            with accepted:
                peer = peer_of(accepted.fileno())
            assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
            assert peer.groups >= {os.getegid()}
            check_peer(peer)
    finally:
        os.umask(before)


def test_who_may_use_it() -> None:
    check_peer(Peer(1, 0, frozenset({0})))
    check_peer(Peer(1, 4711, frozenset({7, 8})), group=8)
    for peer, group in ((Peer(1, 4711, frozenset({0})), None), (Peer(1, 4711, frozenset({7})), 8)):
        with pytest.raises(Forbidden, match="user 4711 may not use this socket"):
            check_peer(peer, group)


def test_a_socket_that_nobody_listens_on_is_replaced(path: Path) -> None:
    listen_on(path).close()
    assert path.exists()
    with listen_on(path):
        pass
    remove(path)
    assert not path.exists()
    remove(path)


def test_a_socket_that_somebody_listens_on_is_not_taken(path: Path) -> None:
    with listen_on(path), pytest.raises(Conflict, match="another process listens on"):
        listen_on(path)


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_stays(path: Path, kind: str) -> None:
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/etc/passwd")
    with pytest.raises(Conflict, match="is there, and no socket"):
        listen_on(path)
    assert os.path.lexists(path)


def test_places_where_no_socket_can_be(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="too long for a unix socket"):
        listen_on(path.with_name("x" * PATH_BYTES_MAX))
    with pytest.raises(Conflict, match="No such file or directory"):
        listen_on(path.parent / "nowhere" / "s")
    with contextlib.suppress(PermissionError), pytest.raises(Conflict, match="cannot listen on"):
        listen_on(Path("/proc/s.sock"))
