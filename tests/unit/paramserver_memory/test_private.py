"""A relay's directories, and its unix socket, are for its user and one group."""

from __future__ import annotations

import grp
import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from paramserver.data import server
from paramserver.memory.private import keep_private
from protos.access.unix_socket import Peer, group_id, peer_of
from protos.errors import Forbidden, InvalidRequest, Unavailable

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to be several users")
NOBODY = 65534
GROUP = next(one for one in grp.getgrall() if one.gr_gid not in (0, NOBODY))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o700, 0o755, 0o777])
def test_a_directory_is_its_users_alone(tmp_path: Path, before: int | None) -> None:
    directory = tmp_path / "a" / "b"
    if before is not None:
        directory.mkdir(parents=True)
        directory.chmod(before)
    keep_private(directory, None, "--pool-dir")
    assert mode(directory) == 0o700


@as_root
def test_members_of_the_group_may_read_and_nobody_else(open_directory: Path) -> None:
    directory = open_directory / "pool"
    keep_private(directory, GROUP.gr_gid, "--pool-dir")
    (directory / "within").mkdir()
    (directory / "within" / "file").write_text("weights")
    read = ["/bin/cat", str(directory / "within" / "file")]

    def reads(*groups: int) -> bool:
        done = subprocess.run(
            read, capture_output=True, text=True, check=False, user=NOBODY, group=NOBODY, extra_groups=groups, cwd="/"
        )
        return "weights" in done.stdout

    assert (reads(GROUP.gr_gid), reads()) == (True, False)
    assert (directory / "within").stat().st_gid == GROUP.gr_gid
    keep_private(directory, None, "--pool-dir")
    assert (reads(GROUP.gr_gid), mode(directory)) == (False, 0o700), "without --group it is closed again"


@as_root
def test_another_users_directory_is_not_used(tmp_path: Path) -> None:
    directory = tmp_path / "pool"
    directory.mkdir()
    os.chown(directory, NOBODY, -1)
    with pytest.raises(InvalidRequest, match=r"belongs to another user.*--pool-dir"):
        keep_private(directory, None, "--pool-dir")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"cannot use .*file/pool.*--spill"):
        keep_private(tmp_path / "file" / "pool", None, "--spill")


def test_a_group_has_to_be_there() -> None:
    assert group_id(GROUP.gr_name) == GROUP.gr_gid
    with pytest.raises(InvalidRequest, match="no such group"):
        group_id("no such group")


@as_root
@pytest.mark.parametrize(("group", "extra"), [(NOBODY, ()), (NOBODY, (GROUP.gr_gid, 4242)), (GROUP.gr_gid, ())])
def test_the_kernel_says_who_connected(open_directory: Path, group: int, extra: tuple[int, ...]) -> None:
    path = open_directory / "publish.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(1)
        client = os.fork()  # no other program: the interpreter may be in a directory that is root's
        if client == 0:
            os.setgroups(extra)
            os.setgid(group)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX) as connected:
                connected.connect(str(path))
                connected.recv(1)
            os._exit(0)
        sock, _ = listener.accept()
        with sock:
            peer = peer_of(sock.fileno())
            assert (peer.uid, peer.groups) == (NOBODY, {group, *extra})
        os.waitpid(client, 0)


@pytest.mark.parametrize(
    ("user", "groups", "group", "may"),
    [
        (os.geteuid(), set(), None, True),
        (0, set(), None, True),
        (NOBODY, {7}, None, False),
        (NOBODY, {7}, 8, False),
        (NOBODY, {7}, 7, True),
    ],
)
def test_the_unix_socket_is_for_this_user_root_and_the_group(
    monkeypatch: pytest.MonkeyPatch, user: int, groups: set[int], group: int | None, may: bool
) -> None:
    monkeypatch.setattr(server, "peer_of", lambda descriptor: Peer(1, user, frozenset(groups)))
    with socket.socket(socket.AF_UNIX) as sock:
        if may:
            server._check_user(sock, group)
            return
        with pytest.raises(Forbidden, match=f"user {NOBODY} may not publish"):
            server._check_user(sock, group)
