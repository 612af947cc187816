"""Memory of large versions, really allocated: a relay that waits for the kernel answers all the same."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.client import RelayClient
from protos.errors import Preparing
from protos.laminar.v1 import relay_pb2 as pb
from protos.options import parse_bytes
from tests.support.relays import Relays

MODEL = "policy"
NUM_FILES = 16
SIZE = parse_bytes(os.environ.get("LAMINAR_TEST_ANNOUNCE", "2GiB"))
"""Of the announced version; its relay takes a quarter more. 20GiB shows it at the size of a real model."""
POOLS = os.environ.get("LAMINAR_TEST_POOLS", "/dev/shm")
SHARE_MIN = 0.25
"""Of the answers that an idle relay gives meanwhile: one that waits for the kernel itself gives hardly any."""


class Pulse:
    """How late a relay's answers to small questions are, at worst."""

    def __init__(self, relay: RelayClient) -> None:
        self._relay = relay
        self.late_s = 0.0
        self.num = 0

    async def beat(self) -> None:
        while True:
            asked_at = time.monotonic()
            await self._relay.status()
            self.late_s = max(self.late_s, time.monotonic() - asked_at)
            self.num += 1
            await asyncio.sleep(0.02)


@pytest.fixture
def pool_dir() -> Iterator[Path]:
    free = shutil.disk_usage(POOLS).free
    if free < 2 * SIZE:
        pytest.skip(f"{POOLS} has {free >> 20} MiB free, {SIZE >> 19} are wanted")
    path = Path(tempfile.mkdtemp(prefix="laminar-test-memory-", dir=POOLS))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
async def test_no_heartbeat_is_late_while_a_large_version_gets_its_memory(pool_dir: Path, relays: Relays) -> None:
    """An idle relay beside it shows how many answers this machine has time for."""
    flags = ("--lease-ttl-s", "15", "--pool-dir", str(pool_dir / "pool"))
    relay = relays.start("a", *flags, pool_bytes=str(SIZE + SIZE // 4), ready_within_s=600.0)
    idle = relays.start("idle", "--no-publish-host", pool_bytes="16MiB")
    async with RelayClient(relay.ready["grpc"]) as client, RelayClient(idle.ready["grpc"]) as beside:
        await client.master_of(MODEL)
        await client.hold_run(MODEL, "r", "test")
        pulses = [Pulse(client), Pulse(beside)]
        beating = [asyncio.create_task(pulse.beat()) for pulse in pulses]
        opened = await announce(client)
        for task in beating:
            task.cancel()
        results = await asyncio.gather(*beating, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        assert len(opened.files) == NUM_FILES + 1
        assert "memory for the next version of policy: " in relay.log(), "it was allocated while this looked"
        busy, usual = pulses
        print(f"{busy.num} answers, at worst after {busy.late_s:.3f} s; of the idle {usual.num}, {usual.late_s:.3f} s")
        assert busy.num > SHARE_MIN * usual.num
        assert "lease" not in relay.log().partition("serves gRPC")[2]


async def announce(client: RelayClient) -> pb.AnnounceReply:
    """As the SDK does, with sizes alone."""
    size = SIZE // NUM_FILES
    tensors = [pb.TensorSpec(name=f"w{n}", dtype="U8", shape=(size - 4096,)) for n in range(NUM_FILES)]
    request = pb.AnnounceRequest(model=MODEL, run="r", step=1, tensors=tensors, file_bytes_max=size, wait_room_s=30.0)
    deadline = time.monotonic() + 600.0
    while True:
        try:
            return await client.call(client.stub.Announce(request, timeout=60.0))
        except Preparing as error:
            print(error.message)
            assert time.monotonic() < deadline
