"""Several trainer ranks write one version together: each its own files, sealed when all are in, or not at all."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paramserver.client import Rank, RelayClient, TensorSource, publish
from protos.errors import Conflict, InvalidRequest, Unavailable, VersionLost
from tests.support.relays import Relays, until
from tests.support.weights import Arrays, source_of
from trainer_client import AsyncPublisher, Publisher

pytestmark = pytest.mark.slow

RANKS = 3


def shard(rank: int, step: int) -> Arrays:
    rng = np.random.default_rng(100 * step + rank)
    return {f"layer.{rank}.{name}": rng.random((257, 301 + rank), np.float32) for name in "ab"}


def whole(step: int) -> Arrays:
    return {name: array for rank in range(RANKS) for name, array in shard(rank, step).items()}


def publishers(address: str, *, force_tcp: bool = False) -> list[AsyncPublisher]:
    return [AsyncPublisher(address, run="job", rank=n, num_ranks=RANKS, force_tcp=force_tcp) for n in range(RANKS)]


def read(directory: Path) -> Arrays:
    """As engines read it: through the index."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {name: load_file(directory / name) for name in set(index["weight_map"].values())}
    assert index["metadata"]["total_size"] == sum(a.nbytes for file in files.values() for a in file.values())
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def check(found: Arrays, step: int) -> None:
    expected = whole(step)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("force_tcp", [False, True], ids=["shared-memory", "tcp"])
async def test_each_rank_writes_its_own_and_every_relay_holds_the_whole(relays: Relays, force_tcp: bool) -> None:
    daemons = [relays.start(name) for name in "ab"]
    ranks = publishers(daemons[0].ready["grpc"], force_tcp=force_tcp)
    for step in (1, 2):
        tickets = await asyncio.gather(*(one.publish(shard(n, step), step=step, wait=2) for n, one in enumerate(ranks)))
        assert len({ticket.version for ticket in tickets}) == 1, "one version of all"
    for daemon in daemons:
        async with RelayClient(daemon.ready["grpc"]) as relay:
            lease = await relay.acquire("policy", holder="test")
            assert len(list(lease.path.glob("*.safetensors"))) == RANKS
            check(read(lease.path), 2)
            await relay.release(lease)
    for one in ranks:
        await one.close()


def _rank_process(address: str, rank: int, steps: int) -> None:
    with Publisher(address, run="job", rank=rank, num_ranks=RANKS) as publisher:
        for step in range(1, steps + 1):
            publisher.publish(shard(rank, step), step=step, wait="sealed")


async def test_ranks_are_processes_of_their_own(relays: Relays) -> None:
    daemon = relays.start("a")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank_process, args=(daemon.ready["grpc"], n, 3)) for n in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        await asyncio.to_thread(process.join, 180)
    assert [process.exitcode for process in processes] == [0] * RANKS
    async with RelayClient(daemon.ready["grpc"]) as relay:

        async def two_retained() -> bool:
            return [one.step for one in await relay.versions("policy")] == [2, 3]

        await until(two_retained, "two are retained")
        lease = await relay.acquire("policy", holder="test")
        check(read(lease.path), 3)


async def test_one_rank_that_fails_ends_the_version_for_all(relays: Relays) -> None:
    daemon = relays.start("a")
    ranks = publishers(daemon.ready["grpc"])
    *written, failed = await asyncio.gather(
        *(one.publish(shard(n, 1), step=1) for n, one in enumerate(ranks[:-1])),
        _fails(daemon.ready["grpc"]),
        return_exceptions=True,
    )
    assert isinstance(failed, RuntimeError)
    for one in written:
        if isinstance(one, BaseException):  # it came to commit when the other had left already
            assert isinstance(one, (VersionLost, Conflict, Unavailable))
        else:
            with pytest.raises(VersionLost):
                await one.wait_sealed(60.0)
    async with RelayClient(daemon.ready["grpc"]) as relay:
        assert await relay.newest("policy") is None
    tickets = await asyncio.gather(*(one.publish(shard(n, 2), step=2) for n, one in enumerate(ranks)))
    await tickets[0].wait_sealed(60.0)
    for one in ranks:
        await one.close()


async def _fails(address: str) -> None:
    """Announces as the last rank; its tensor cannot be read when its turn to be copied comes."""

    def read() -> memoryview:
        raise RuntimeError("the device is gone")

    async with RelayClient(address) as relay:
        source = TensorSource("y", "F32", (4,), read)
        await publish(relay, "policy", [source], step=1, run="job", rank=Rank(RANKS - 1, RANKS))


async def test_a_missing_rank_is_named(relays: Relays) -> None:
    daemon = relays.start("a")
    async with RelayClient(daemon.ready["grpc"]) as relay:
        with pytest.raises(Unavailable, match=r"ranks 0, 2 of 3 did not announce step 1 of run job in 0\.3 s"):
            async with asyncio.timeout(180):
                await publish(
                    relay, "policy", source_of(shard(1, 1)), step=1, run="job", rank=Rank(1, 3), wait_room_s=0.3
                )


async def test_two_ranks_cannot_publish_one_tensor(relays: Relays) -> None:
    daemon = relays.start("a")
    ranks = [AsyncPublisher(daemon.ready["grpc"], run="job", rank=n, num_ranks=2) for n in range(2)]
    errors = await asyncio.gather(*(one.publish(shard(0, 1), step=1) for one in ranks), return_exceptions=True)
    for error in errors:
        assert isinstance(error, InvalidRequest)
        assert "'layer.0.a' was announced by rank 0 and by rank 1" in str(error)
    for one in ranks:
        await one.close()


async def test_a_rank_number_is_used_once_and_needs_a_run(relays: Relays) -> None:
    daemon = relays.start("a")
    with pytest.raises(InvalidRequest, match="rank 0 of 2 without run="):
        AsyncPublisher(daemon.ready["grpc"], rank=0, num_ranks=2)
    with pytest.raises(InvalidRequest, match="rank 2 of 2"):
        AsyncPublisher(daemon.ready["grpc"], run="job", rank=2, num_ranks=2)
    async with RelayClient(daemon.ready["grpc"]) as first, RelayClient(daemon.ready["grpc"]) as second:
        await (await first.master_of("policy")).hold_run("policy", "job", "first", Rank(0, 2))
        for rank, run in ((Rank(0, 2), "job"), (Rank(1, 3), "job"), (Rank(1, 2), "other")):
            with pytest.raises(Conflict, match=r"has a publisher already: first \(run job\)"):
                await second.hold_run("policy", run, "second", rank)
        await second.hold_run("policy", "job", "second", Rank(1, 2))
