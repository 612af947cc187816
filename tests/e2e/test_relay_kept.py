"""What outlives a relay: snapshots in shared memory after a crash, and spilled ones after the whole tier went down."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, publish
from protos.errors import NotFound, UnknownModel
from tests.support.processes import Daemon, start
from tests.support.relays import Relays, until
from tests.support.skips import cannot_mount
from tests.support.weights import source_of, weights

MODEL = "policy"
FILE = "model.safetensors"
pytestmark = pytest.mark.slow


def client(daemon: Daemon) -> RelayClient:
    return RelayClient(daemon.ready["grpc"])


async def publish_on(daemon: Daemon, *seeds: int) -> None:
    async with client(daemon) as relay:
        for seed in seeds:
            await (await publish(relay, MODEL, source_of(weights(seed)), step=seed, run="r")).wait_all(60.0)


async def held(daemon: Daemon) -> list[int]:
    async with client(daemon) as relay:
        try:
            return [one.step for one in await relay.versions(MODEL)]
        except UnknownModel:
            return []


async def check_bytes(daemon: Daemon, seed: int) -> None:
    async with client(daemon) as relay:
        lease = await relay.acquire(MODEL, holder="test")
        assert lease.step == seed
        assert (lease.path / FILE).read_bytes() == save(weights(seed))
        await relay.release(lease)


async def test_a_crashed_relay_finds_its_versions_again_and_serves_them_alone(relays: Relays) -> None:
    first = relays.start("a")
    await publish_on(first, 1, 2)
    [pool] = relays.pools.glob("a-*")
    inodes = {path.stat().st_ino for path in pool.rglob(FILE)}
    first.kill()
    again = relays.start("a", "--pool-dir", str(pool))
    assert await held(again) == [1, 2], "without a trainer and without a peer"
    await check_bytes(again, 2)
    assert {path.stat().st_ino for path in pool.rglob(FILE)} == inodes, "the same memory, not a copy"
    assert "found version 2 of policy again, hashed in" in again.log()
    await publish_on(again, 3, 4)
    await check_bytes(again, 4)


async def test_a_stopped_relay_finds_its_versions_again_until_they_are_cleared_or_forgotten(relays: Relays) -> None:
    first = relays.start("a")
    [pool] = relays.pools.glob("a-*")
    await publish_on(first, 1, 2)
    inodes = {path.stat().st_ino for path in pool.rglob(FILE)}
    clear = ["paramserver", "clear", "--pool-dir", str(pool)]
    assert "is in use: its relay runs" in (await asyncio.to_thread(run, clear, status=1)).stderr
    assert first.stop() == 0
    stays = f"stay in memory, in {pool}, with version 1 of policy, version 2 of policy"
    assert stays in first.log()
    again = relays.start("a", "--pool-dir", str(pool))
    assert await held(again) == [1, 2]
    await check_bytes(again, 2)
    assert {path.stat().st_ino for path in pool.rglob(FILE)} == inodes, "the same memory, not a copy"
    assert again.stop() == 0
    assert stays in again.log(), "whether it was published or found"
    assert f"came back from {pool}" in (await asyncio.to_thread(run, clear)).stdout
    assert not pool.exists()
    last = relays.start("a", "--pool-dir", str(pool), "--forget")
    assert await held(last) == []
    await publish_on(last, 3)
    assert last.stop() == 0
    assert "stay in memory" not in last.log()
    assert [path.name for path in pool.rglob("*")] == [".lock"]


async def test_what_was_dropped_while_a_relay_was_down_does_not_come_back(relays: Relays, tmp_path: Path) -> None:
    daemons = {name: relays.start(name, "--spill", str(tmp_path / name)) for name in "ab"}
    await publish_on(daemons["a"], 1)
    await until(lambda: _spilled(tmp_path / "b", 1), "it is on disk")
    [pool] = relays.pools.glob("b-*")
    assert daemons["b"].stop() == 0
    async with client(daemons["a"]) as relay:
        assert await relay.drop(MODEL) == [1]
    again = relays.start("b", "--pool-dir", str(pool), "--spill", str(tmp_path / "b"))
    async with client(again) as relay:

        async def forgotten() -> bool:
            return not (await relay.status()).models

        await until(forgotten, "it knows no model")
        assert (await relay.status()).notices == ()
    assert not list(pool.rglob(FILE))


def run(command: list[str], *, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120.0)
    assert done.returncode == status, done.stderr
    return done


async def test_what_a_crash_left_survives_starts_that_fail_and_starts_that_are_killed(
    relays: Relays, tmp_path: Path
) -> None:
    """It may be the last copy: no mistake in a flag, and no second crash, may cost it."""
    first = relays.start("a")
    await publish_on(first, 1)
    [pool] = relays.pools.glob("a-*")
    first.kill()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(AssertionError, match="choose another --data-port"):
            relays.start("a", "--pool-dir", str(pool), "--data-port", port)
    flags = ["--name", "a", "--etcd", relays.etcd, "--pool-dir", str(pool), "--pool-bytes", "64MiB"]
    killed = start("killed", ["paramserver", "serve", *flags], tmp_path, wait_ready=False)
    try:
        await until(lambda: _said(killed, "found version 1 of policy again"), "it was hashed")
    finally:
        killed.kill()
    again = relays.start("a", "--pool-dir", str(pool))
    assert await held(again) == [1]
    await check_bytes(again, 1)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "record"])
async def test_what_is_damaged_is_never_offered_and_comes_from_a_peer(relays: Relays, damage: str) -> None:
    daemons = {name: relays.start(name) for name in "ab"}
    await publish_on(daemons["a"], 1)
    [pool] = relays.pools.glob("b-*")
    daemons["b"].kill()
    _damage(pool, damage)
    again = relays.start("b", "--pool-dir", str(pool))
    await until(lambda: _holds(again, [1]), "it comes from the peer")
    await check_bytes(again, 1)
    assert "left by an earlier life, is damaged" in again.log() or "is not there" in again.log()


async def _holds(daemon: Daemon, steps: list[int]) -> bool:
    return await held(daemon) == steps


def _damage(pool: Path, how: str) -> None:
    [file] = pool.glob(f"snapshots/{MODEL}/*/{FILE}")
    [record] = pool.glob(f"records/{MODEL}/*")
    if how == "flipped":
        with file.open("r+b") as opened:
            opened.seek(-100, os.SEEK_END)
            byte = opened.read(1)
            opened.seek(-100, os.SEEK_END)
            opened.write(bytes([byte[0] ^ 1]))
    elif how == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    else:
        record.write_bytes(record.read_bytes()[:-3])


async def test_what_was_never_sealed_is_not_offered(relays: Relays) -> None:
    """The record says sealed; the registry, which decides, does not know it (another one, with nothing in it)."""
    first = relays.start("a")
    await publish_on(first, 1)
    [pool] = relays.pools.glob("a-*")
    first.kill()
    [record] = pool.glob(f"records/{MODEL}/*")
    shutil.copytree(pool / "snapshots" / MODEL, pool / "snapshots" / "critic")
    (pool / "records" / "critic").mkdir()
    record.rename(pool / "records" / "critic" / record.name)  # names another model than it tells of
    again = relays.start("a", "--pool-dir", str(pool))
    async with client(again) as relay:
        with pytest.raises((NotFound, UnknownModel)):
            await relay.acquire("critic", holder="test")
    assert not (pool / "snapshots" / "critic").exists(), "its memory went back"


async def test_a_tier_that_went_down_serves_its_last_version_again_from_disk(relays: Relays, tmp_path: Path) -> None:
    flags = {name: ("--spill", str(tmp_path / f"spill-{name}")) for name in "ab"}
    daemons = {name: relays.start(name, *flags[name]) for name in "ab"}
    await publish_on(daemons["a"], 1, 2)
    for name in "ab":
        await until(lambda name=name: _spilled(tmp_path / f"spill-{name}", 2), f"{name} has written it")  # type: ignore[misc]
    for name, daemon in daemons.items():
        daemon.kill()
        shutil.rmtree(*relays.pools.glob(f"{name}-*"))  # the host was started anew: its memory is gone
    with (tmp_path / "spill-b" / "snapshots" / MODEL / f"v{2:08d}" / FILE).open("r+b") as opened:
        opened.seek(5000)
        opened.write(b"rot")
    again = {name: relays.start(name, *flags[name]) for name in "ab"}
    for daemon in again.values():
        await until(lambda daemon=daemon: _newest(daemon, 2), "the last version is served again")  # type: ignore[misc]
        await check_bytes(daemon, 2)
    await publish_on(again["a"], 3)
    await check_bytes(again["b"], 3)


async def test_where_the_last_version_on_disk_is_damaged_the_one_before_it_is_served(
    relays: Relays, tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    first = relays.start("a", "--spill", str(spill))
    for seed in (1, 2):  # each by itself: of those that wait only the newest is written
        await publish_on(first, seed)
        await until(lambda seed=seed: _spilled(spill, seed), f"version {seed} is on disk")  # type: ignore[misc]
    first.kill()
    shutil.rmtree(*relays.pools.glob("a-*"))
    with (spill / "snapshots" / MODEL / f"v{2:08d}" / FILE).open("r+b") as opened:
        opened.seek(5000)
        opened.write(b"rot")
    again = relays.start("a", "--spill", str(spill))
    await until(lambda: _newest(again, 1), "the next best is served")
    await check_bytes(again, 1)
    removed = f"version 2 of policy in {spill} is offered no more, and removed: chunk 0 is damaged"
    assert removed in again.log()
    async with client(again) as relay:
        assert [notice.text for notice in (await relay.status()).notices] == [removed]
    assert not (spill / "snapshots" / MODEL / f"v{2:08d}").exists()
    await publish_on(again, 3)
    await check_bytes(again, 3)


async def _spilled(directory: Path, version: int) -> bool:
    return f"v{version:08d}" in _names(directory / "records" / MODEL)


async def _newest(daemon: Daemon, step: int) -> bool:
    return (await held(daemon))[-1:] == [step]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if reason := cannot_mount():
        pytest.skip(reason)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_full_disk_costs_the_spill_and_not_the_relay(small_disk: Path, relays: Relays) -> None:
    await asyncio.to_thread((small_disk / "of-others").write_bytes, bytes(7 << 20))
    daemon = relays.start("a", "--spill", str(small_disk / "spill"))
    await publish_on(daemon, 1)
    await until(lambda: _said(daemon, "version 1 of policy is not spilled"), "it says that the disk is full")
    assert "are missing on it, and older versions have less" in daemon.log()
    await check_bytes(daemon, 1)
    assert not list((small_disk / "spill").rglob("v0*")), "nothing half-written is left"
    await publish_on(daemon, 2)
    await check_bytes(daemon, 2)


async def test_on_a_disk_for_one_version_the_newer_takes_the_place_of_the_older(
    small_disk: Path, relays: Relays
) -> None:
    daemon = relays.start("a", "--spill", str(small_disk / "spill"))
    for seed in (1, 2):
        await publish_on(daemon, seed)
        await until(lambda seed=seed: _spilled(small_disk / "spill", seed), f"version {seed} is on disk")  # type: ignore[misc]
    assert _names(small_disk / "spill" / "snapshots" / MODEL) == [f"v{2:08d}"]


async def _said(daemon: Daemon, words: str) -> bool:
    return words in daemon.log()


async def test_a_spill_keeps_the_newest_versions_only(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a", "--spill", str(tmp_path / "spill"), "--spill-retain", "1")
    for seed in (1, 2, 3):
        await publish_on(daemon, seed)
        await until(lambda seed=seed: _spilled(tmp_path / "spill", seed), f"version {seed} is on disk")  # type: ignore[misc]
    await until(lambda: _alone(tmp_path / "spill"), "older ones are gone")
    assert daemon.stop() == 0


async def _alone(directory: Path) -> bool:
    return _names(directory / "snapshots" / MODEL) == [f"v{3:08d}"]


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*"))
