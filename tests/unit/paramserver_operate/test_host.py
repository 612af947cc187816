"""The report of `paramserver doctor`: judgements of numbers, and of the real host and real ports."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from paramserver.cli import cli
from paramserver.client import RelayClient
from paramserver.doctor import examine
from paramserver.host import BUFFER_MIN, FILES_MIN, Host, address_of, judge, judge_clock, look
from paramserver.memory.orphans import Orphan
from paramserver.memory.pool import Pool
from protos.access.etcd import EtcdAccess
from protos.errors import Conflict, InvalidRequest, OutOfCapacity
from protos.findings import Finding
from tests.support.relays import Relays

GOOD = Host(
    pool_dir=Path("/dev/shm/laminar/a"),
    file_system="tmpfs",
    free_bytes=100 << 30,
    memory_bytes=100 << 30,
    huge="within_size",
    kernel=(5, 15),
    files_max=FILES_MIN,
    receive_buffer_max=BUFFER_MIN,
    send_buffer_max=BUFFER_MIN,
    congestion_control="cubic",
    orphans=(),
)


def wrong(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if not finding.right]


def test_a_good_host_has_nothing_wrong() -> None:
    assert wrong(judge(GOOD, 64 << 30)) == []


def test_a_newer_kernel_needs_no_huge_pages_of_the_mount() -> None:
    assert wrong(judge(replace(GOOD, huge="never", kernel=(6, 1)), 64 << 30)) == []


@pytest.mark.parametrize(
    ("change", "what", "advice", "remedy"),
    [
        ({"file_system": "ext4"}, "pool directory in memory", False, "/dev/shm"),
        ({"memory_bytes": 63 << 30}, "memory for the pool", False, "smaller --pool-bytes"),
        ({"free_bytes": 63 << 30}, "room for the pool", False, "size=65G"),
        ({"huge": "never"}, "huge pages on the tmpfs", True, "huge=within_size"),
        ({"files_max": 1024}, "open files", False, "ulimit -n 4096"),
        ({"orphans": (Orphan(Path("/dev/shm/laminar/b"), 1 << 30),)}, "orphaned pools", True, "1 GiB come back"),
        ({"congestion_control": "bbr"}, "congestion control", True, "tcp_allowed_congestion_control='cubic ...'"),
        ({"receive_buffer_max": 212992}, "socket buffers (rmem_max)", True, "net.core.rmem_max=4194304"),
    ],
)
def test_what_is_not_right_is_named_with_what_mends_it(
    change: dict[str, object], what: str, advice: bool, remedy: str
) -> None:
    findings = judge(replace(GOOD, **change), 64 << 30)  # type: ignore[arg-type]
    assert wrong(findings) == [what]
    [finding] = [finding for finding in findings if not finding.right]
    assert finding.advice is advice
    assert remedy in finding.remedy


def test_etcd_must_answer_well_within_a_lease() -> None:
    assert judge_clock(0.4, 5.0).right
    assert not judge_clock(2.0, 5.0).right


def test_this_host_is_read_and_pools_without_a_relay_are_found(tmp_path: Path) -> None:
    for name in ("left", "live"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
        (tmp_path / name / "file").write_bytes(bytes(8192))
    held = os.open(tmp_path / "live" / ".lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    found = look(tmp_path / "new" / "pool")
    assert look(tmp_path / "new").orphans == (Orphan(tmp_path / "left", 8192),)
    assert min(found.free_bytes, found.memory_bytes) > 0
    assert found.files_max > 0
    os.close(held)


def test_an_interface_gives_its_address_and_an_unknown_one_is_named() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(InvalidRequest, match=r"--bind-interface eth99: .* \(interfaces of this host: lo"):
        address_of("eth99")


async def test_a_relay_without_etcd_needs_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found() -> Finding:
        [one] = [one for one in await examine(tmp_path, 1, None, [], 5.0, EtcdAccess()) if "etcd" in one.what]
        return one

    assert (await found()).right
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    none = await found()
    assert (none.right, none.advice, none.found) == (False, True, "no etcd binary found")
    assert "[etcd]'" in none.remedy


@pytest.mark.slow
async def test_ports_that_are_open_and_those_that_are_not(relays: Relays, etcd: str, tmp_path: Path) -> None:
    daemon = relays.start("a", "--bind-interface", "lo", "--max-rate", "1GiB")
    clients = [RelayClient(daemon.ready["grpc"]), RelayClient("127.0.0.1:1")]
    findings = await examine(tmp_path, 1, etcd, clients, 5.0, EtcdAccess())
    ports = {finding.what: finding.right for finding in findings if "port" in finding.what or "etcd" in finding.what}
    assert ports == {
        "etcd answers in time": True,
        f"control port of {daemon.ready['grpc']}": True,
        "data port of a": True,
        "control port of 127.0.0.1:1": False,
    }


def test_the_command_exits_with_what_it_found(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--pool-dir", str(tmp_path / "p"), "--pool-bytes", "1000TiB"])
    assert result.exit_code == 1
    assert "wrong   room for the pool:" in result.output
    assert "mount -o remount,size=1024001G" in result.output


def test_a_pool_of_somebody_else_is_none_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose lock may not be opened may hold it."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".lock").write_bytes(b"x")
    opened = os.open

    def refuse(path: object, *more: int) -> int:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    assert look(tmp_path / "mine").orphans == ()


def test_what_is_left_in_a_pool_counts_as_room_for_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / ".lock").touch()
    (tmp_path / "left" / "file").write_bytes(bytes(8192))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1000, f_frsize=1))
    assert look(tmp_path / "left").free_bytes == 1000 + 8192
    assert look(tmp_path / "another").free_bytes == 1000


def test_what_a_stopped_relay_left_comes_back_with_one_command(tmp_path: Path) -> None:
    pool, etcd = tmp_path / "a", tmp_path / "a.etcd"
    for directory, content in ((pool, "snapshots/policy/v00000001/w"), (etcd, "etcd/member/wal/0.wal")):
        (directory / content).parent.mkdir(parents=True)
        (directory / content).write_bytes(bytes(8192))
        (directory / ".lock").touch()
    assert look(tmp_path / "b").orphans == (Orphan(pool, 16384),), "with the data of its own etcd"
    clear = ["clear", "--pool-dir", str(pool)]
    for running in (pool, etcd):
        with (running / ".lock").open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            refused = CliRunner().invoke(cli, clear)
            assert isinstance(refused.exception, Conflict)
            assert f"{running} is in use: its relay runs" in str(refused.exception)
            assert look(tmp_path / "b").orphans == ()
    assert "16 KiB came back from" in CliRunner().invoke(cli, clear).output
    assert list(tmp_path.iterdir()) == []
    assert "no relay left anything in" in CliRunner().invoke(cli, clear).output


def test_a_directory_with_anything_that_is_no_relays_is_not_cleared(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in (".lock", "thesis.txt"):
        (home / name).write_text("mine")
    refused = CliRunner().invoke(cli, ["clear", "--pool-dir", str(home)])
    assert isinstance(refused.exception, Conflict)
    assert "holds 'thesis.txt', which is no relay's" in str(refused.exception)
    assert (home / "thesis.txt").read_text() == "mine"


def test_a_pool_without_room_names_those_that_no_relay_holds(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / ".lock").touch()
    (tmp_path / "left" / "file").write_bytes(bytes(8192))
    pool = Pool(tmp_path / "pool", 1 << 60)
    with pytest.raises(OutOfCapacity) as refused:
        pool.preallocate()
    pool.close()
    assert f"`paramserver clear --pool-dir {tmp_path / 'left'}`" in refused.value.hint
