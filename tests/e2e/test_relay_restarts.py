"""Relays that come, go and come again under their names: the newest version is always had again, whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, TensorSource, Ticket, publish
from paramserver.membership import LocalEtcd
from paramserver.membership.etcd import CALL_TIMEOUT_S
from protos.errors import LaminarError, NotFound, Unavailable, VersionLost
from tests.support.middleman import Middleman
from tests.support.processes import Daemon
from tests.support.processes import start as start_process
from tests.support.relays import LEASE_S, Relays, until
from tests.support.survivors import SLOW
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
        await first.wait_all(60.0)
    [directory] = relays.pools.glob(f"{who}-*")
    daemons[who].kill()
    assert list(directory.rglob("model.safetensors")), "its memory was left behind"
    daemons[who] = relays.start(who, "--pool-dir", str(directory))
    async with client(daemons[who]) as again:
        await has(again, first)
    async with client(daemons["b"]) as relay:
        second = await version_on(relay, 2)
        await second.wait_copies(3, 60.0)
        assert second.version == 2
    for daemon in daemons.values():
        async with client(daemon) as relay:
            await has(relay, second)


async def test_the_last_holder_gone_means_nothing_is_shown_and_numbers_go_on(relays: Relays) -> None:
    daemon = relays.start("a")
    async with client(daemon) as relay:
        await (await version_on(relay, 1)).wait_sealed(60.0)
    daemon.kill()
    daemon = relays.start("a")
    async with client(daemon) as relay:
        assert await relay.versions(MODEL) == []
        with pytest.raises(NotFound, match=r"holds no sealed version of policy .*none yet"):
            await relay.acquire(MODEL, holder="test")
        ticket = await version_on(relay, 2)
        await ticket.wait_sealed(60.0)
        assert ticket.version == 2
        await has(relay, ticket)


async def test_one_that_joins_in_mid_write_follows_what_is_being_written(relays: Relays) -> None:
    a = relays.start("a", "--chunk-bytes", "1MiB")
    go_on, half = threading.Event(), threading.Event()
    size = 3 << 20

    def second_half() -> memoryview:
        half.set()
        assert go_on.wait(60.0)
        return memoryview(b"2" * size)

    sources = [
        TensorSource("a", "U8", (size,), lambda: memoryview(b"1" * size)),
        TensorSource("b", "U8", (size,), second_half),
    ]
    async with client(a) as head:
        publishing = asyncio.create_task(publish(head, MODEL, sources, step=1, run="r"))
        await asyncio.to_thread(half.wait, 60.0)
        b = await asyncio.to_thread(relays.start, "b")
        async with client(b) as late:

            async def first_half_here() -> bool:
                return any(t.bytes_done > size // 2 for t in (await late.status()).transfers)

            await until(first_half_here, "the late one has what is written so far")
            assert await late.versions(MODEL) == []
            go_on.set()
            ticket = await publishing
            await ticket.wait_copies(2, 60.0)
            lease = await late.acquire(MODEL, holder="test")
            assert (lease.path / "model.safetensors").read_bytes()[-2 * size :] == b"1" * size + b"2" * size
            await late.release(lease)


async def test_a_tail_killed_in_mid_transfer_has_it_all_after_its_return(relays: Relays) -> None:
    a, b, c = relays.start("a"), relays.start("b", "--max-rate", SLOW), relays.start("c")
    async with client(a) as head:
        async with client(c) as tail:
            ticket = await version_on(head, 1)

            async def in_the_middle() -> bool:
                return any(0 < t.bytes_done < t.bytes_total // 2 for t in (await tail.status()).transfers)

            await until(in_the_middle, "the tail has a part")
        c.kill()
        await ticket.wait_copies(2, 60.0)
        async with client(relays.start("c")) as tail, client(b) as middle:
            await has(tail, ticket)
            await has(middle, ticket)
            await ticket.wait_copies(3, 60.0)


async def test_an_etcd_that_hangs_longer_than_the_leases_costs_no_version(tmp_path: Path) -> None:
    """When it wakes it may take every relay for dead; they register again, and what they held counts again."""
    async with LocalEtcd() as etcd:
        relays = Relays(etcd.endpoint, tmp_path)
        try:
            a, b = [await asyncio.to_thread(relays.start, name) for name in "ab"]
            async with client(a) as head, client(b) as tail:
                first = await version_on(head, 1)
                await first.wait_all(60.0)
                os.kill(etcd.pid, signal.SIGSTOP)

                async def away() -> bool:
                    return not any([(await relay.status()).registry_reachable for relay in (head, tail)])

                await until(away, "both see that etcd is away")
                await asyncio.sleep(LEASE_S + 0.5)  # the leases must run out by etcd's own clock
                for relay in (head, tail):
                    await has(relay, first)
                os.kill(etcd.pid, signal.SIGCONT)

                async def back() -> bool:
                    with contextlib.suppress(LaminarError):
                        return await first.holders() == ("a", "b")
                    return False

                await until(back, "both are holders again")
                # By the same publisher: an etcd that wakes may prolong the leases, and then its claim holds. Or it ends
                # them only now: then what was on its way is published again, as its error says.
                try:
                    second = await version_on(head, 2)
                    await second.wait_copies(2, 60.0)
                except VersionLost:
                    second = await version_on(head, 2)
                    await second.wait_copies(2, 60.0)
                for relay in (head, tail):
                    await has(relay, second)
        finally:
            await asyncio.to_thread(relays.close)


async def test_a_relay_that_starts_while_etcd_is_busy_waits_for_it(relays: Relays, etcd: str) -> None:
    """An etcd whose disk is slow takes some seconds now and then; nothing restarts a relay on a laptop."""
    with Middleman(etcd) as between:
        between.hold("answers")
        starting = asyncio.create_task(asyncio.to_thread(relays.start, "a", "--etcd", between.address))
        assert await asyncio.to_thread(between.reached.wait, 60.0)
        await asyncio.sleep(CALL_TIMEOUT_S + 1.0)  # the fault's own length
        between.release()
        async with client(await starting) as relay:
            await (await version_on(relay, 1)).wait_sealed(60.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_a_relay_with_an_etcd_of_its_own_goes_on_counting_after_a_restart(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Versions that begin at 1 again are older than what engines serve: trainer and engines would be decoupled."""
    pools = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    flags = ["--name", "a", "--pool-dir", str(pools / "a"), "--pool-bytes", "16MiB", "--lease-ttl-s", "2"]
    command = ["paramserver", "serve", *flags]
    lives: list[Daemon] = []

    def live() -> Daemon:
        lives.append(start_process(f"relay-{len(lives)}", command, tmp_path))
        return lives[-1]

    try:
        first = await asyncio.to_thread(live)
        async with RelayClient(first.ready["grpc"]) as relay:
            ticket = [await publish(relay, "policy", source_of(weights(s)), step=s, run="r") for s in (1, 2)][-1]
            await ticket.wait_sealed(60.0)
        with pytest.raises(AssertionError, match=r"runs already.*another --name"):
            await asyncio.to_thread(live_beside, command, tmp_path)
        first.process.send_signal(number)
        first.process.wait(60.0)
        second = await asyncio.to_thread(live)
        assert second.ready["etcd"] == first.ready["etcd"], "whoever was given its address finds it again"
        async with RelayClient(second.ready["grpc"]) as relay:
            ticket = await publish(relay, "policy", source_of(weights(3)), step=3, run="r2")
            assert ticket.version == 3
            await ticket.wait_sealed(60.0)
        assert second.stop() == 0
        assert re.search(rf"[\d.]+ MiB of its etcd stay in {pools}/a.etcd, so that numbers go on", second.log())
        third = await asyncio.to_thread(start_process, "relay-forgets", [*command, "--forget"], tmp_path)
        lives.append(third)
        assert third.ready["etcd"] == first.ready["etcd"]
        assert third.stop() == 0
        assert not (pools / "a.etcd").exists(), "and with it the numbers"
    finally:
        for daemon in lives:
            if daemon.process.poll() is None:
                daemon.kill()
        shutil.rmtree(pools)


async def test_a_relays_own_etcd_that_is_killed_comes_back_where_it_was(tmp_path: Path) -> None:
    pools = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    flags = ["--name", "a", "--pool-dir", str(pools / "a"), "--pool-bytes", "16MiB", "--lease-ttl-s", "2"]
    daemon = await asyncio.to_thread(start_process, "relay", ["paramserver", "serve", *flags], tmp_path)
    try:
        killed: list[int] = []

        async def leads_its_own_group() -> int | None:
            """The relay's etcd. In the moment in which it is started it is still a copy of its relay."""
            found = [child for child in children(daemon.process.pid) if child not in killed]
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, and is started again
                return found[0] if found and os.getpgid(found[0]) == found[0] else None
            return None

        for step in (1, 2):
            etcd = await until(leads_its_own_group, "an etcd that Ctrl-C does not end before the relay has left it")
            async with RelayClient(daemon.ready["grpc"]) as relay:
                ticket = await publish(relay, "policy", source_of(weights(step)), step=step, run=f"r{step}")
                await ticket.wait_sealed(60.0)
                assert ticket.version == step
            os.kill(etcd, signal.SIGKILL)
            killed.append(etcd)
        await until(leads_its_own_group, "it is started again")
        assert daemon.stop() == 0
    finally:
        if daemon.process.poll() is None:
            daemon.kill()
        shutil.rmtree(pools)


@pytest.mark.parametrize("damage", ["db", "port"])
async def test_an_etcd_whose_data_is_damaged_says_what_is_wrong_with_it(tmp_path: Path, damage: str) -> None:
    async with LocalEtcd(data_dir=tmp_path / "data") as etcd:
        endpoint = etcd.endpoint
    if damage == "port":
        (tmp_path / "data" / "port").write_text("99999999")
        async with LocalEtcd(data_dir=tmp_path / "data") as etcd:
            assert etcd.endpoint
        return
    [found] = (tmp_path / "data").rglob("db")
    found.write_bytes(b"\xff" * found.stat().st_size)
    with pytest.raises(Unavailable, match="invalid database") as refused:
        async with LocalEtcd(data_dir=tmp_path / "data"):
            pass
    assert endpoint in str(refused.value)
    assert str(tmp_path / "data") in refused.value.hint


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def live_beside(command: list[str], directory: Path) -> None:
    start_process("beside", command, directory)
