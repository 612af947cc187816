"""Relays that die, hang or lose etcd while versions travel. The last assertion is always identical bytes."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, TensorSource, Ticket, publish
from paramserver.membership import LocalEtcd
from protos.errors import InDoubt, Unavailable
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import source_of, weights

HEAD_RATE, MIDDLE_RATE = "32MiB", "5MiB"  # bytes per second: the tail takes two seconds for a version of 11 MiB
MODEL = "policy"
pytestmark = pytest.mark.slow
MIB = 1 << 20


def client(daemon: Daemon) -> RelayClient:
    return RelayClient(daemon.ready["grpc"])


async def bytes_at(relay: RelayClient, version: int) -> bytes:
    lease = await relay.acquire(MODEL, version, holder="test")
    found = (lease.path / "model.safetensors").read_bytes()
    await relay.release(lease)
    return found


async def holds(relay: RelayClient, version: int) -> bool:
    with contextlib.suppress(Unavailable):
        return version in (await relay.status()).held.get(MODEL, ())
    return False


async def is_in_mid_chunk(relay: RelayClient, version: int) -> bool:
    transfers = [t for t in (await relay.status()).transfers if t.version == version]
    done, total = (transfers[0].bytes_done, transfers[0].bytes_total) if transfers else (0, 1)
    return total // 4 < done < total // 2 and MIB // 4 < done % MIB < MIB // 2  # in the middle of a chunk


async def publish_weights(head: RelayClient, seed: int, scale: int = 1) -> tuple[Ticket, bytes]:
    tensors = weights(seed, scale)
    ticket = await publish(head, MODEL, source_of(tensors), step=seed, run="r")
    return ticket, save(tensors)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_the_tail_resumes_past_a_middle_relay_that_fails_in_mid_broadcast(
    relays: Relays, number: signal.Signals
) -> None:
    a = relays.start("a", "--max-rate", HEAD_RATE)
    b = relays.start("b", "--max-rate", MIDDLE_RATE)
    c = relays.start("c")
    async with client(a) as head, client(c) as tail:
        ticket, expected = await publish_weights(head, 1, scale=2)
        await until(lambda: is_in_mid_chunk(tail, ticket.version), "the tail has a quarter and some of a chunk")
        assert (await tail.status()).transfers[0].upstream == "b"
        b.process.send_signal(number)
        await until(lambda: holds(tail, ticket.version), "the tail has it all, from the head")
        assert await bytes_at(tail, ticket.version) == expected
        await ticket.wait_copies(2, 5.0)
        if number is signal.SIGSTOP:
            b.process.send_signal(signal.SIGCONT)
    log = c.log()
    assert "bypassing b" in log
    assert re.search(r"asking elsewhere for chunk \d+ from byte [1-9]", log), "resumed in mid-chunk, not from 0"


async def test_a_hung_relay_is_back_in_the_chain_when_it_wakes(relays: Relays) -> None:
    a, b = relays.start("a"), relays.start("b")
    async with client(a) as head, client(b) as second:
        b.process.send_signal(signal.SIGSTOP)
        ticket, expected = await publish_weights(head, 1)
        await ticket.wait_sealed(10.0)
        b.process.send_signal(signal.SIGCONT)
        await until(lambda: holds(second, ticket.version), "the woken relay catches up")
        assert await bytes_at(second, ticket.version) == expected


async def test_after_the_masters_death_another_is_elected_and_publishing_goes_on(relays: Relays) -> None:
    a, b, c = [relays.start(name) for name in "abc"]
    async with client(b) as second, client(c) as third:
        async with client(a) as head:
            first, first_bytes = await publish_weights(head, 1)
            await first.wait_all(10.0)
            epoch = (await second.status()).models[0].epoch
        a.kill()
        ticket, expected = await publish_weights(third, 2)
        await ticket.wait_copies(2, 20.0)
        status = await second.status()
        assert status.models[0].master in ("b", "c")
        assert revision(status.models[0].epoch) > revision(epoch)
        assert ticket.version > first.version
        for relay in (second, third):
            await until(lambda relay=relay: holds(relay, ticket.version), "both have the next version")
            assert await bytes_at(relay, first.version) == first_bytes
            assert await bytes_at(relay, ticket.version) == expected


def revision(epoch: str) -> int:
    return int(epoch.split("/")[1])


async def test_a_master_that_dies_while_the_publisher_copies_costs_only_another_try(relays: Relays) -> None:
    a, b = relays.start("a"), relays.start("b")
    tensors = weights(3)
    reads = 0

    def read_and_kill(source: TensorSource) -> memoryview:
        nonlocal reads
        reads += 1
        if reads == 3:
            a.kill()
        return source.read()

    sources = [
        TensorSource(s.name, s.dtype, s.shape, lambda s=s: read_and_kill(s))  # type: ignore[misc]
        for s in source_of(tensors)
    ]
    async with client(a) as head, client(b) as second:
        await head.master_of(MODEL)
        ticket = await publish(second, MODEL, sources, step=3, run="r")
        await ticket.wait_sealed(10.0)
        assert await second.newest(MODEL) is not None
        assert await bytes_at(second, ticket.version) == save(tensors)


async def test_a_reader_that_keeps_its_mapping_never_sees_another_versions_bytes(relays: Relays) -> None:
    daemon = relays.start("a", "--retain", "1")
    async with client(daemon) as relay:
        ticket, expected = await publish_weights(relay, 1)
        await ticket.wait_sealed(10.0)
        lease = await relay.acquire(MODEL, holder="careless")
        path = lease.path / "model.safetensors"
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            await relay.release(lease)
            for seed in range(2, 8):
                later, later_bytes = await publish_weights(relay, seed)
                await later.wait_sealed(10.0)
                await until(lambda later=later: only_newest(relay, later), "retention keeps one version")
                assert mapping[:] == expected
            assert (await relay.status()).quarantined_bytes == len(expected)
            assert not path.exists()
        await until(lambda: nothing_quarantined(relay), "the memory comes back when the reader lets go")
        assert await bytes_at(relay, later.version) == later_bytes


async def only_newest(relay: RelayClient, ticket: Ticket) -> bool:
    status = await relay.status()
    one = (ticket.version,)
    return status.held[MODEL] == one


async def nothing_quarantined(relay: RelayClient) -> bool:
    return (await relay.status()).quarantined_bytes == 0


@contextlib.asynccontextmanager
async def relays_on(etcd: LocalEtcd, directory: Path) -> AsyncIterator[Relays]:
    found = Relays(etcd.endpoint, directory)
    try:
        yield found
    finally:
        await asyncio.to_thread(found.close)


async def test_without_etcd_nothing_is_sealed_and_nothing_sealed_is_lost(tmp_path: Path) -> None:
    async with LocalEtcd() as etcd, relays_on(etcd, tmp_path) as relays:
        a, b = [await asyncio.to_thread(relays.start, name) for name in "ab"]
        async with client(a) as head, client(b) as second:
            first, first_bytes = await publish_weights(head, 1)
            await first.wait_all(10.0)
            await etcd.kill()
            ticket, expected = await publish_weights(head, 2)  # training goes on: it returns at copied
            with pytest.raises(InDoubt, match="had not reached 'sealed'"):
                await ticket.wait_sealed(1.0)
            assert await ticket.stage() == "copied"
            assert await bytes_at(second, first.version) == first_bytes
            assert (await second.newest(MODEL)).version == first.version  # type: ignore[union-attr]
            await etcd.start()
            await ticket.wait_copies(2, 20.0)
            assert await bytes_at(second, ticket.version) == expected


async def test_a_second_relay_of_the_same_name_is_refused(relays: Relays) -> None:
    relays.start("a")
    started = time.monotonic()
    with pytest.raises(AssertionError, match="a relay named 'a' is alive already"):
        relays.start("a")
    assert time.monotonic() - started < 15.0
