"""Relays that come, go and come again under their names: the newest version is always had again, whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, TensorSource, Ticket, publish
from paramserver.membership import LocalEtcd
from protos.errors import LaminarError, NotFound
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import source_of, weights

MODEL = "policy"
pytestmark = pytest.mark.slow


def client(daemon: Daemon) -> RelayClient:
    return RelayClient(daemon.ready["grpc"])


async def version_on(relay: RelayClient, seed: int) -> Ticket:
    return await publish(relay, MODEL, source_of(weights(seed)), step=seed, run="r")


async def has(relay: RelayClient, ticket: Ticket) -> None:
    """The relay comes to hold what the ticket's seed gave, byte for byte, as its newest."""

    async def newest() -> bool:
        with contextlib.suppress(LaminarError):
            found = await relay.newest(MODEL)
            return found is not None and found.version == ticket.version
        return False

    await until(newest, f"{relay.address} holds version {ticket.version}")
    lease = await relay.acquire(MODEL, holder="test")
    assert (lease.path / "model.safetensors").read_bytes() == save(weights(ticket.step))
    await relay.release(lease)


@pytest.mark.parametrize("who", ["a", "b", "c"], ids=["master", "middle", "tail"])
async def test_a_relay_killed_and_started_again_under_its_name_takes_part_again(relays: Relays, who: str) -> None:
    """It gets the same directory, and so finds what its earlier life left there."""
    daemons = {name: relays.start(name) for name in "abc"}
    async with client(daemons["a"]) as head:
        first = await version_on(head, 1)
        await first.wait_all(10.0)
    [directory] = relays.pools.glob(f"{who}-*")
    daemons[who].kill()
    assert list(directory.rglob("model.safetensors")), "its memory was left behind"
    daemons[who] = relays.start(who, "--pool-dir", str(directory))
    async with client(daemons[who]) as again:
        await has(again, first)
    async with client(daemons["b"]) as relay:
        second = await version_on(relay, 2)
        await second.wait_copies(3, 20.0)
        assert second.version == 2
    for daemon in daemons.values():
        async with client(daemon) as relay:
            await has(relay, second)


async def test_the_last_holder_gone_means_nothing_is_shown_and_numbers_go_on(relays: Relays) -> None:
    daemon = relays.start("a")
    async with client(daemon) as relay:
        await (await version_on(relay, 1)).wait_sealed(10.0)
    daemon.kill()
    daemon = relays.start("a")
    async with client(daemon) as relay:
        assert await relay.versions(MODEL) == []
        with pytest.raises(NotFound, match=r"holds no sealed version of policy .*none yet"):
            await relay.acquire(MODEL, holder="test")
        ticket = await version_on(relay, 2)
        await ticket.wait_sealed(20.0)
        assert ticket.version == 2
        await has(relay, ticket)


async def test_one_that_joins_in_mid_write_follows_what_is_being_written(relays: Relays) -> None:
    a = relays.start("a", "--chunk-bytes", "1MiB")
    go_on, half = threading.Event(), threading.Event()
    size = 3 << 20

    def second_half() -> memoryview:
        half.set()
        assert go_on.wait(30.0)
        return memoryview(b"2" * size)

    sources = [
        TensorSource("a", "U8", (size,), lambda: memoryview(b"1" * size)),
        TensorSource("b", "U8", (size,), second_half),
    ]
    async with client(a) as head:
        publishing = asyncio.create_task(publish(head, MODEL, sources, step=1, run="r"))
        await asyncio.to_thread(half.wait, 20.0)
        b = await asyncio.to_thread(relays.start, "b")
        async with client(b) as late:

            async def first_half_here() -> bool:
                return any(t.bytes_done > size // 2 for t in (await late.status()).transfers)

            await until(first_half_here, "the late one has what is written so far")
            assert await late.versions(MODEL) == []
            go_on.set()
            ticket = await publishing
            await ticket.wait_copies(2, 10.0)
            lease = await late.acquire(MODEL, holder="test")
            assert (lease.path / "model.safetensors").read_bytes()[-2 * size :] == b"1" * size + b"2" * size
            await late.release(lease)


async def test_a_tail_killed_in_mid_transfer_has_it_all_after_its_return(relays: Relays) -> None:
    a, b, c = relays.start("a"), relays.start("b", "--max-rate", "3MiB"), relays.start("c")
    async with client(a) as head:
        async with client(c) as tail:
            ticket = await version_on(head, 1)

            async def in_the_middle() -> bool:
                return any(0 < t.bytes_done < t.bytes_total // 2 for t in (await tail.status()).transfers)

            await until(in_the_middle, "the tail has a part")
        c.kill()
        await ticket.wait_copies(2, 20.0)
        async with client(relays.start("c")) as tail, client(b) as middle:
            await has(tail, ticket)
            await has(middle, ticket)
            await ticket.wait_copies(3, 10.0)


async def test_an_etcd_that_hangs_longer_than_the_leases_costs_no_version(tmp_path: Path) -> None:
    """When it wakes it takes every relay for dead; they register again, and what they held counts again."""
    async with LocalEtcd() as etcd:
        relays = Relays(etcd.endpoint, tmp_path)
        a, b = [await asyncio.to_thread(relays.start, name) for name in "ab"]
        async with client(a) as head, client(b) as tail:
            first = await version_on(head, 1)
            await first.wait_all(10.0)
            os.kill(etcd.pid, signal.SIGSTOP)

            async def away() -> bool:
                return not any([(await relay.status()).registry_reachable for relay in (head, tail)])

            await until(away, "both see that etcd is away")
            await asyncio.sleep(2.5)  # the leases' 2 s must pass in etcd's own clock
            for relay in (head, tail):
                await has(relay, first)
            os.kill(etcd.pid, signal.SIGCONT)

            async def back() -> bool:
                with contextlib.suppress(LaminarError):
                    return await first.holders() == ("a", "b")
                return False

            await until(back, "both are holders again")
            second = await version_on(tail, 2)
            await second.wait_copies(2, 20.0)
            for relay in (head, tail):
                await has(relay, second)
        await asyncio.to_thread(relays.close)
