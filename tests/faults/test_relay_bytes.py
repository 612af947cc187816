"""Bytes that change where they must not: on the wire, in memory before they are forwarded, under a reader."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from paramserver.core import view as keys
from paramserver.core.records import Member
from paramserver.data.frames import HEADER
from paramserver.membership import EtcdRegistry
from paramserver.membership.registry import Put
from protos.errors import LaminarError
from tests.support.middleman import Middleman
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.skips import cannot_mount
from tests.support.survivors import (
    MODEL,
    SLOW,
    client,
    contents,
    held,
    identical,
    publish_seed,
    status_of,
)

pytestmark = pytest.mark.slow


async def start(relays: Relays, name: str, *flags: str) -> Daemon:
    return await asyncio.to_thread(relays.start, name, *flags)


@contextlib.asynccontextmanager
async def reached_through(etcd: str, daemon: Daemon) -> AsyncIterator[Middleman]:
    """From now on other relays reach this one's data port through a middleman: its member record says so."""
    registry = await EtcdRegistry.connect(etcd, timeout_s=60.0)
    key = keys.member_key(daemon.ready["name"])
    member = msgspec.json.decode((await registry.list(key)).entries[0].value, type=Member)
    with Middleman(daemon.ready["data"]) as between:
        moved = msgspec.structs.replace(member, data_address=between.address)
        await registry.transact([], [Put(key, msgspec.json.encode(moved), await lease_of(registry, key))])
        await registry.close()
        yield between


async def lease_of(registry: EtcdRegistry, key: str) -> int:
    found = await registry._kv.get(key, timeout=60.0)
    lease: int = found.kvs[0].lease
    return lease


# Within the answers of a connection: a header and the JSON of the welcome come first, then chunk by chunk.
FLIPS = {"a byte of a chunk": 1 << 20, "the number of a chunk": None}


@pytest.mark.parametrize("what", FLIPS)
async def test_a_byte_flipped_on_the_wire_is_found_and_sent_again(relays: Relays, etcd: str, what: str) -> None:
    """Nobody is blamed for it: both senders find their own bytes good, and stay holders."""
    a, b, c = [await start(relays, name) for name in "abc"]
    async with client(a) as head, reached_through(etcd, b) as between:
        await (await publish_seed(head, 1)).wait_all(60.0)  # so that the master has seen the new address
        at = FLIPS[what]
        between.flip(at if at is not None else await start_of_the_first_chunk(a) + 4)
        ticket = await publish_seed(head, 2)
        await identical([a, b, c], ticket.version, 2)
        assert between.flipped.is_set()
        assert re.search(r"chunk \d+ came with a wrong digest; b is to check|bypassing b: Header", c.log())
        await ticket.wait_copies(3, 60.0)
        assert await ticket.holders() == ("a", "b", "c")
        assert not any("withdrawing" in daemon.log() for daemon in (a, b, c))


async def start_of_the_first_chunk(daemon: Daemon) -> int:
    """The length of the welcome that every fetch of `publish_seed`'s versions begins with, but for their number."""
    from paramserver.data import frames

    greeting = frames.Greeting("fetch", MODEL, 1, "test")
    sock = frames.connect(daemon.ready["data"], 60.0)
    with sock:
        frames.send_greeting(sock, greeting)
        header = frames.receive_header(sock)
    return int(HEADER.size + header.length)


async def test_a_byte_flipped_in_memory_makes_its_relay_withdraw_and_fetch_again(relays: Relays) -> None:
    """The middle relay's memory goes bad after it verified the chunk and before it forwards it."""
    a, b, c = await start(relays, "a"), await start(relays, "b", "--max-rate", SLOW), await start(relays, "c")
    async with client(a) as head:
        ticket = await publish_seed(head, 1)
        await until(lambda: has(b, ticket.version), "the middle relay has it all, the tail has not")
        assert await held(c) == ()
        (file,) = next(relays.pools.glob("b-*")).rglob("model.safetensors")
        flip_last_byte(file)
        await identical([a, c], ticket.version, 1)
        await identical([a, b, c], ticket.version, 1)
        await until(lambda: holders_are(ticket, "a", "b", "c"), "the registry knows")
        later = await publish_seed(head, 2)
        await identical([a, b, c], later.version, 2)
    assert re.search(
        r"withdrawing as holder: chunk \d+ of version 1 .* changed in memory since it was verified", b.log()
    )


async def has(daemon: Daemon, version: int) -> bool:
    return version in await held(daemon)


async def holders_are(ticket: object, *names: str) -> bool:
    with contextlib.suppress(LaminarError):
        return await ticket.holders() == names  # type: ignore[attr-defined]
    return False


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


READER = """
import asyncio, mmap, sys
from paramserver.client import RelayClient
from protos.errors import NotFound

async def main():
    async with RelayClient(sys.argv[1]) as relay:
        lease = await relay.acquire("policy", holder="slow reader", ttl_s=0.5)
        with open(lease.path / "model.safetensors", "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
                half = len(mapping) // 2
                first = mapping[:half]
                print("half", flush=True)
                sys.stdin.readline()
                content = first + mapping[half:]
        try:
            await relay.release(lease)
            print("held to the end", flush=True)
        except NotFound as error:
            print(error.message, flush=True)
        sys.stdout.buffer.write(content)

asyncio.run(main())
"""


async def test_a_reader_stopped_past_its_pin_in_mid_load_reads_its_version_and_hears_that_it_does_not_count(
    relays: Relays,
) -> None:
    daemon = await start(relays, "a", "--retain", "1")
    async with client(daemon) as relay:
        first = await publish_seed(relay, 1)
        await first.wait_sealed(60.0)
        reader = start_reader(daemon)
        try:
            assert reader.stdout is not None
            assert await asyncio.to_thread(reader.stdout.readline) == b"half\n"
            reader.send_signal(signal.SIGSTOP)
            for seed in range(2, 6):
                later = await publish_seed(relay, seed)
                await later.wait_sealed(60.0)
            await until(lambda: only(daemon, later.version), "retention keeps one")
            await until(lambda: quarantined(daemon, len(contents(1))), "what the reader maps is kept from use")
            reader.send_signal(signal.SIGCONT)
            said, _ = await asyncio.to_thread(reader.communicate, b"\n", 60.0)
        finally:
            reader.kill()
            reader.wait()
        line, _, content = said.partition(b"\n")
        assert b"it lapsed or was released" in line
        assert content == contents(1), "what it read is one version, the one that it pinned"
        await identical([daemon], later.version, 5)


def start_reader(daemon: Daemon) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, daemon.ready["grpc"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


async def quarantined(daemon: Daemon, num_bytes: int) -> bool:
    status = await status_of(daemon)
    return status is not None and status.quarantined_bytes == num_bytes


async def only(daemon: Daemon, version: int) -> bool:
    return await held(daemon) == (version,)


# ---- no room


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    if reason := cannot_mount():
        pytest.skip(reason)
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_full_tmpfs_does_not_stop_a_relay_whose_pool_has_room(small_tmpfs: Path, relays: Relays) -> None:
    a = await start(relays, "a")
    b = await start(relays, "b", "--pool-dir", str(small_tmpfs / "b"), "--pool-bytes", "32MiB", "--retain", "1")
    async with client(a) as head:
        first = await publish_seed(head, 1)
        await identical([a, b], first.version, 1)
        for seed in (2, 3, 4):
            fill(small_tmpfs / f"somebody elses {seed}")
            ticket = await publish_seed(head, seed)
            await identical([a, b], ticket.version, seed)
    assert b.process.poll() is None


async def test_a_tmpfs_that_others_fill_costs_that_relay_its_version_and_nobody_else(
    small_tmpfs: Path, relays: Relays
) -> None:
    """Its pool was cut into small files before; what it needs now it cannot allocate, until there is room again."""
    a, c = await start(relays, "a"), await start(relays, "c")
    b = await start(relays, "b", "--pool-dir", str(small_tmpfs / "b"), "--pool-bytes", "32MiB", "--retain", "1")
    async with client(a) as head:
        small = await publish_seed(head, 1)
        await identical([a, b, c], small.version, 1)
        fill(small_tmpfs / "somebody elses")
        large = await publish_seed(head, 2, scale=2)
        await identical([a, c], large.version, 2, scale=2)
        await until(lambda: said(b, f"leaving the chain for policy version {large.version}"), "b says so")
        assert b.process.poll() is None
        (small_tmpfs / "somebody elses").unlink()
        await identical([b], large.version, 2, scale=2)
        later = await publish_seed(head, 3)
        await identical([a, b, c], later.version, 3)
    assert "background work " not in b.log()


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def said(daemon: Daemon, words: str) -> bool:
    return words in daemon.log()
