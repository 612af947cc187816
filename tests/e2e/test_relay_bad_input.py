"""Wrong addresses, ports, directories and sizes: one line that says what would be right, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from paramserver.cli import cli
from paramserver.client import RelayClient, TensorSource, publish
from paramserver.core import view as keys
from paramserver.data.frames import LinkBroken
from paramserver.membership import EtcdRegistry
from protos.errors import (
    Conflict,
    Corrupt,
    InvalidRequest,
    LaminarError,
    NotFound,
    OutOfCapacity,
    StaleEpoch,
    TooLarge,
    Unavailable,
    UnsupportedField,
)
from protos.laminar.v1 import relay_pb2 as pb
from tests.support.etcd import start_etcd
from tests.support.processes import Daemon, start
from tests.support.relays import Relays, until
from trainer_client.publisher import new_run_id

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0  # of what hangs
W = TensorSource("w", "U8", (8,), lambda: memoryview(b"12345678"))


def paramserver(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paramserver", *arguments]
    shell = ["bash", "-c", f'{before}; exec "$@"', "-"] if before else []
    return subprocess.run([*shell, *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def says_in_one_line(found: subprocess.CompletedProcess[str], words: str) -> None:
    assert found.returncode == 1, found.stderr
    assert re.fullmatch(rf"error: .*{words}.*\n", found.stderr), found.stderr


def records(etcd: str, prefix: str) -> list[str]:
    async def ask() -> list[str]:
        registry = await EtcdRegistry.connect(etcd, timeout_s=60.0)
        found = [entry.key for entry in (await registry.list(prefix)).entries]
        await registry.close()
        return found

    return asyncio.run(ask())


@pytest.fixture
def pool_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port that somebody listens on and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


SAID_AT_START = {
    "--pool-dir {home}": r"{home} holds 'thesis.txt', which is no relay's \(give --pool-dir a directory of its own\)",
    "--pool-bytes {toomuch}": r"a pool of [\d.]+ [TG]iB, .* has room for [\d.]+ [TGM]iB \(lower --pool-bytes",
    "--port {taken}": r"127\.0\.0\.1:{taken}: Address already in use .*\(choose another --port, or 0",
    "--etcd nowhere.invalid:2379": r"no etcd answers at nowhere\.invalid:2379 \(start one with `paramserver etcd`",
    "--ready-file /proc/nope/r": r"cannot write /proc/nope/r: No such file .*\(choose another --ready-file\)",
    "--pool-dir {unlockable}": r"cannot use {unlockable}: Is a directory \(choose another --pool-dir\)",
    "--pool-dir {file}/pool": r"cannot use {file}/pool: Not a directory \(choose another --pool-dir\)",
    "--pool-dir /proc/nope": r"cannot use /proc/nope: No such file or directory \(choose another --pool-dir\)",
    "--pool-bytes 0": r"a pool of 0 bytes \(give --pool-bytes a positive size\)",
    "--data-port {taken}": r"127\.0\.0\.1:{taken}: Address already in use .*\(choose another --data-port\)",
    "--metrics-port {taken}": r"127\.0\.0\.1:{taken}: Address already in use \(choose another --metrics-port\)",
    "--host 203.0.113.1": r"would serve whoever reaches it, without credentials .*--insecure in a closed network",
    "--host 203.0.113.1 --insecure": r"203\.0\.113\.1:0: Cannot assign requested address .*\(choose another --host",
    "--etcd 127.0.0.1:{taken}": r"no etcd answers at 127\.0\.0\.1:{taken} \(start one with",
    "--name a/b": r"'a/b' cannot name a relay \(letters, digits",
    "--chunk-bytes 12": r"chunks of 12 B \(use 4 KiB to 1 GiB\)",
}
NUM_QUICK = 4  # the others take the same path: half a second each


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, marks=() if number < NUM_QUICK else pytest.mark.slow)
        for number, flags in enumerate(SAID_AT_START)
    ],
)
def test_a_relay_that_cannot_start_says_why_and_leaves_nothing(
    shared_etcd: str, pool_dir: Path, taken: socket.socket, tmp_path: Path, flags: str
) -> None:
    home, unlockable, file = tmp_path / "home", tmp_path / "unlockable", tmp_path / "file"
    for directory in (home, unlockable / ".lock"):
        directory.mkdir(parents=True)
    for path in (file, home / "thesis.txt"):
        path.write_text("years of work")
    names = {
        "file": file,
        "home": home,
        "unlockable": unlockable,
        "taken": taken.getsockname()[1],
        "toomuch": 8 * shutil.disk_usage(pool_dir).total,
    }
    defaults = ("--name", "bad", "--etcd", shared_etcd, "--pool-dir", str(pool_dir), "--pool-bytes", "8MiB")
    found = paramserver("serve", *defaults, "--log-level", "error", *flags.format(**names).split())
    says_in_one_line(found, SAID_AT_START[flags].format(**names))
    assert [path for path in pool_dir.rglob("*") if path.name != ".lock"] == []
    assert (home / "thesis.txt").read_text() == "years of work"
    assert records(shared_etcd, keys.member_key("bad")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--etcd", "http://127.0.0.1:2379"),
        ("serve", "--etcd", "127.0.0.1"),
        ("status", "--relay", "127.0.0.1:99999"),
        ("serve", "--retain", "0"),
        ("serve", "--pool-dir", __file__),
        ("pull", "--relay", "127.0.0.1:1", "--model", "m", "--version", "0", "--out", "x"),
        ("versions", "--relay", "127.0.0.1:1"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_apart_from_failure(arguments: tuple[str, ...]) -> None:
    found = CliRunner().invoke(cli, arguments)
    assert found.exit_code == 2
    assert re.search(r"^Error: (Invalid value for|Missing option) '--", found.stderr, re.MULTILINE), found.stderr


# ---- etcd


def test_a_start_that_fails_leaves_no_etcd_behind_but_keeps_that_of_an_earlier_life(tmp_path: Path) -> None:
    """Its log alone takes 64 MiB of shared memory, beside a pool that never was."""
    pool = tmp_path / "pool"
    small = ("serve", "--name", "a", "--pool-dir", str(pool), "--log-level", "error", "--pool-bytes", "1MiB")
    impossible = (*small[:-1], "9999TiB")
    says_in_one_line(paramserver(*impossible), "has room for")
    assert not list(tmp_path.glob("*.etcd"))
    daemon = start("a", ["paramserver", *small], tmp_path)
    assert daemon.stop() == 0
    port = (tmp_path / "pool.etcd" / "port").read_text()
    says_in_one_line(paramserver(*impossible), "has room for")
    assert (tmp_path / "pool.etcd" / "port").read_text() == port
    assert (tmp_path / "pool.etcd" / "etcd").is_dir()


def test_an_etcd_that_cannot_start_leaves_the_folder_only_if_it_was_there(shared_etcd: str, tmp_path: Path) -> None:
    taken = ("etcd", "--port", shared_etcd.split(":")[1], "--data-dir")
    says_in_one_line(paramserver(*taken, str(tmp_path / "new")), "Address already in use")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    says_in_one_line(paramserver(*taken, str(tmp_path / "mine")), "Address already in use")
    assert (tmp_path / "mine").is_dir()


def test_an_etcd_on_a_taken_port_never_says_that_it_serves(shared_etcd: str, tmp_path: Path) -> None:
    found = paramserver("etcd", "--port", shared_etcd.split(":")[1], "--ready-file", str(tmp_path / "ready"))
    says_in_one_line(found, rf"cannot listen on {shared_etcd}: Address already in use .*\(choose another --port\)")
    assert found.stdout == ""
    assert not (tmp_path / "ready").exists()


def test_an_etcd_that_cannot_write_its_data_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = paramserver("etcd", "--data-dir", str(tmp_path / "file/data"))
    says_in_one_line(
        found, rf"its data in {tmp_path}/file/data: Not a directory \(`paramserver etcd` takes it as --data-dir"
    )


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_killed_paramserver_takes_its_etcd_with_it(tmp_path: Path) -> None:
    daemon = start_etcd(tmp_path)
    (binary,) = psutil.Process(daemon.process.pid).children()
    assert binary.name() == "etcd"
    daemon.kill()
    deadline = time.monotonic() + 60.0
    while not gone(binary):
        assert time.monotonic() < deadline, "etcd outlived the process that started it"
        time.sleep(0.02)


def test_etcd_is_found_by_name(shared_etcd: str, relays: Relays) -> None:
    """`localhost` is rewritten by the client library; any other name must go through a resolver."""
    relay = relays.start("a", "--etcd", f"{named_loopback()}:{shared_etcd.split(':')[1]}")
    assert records(shared_etcd, keys.member_key("a")) == [keys.member_key("a")]
    assert relay.stop() == 0
    assert records(shared_etcd, keys.member_key("a")) == []


def named_loopback() -> str:
    """A name that the library leaves alone: it looks for the word in small letters only."""
    return "LOCALHOST"


# ---- memory that must go back


def test_a_pool_on_a_disk_is_warned_about(relays: Relays, tmp_path: Path) -> None:
    on_disk, in_memory = relays.start("disk", "--pool-dir", str(tmp_path / "pool")), relays.start("shm")
    assert re.search(rf"WARNING .*{tmp_path}/pool is on \w+, not in memory: .*--pool-dir below /dev/shm", on_disk.log())
    assert "not in memory" not in in_memory.log()


def test_a_relay_terminated_while_it_waits_for_its_name_gives_its_memory_back(relays: Relays, pool_dir: Path) -> None:
    relays.start("a")
    flags = ["--name", "a", "--etcd", relays.etcd, "--pool-dir", str(pool_dir), "--pool-bytes", "8MiB"]
    command = ["paramserver", "serve", *flags, "--lease-ttl-s", "2"]
    second = start("second", command, relays.directory, wait_ready=False)
    deadline = time.monotonic() + DEADLINE_S
    while "pool of 8 MiB ready" not in second.log():
        assert second.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(DEADLINE_S) == 1
    assert [path.name for path in pool_dir.rglob("*")] == [".lock"]


# ---- a relay that serves


@pytest.fixture(scope="module")
def relay(shared_etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One relay that the tests below share, with one version of `one` and none of `none`."""
    pool = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    flags = ("--name", "shared", "--etcd", shared_etcd, "--pool-dir", str(pool), "--pool-bytes", "16MiB")
    daemon = start("relay", ["paramserver", "serve", *flags], tmp_path_factory.mktemp("relay"))

    async def fill() -> None:
        async with RelayClient(daemon.ready["grpc"]) as client:
            await (await publish(client, "one", [W], step=7, run=new_run_id())).wait_sealed(60.0)
            await client.master_of("none")

    asyncio.run(fill())
    yield daemon
    assert daemon.stop() == 0
    shutil.rmtree(pool)


def test_a_directory_in_use_is_refused_and_its_owner_not_disturbed(relay: Daemon, shared_etcd: str) -> None:
    (command,) = [arg for arg in psutil.Process(relay.process.pid).cmdline() if arg.startswith("/dev/shm")]
    found = paramserver("serve", "--name", "thief", "--etcd", shared_etcd, "--pool-dir", command)
    line = found.stderr.splitlines()[-1]
    assert (found.returncode, "is in use by another relay (give each relay its own --pool-dir)" in line) == (1, True)
    assert [path.name for path in Path(command).rglob("model.safetensors")] == ["model.safetensors"]


def test_status_and_versions_of_a_model_without_versions(relay: Daemon) -> None:
    address = relay.ready["grpc"]
    assert paramserver("versions", "--relay", address, "--model", "none").stdout == (
        "no sealed version of none here yet\n"
    )
    assert paramserver("versions", "--relay", address, "--model", "none", "--json").stdout == ""
    status = json.loads(paramserver("status", "--relay", address, "--json").stdout)
    assert [model["newest_sealed"] for model in status["models"] if model["model"] == "none"] == [None]
    shown = paramserver("status", "--relay", address)
    assert shown.returncode == 0
    assert "model none: master shared, epoch " in shown.stdout


async def test_what_is_printed_into_a_pipe_is_whole_and_as_it_is(relay: Daemon) -> None:
    async with RelayClient(relay.ready["grpc"]) as client:
        newest = await client.newest("one")
        lease = await client.acquire("one", holder="engine [/bold] 3")
        shown = await asyncio.to_thread(paramserver, "versions", "--relay", client.address, "--model", "one")
        status = await asyncio.to_thread(paramserver, "status", "--relay", client.address)
        await client.release(lease)
    assert newest is not None
    assert newest.root_digest in shown.stdout, "a digest cut to fit 80 columns is none"
    assert newest.run in shown.stdout
    assert "by engine [/bold] 3, " in status.stdout, status.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model nope", r"no model 'nope' here \(known: .*one.*\)"),
        ("--model none", r"relay shared holds no sealed version of none \(held here: none yet\)"),
        ("--model one --version 9", r"relay shared holds no sealed version 9 of one \(held here: 1\)"),
        ("--model one --out {file}/x", r"cannot write [\d.]+ \w+ to {file}/x: Not a dir.*\(choose another --out"),
    ],
)
def test_a_pull_that_cannot_be_says_why_and_writes_nothing(
    relay: Daemon, tmp_path: Path, flags: str, words: str
) -> None:
    names = {"file": tmp_path / "file"}
    names["file"].touch()
    arguments = ("--relay", relay.ready["grpc"], "--out", str(tmp_path / "out"))
    says_in_one_line(paramserver("pull", *arguments, *flags.format(**names).split()), words.format(**names))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert status_of(relay)["pins"] == []


def test_a_pull_keeps_what_lies_in_its_directory(relay: Daemon, tmp_path: Path) -> None:
    precious = tmp_path / "model.safetensors"
    precious.write_text("mine")
    found = paramserver("pull", "--relay", relay.ready["grpc"], "--model", "one", "--out", str(tmp_path))
    says_in_one_line(found, rf"{precious} exists \(choose an empty --out directory\)")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"model.safetensors": "mine"}


def test_a_pull_onto_a_full_disk_ends_in_words(relay: Daemon, tmp_path: Path) -> None:
    arguments = ("pull", "--relay", relay.ready["grpc"], "--model", "one", "--out", str(tmp_path / "out"))
    found = paramserver(*arguments, before="ulimit -f 0")
    says_in_one_line(found, rf"cannot write [\d.]+ \w+ to {tmp_path}/out: File too large")
    assert paramserver(*arguments).returncode == 0, "what the failed one left is no hindrance"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def status_of(relay: Daemon) -> dict[str, list[object]]:
    found: dict[str, list[object]] = json.loads(paramserver("status", "--relay", relay.ready["grpc"], "--json").stdout)
    return found


# ---- announcements that no SDK of ours would send


def announcement(*tensors: tuple[str, str, list[int]], **fields: object) -> pb.AnnounceRequest:
    specs = [pb.TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in tensors]
    given = {"model": "raw", "run": "r", "file_bytes_max": 1 << 30, "tensors": specs, **fields}
    return pb.AnnounceRequest(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (announcement(), InvalidRequest, "a version without tensors"),
        (announcement(("w", "F4", [1])), UnsupportedField, "'w' has dtype 'F4'.*use one of"),
        (announcement(("w", "U8", [1]), ("w", "U8", [1])), InvalidRequest, "'w' was announced twice"),
        (announcement(("w", "U8", [-1])), InvalidRequest, r"shape \[-1\]"),
        (announcement(("w", "U8", [1]), file_bytes_max=0), InvalidRequest, "file_bytes_max is 0"),
        (announcement(("w", "U8", [1]), run="other"), StaleEpoch, "run other has not claimed model raw"),
        (announcement(("w", "U8", [1]), base_version=1), UnsupportedField, "base_version is reserved"),
        (announcement(("w", "U8", [1]), model="one"), StaleEpoch, "has not claimed model one"),
        (announcement(("w", "U8", [1 << 40])), TooLarge, r"takes [\d.]+ [TG]iB, the pool has 16 MiB.*--pool-bytes"),
        (announcement(("w", "U8", [1 << 24] * 9)), TooLarge, r"takes \S+ TiB, the pool has 16 MiB"),
        (announcement(("w", "U8", [(16 << 20) - 100]), wait_room_s=float("nan")), OutOfCapacity, "no room for version"),
    ],
)
async def test_the_relay_itself_refuses_by_name(
    relay: Daemon, shared_etcd: str, request_: pb.AnnounceRequest, error: type[LaminarError], words: str
) -> None:
    async with RelayClient(relay.ready["grpc"]) as client:

        async def claimed() -> bool:  # the claim of the case before ends with its connection, a moment later
            with contextlib.suppress(Conflict):
                await client.hold_run("raw", "r", "test")
                return True
            return False

        await client.master_of("raw")
        await until(claimed, "the model is free to be claimed")
        before = (await client.status()).used_bytes
        with pytest.raises(error, match=f"(?s){words}"):
            await client.call(client.stub.Announce(request_, timeout=10.0))
        assert (await client.status()).used_bytes == before
        registry = await EtcdRegistry.connect(shared_etcd, timeout_s=60.0)
        assert not any("/versions/" in e.key for e in (await registry.list(f"{keys.ROOT}models/raw/")).entries)
        await registry.close()


@pytest.mark.parametrize("force_tcp", [False, True], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("kind", [Unavailable, StaleEpoch, LinkBroken, Corrupt, NotFound])
async def test_what_a_read_raises_is_not_taken_for_the_relays_and_costs_one_number(
    relay: Daemon, kind: type[LaminarError], force_tcp: bool
) -> None:
    calls: list[str] = []

    def read() -> memoryview:
        calls.append("read")
        raise kind("the disk of the base model is away")

    async with RelayClient(relay.ready["grpc"]) as client:
        with pytest.raises(InvalidRequest, match="reading tensor 'w' failed: the disk of the base model is away"):
            await publish(client, "unread", [TensorSource("w", "U8", (8,), read)], step=1, run="r", force_tcp=force_tcp)
        assert calls == ["read"]
