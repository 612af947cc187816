"""The commit point under faults: what was not sealed is never said to be, and one epoch's master seals nothing in
the next one's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.client import RelayClient, TensorSource, publish
from paramserver.core import view as keys
from paramserver.membership import LocalEtcd
from protos.errors import InDoubt, LaminarError, VersionLost
from tests.support.middleman import Middleman
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.survivors import (
    MODEL,
    client,
    held,
    identical,
    in_the_middle,
    master_at,
    publish_seed,
    registered,
    stage_of,
    status_of,
)
from tests.support.weights import source_of, weights

pytestmark = pytest.mark.slow


def seals(found: list[str]) -> list[int]:
    """The versions that the registry has a sealed record of."""
    return [int(key.split("/")[-2]) for key in found if key.endswith("/sealed")]


async def start(relays: Relays, name: str, *flags: str) -> Daemon:
    return await asyncio.to_thread(relays.start, name, *flags)


async def led_by(daemon: Daemon, name: str) -> bool:
    return await master_at(daemon) == name


async def make_master(daemon: Daemon, name: str) -> None:
    async with client(daemon) as relay:
        await relay.master_of(MODEL)
    await until(lambda: led_by(daemon, name), f"{name} is master")


LEASE_S = "12"
"""Of a master that etcd does not hear any more: time enough to copy a version before another is elected."""


# ---- just before the sealed record


async def test_a_master_killed_just_before_the_seal_leaves_a_version_that_nobody_shows(
    relays: Relays, etcd: str
) -> None:
    """The bytes are on every relay, the seal never reached etcd: while nobody knows, the ticket says so; then: lost."""
    with Middleman(etcd) as between:
        a = await start(relays, "a", "--etcd", between.address, "--lease-ttl-s", LEASE_S)
        b, c = await start(relays, "b"), await start(relays, "c")
        await make_master(a, "a")
        copied, go_on = threading.Event(), threading.Event()
        async with client(b) as relay:
            publishing = asyncio.create_task(publish(relay, MODEL, pausing(1, copied, go_on), step=1, run="r"))
            await asyncio.to_thread(copied.wait, 60.0)
            await until(lambda: announced(etcd, 1), "version 1 is announced")
            between.cut()
            go_on.set()
            ticket = await publishing
            await until(lambda: all_bytes_at(b, c), "the survivors have its bytes")
            a.kill()
            with pytest.raises(InDoubt, match="it is copied"):
                await ticket.wait_sealed(0.5)
            with pytest.raises(VersionLost, match="its master died before it was sealed"):
                await ticket.wait_sealed(60.0)
            assert (await held(b), await held(c)) == ((), ())
            again = await publish_seed(relay, 2)
            assert again.version == 2
            await identical([b, c], again.version, 2)
    assert seals(await registered(etcd)) == [2]


def pausing(seed: int, reached: threading.Event, go_on: threading.Event) -> list[TensorSource]:
    """The seed's tensors; the second waits to be read until `go_on`."""
    tensors = source_of(weights(seed))

    def read(read_now: Callable[[], memoryview] = tensors[1].read) -> memoryview:
        reached.set()
        assert go_on.wait(60.0)
        return read_now()

    tensors[1] = TensorSource(tensors[1].name, tensors[1].dtype, tensors[1].shape, read)
    return tensors


async def announced(etcd: str, version: int) -> bool:
    return keys.version_key(MODEL, version, "announced") in await registered(etcd)


async def has_recorded(master: Daemon, version: int) -> bool:
    """Whether the answer came, too: a master without it asks again, and does not seal before."""
    return f"version {version} of policy is in the registry" in master.log()


async def all_fetch(*daemons: Daemon) -> bool:
    """Whether each has read the announced record: without etcd, who has not fetches nothing."""
    found = [await status_of(daemon) for daemon in daemons]
    return all(status and any(t.version == 1 for t in status.transfers) for status in found)


async def all_bytes_at(*daemons: Daemon) -> bool:
    return all("version 1 of policy complete" in daemon.log() for daemon in daemons)


@pytest.mark.parametrize("master", ["lives", "dies"])
async def test_a_sealing_transaction_whose_answer_was_lost_is_settled_by_reading_back(
    relays: Relays, etcd: str, master: str
) -> None:
    """It went through: that is what every relay and the ticket say in the end, whoever lives to say it."""
    with Middleman(etcd) as between:
        a = await start(relays, "a", "--etcd", between.address, "--lease-ttl-s", LEASE_S)
        b, c = await start(relays, "b"), await start(relays, "c")
        await make_master(a, "a")
        copied, go_on = threading.Event(), threading.Event()
        async with client(a) as relay, client(b) as other:
            asked = relay if master == "lives" else other
            publishing = asyncio.create_task(publish(asked, MODEL, pausing(1, copied, go_on), step=1, run="r"))
            await asyncio.to_thread(copied.wait, 60.0)
            await until(lambda: has_recorded(a, 1), "the master has the answer, too")
            between.hold("answers")
            go_on.set()
            ticket = await publishing
            await identical([b, c], 1, 1)
            if master == "lives":
                assert await ticket.stage() == "copied", "the master itself cannot know yet"
                assert await held(a) == ()
                between.cut()
                between.mend()
                await ticket.wait_all(60.0)
                await identical([a, b, c], 1, 1)
            else:
                a.kill()
                await ticket.wait_all(60.0)
                assert "a" not in await ticket.holders() or await stage_of(ticket) != "lost"
    assert seals(await registered(etcd)) == [1]


async def test_with_the_master_dead_and_etcd_away_the_answer_is_in_doubt(tmp_path: Path) -> None:
    """Whether the seal went through, no live process can know; when etcd is back, everybody says the same."""
    async with LocalEtcd() as etcd:
        relays = Relays(etcd.endpoint, tmp_path)
        try:
            a, b, c = [await start(relays, name) for name in "abc"]
            await make_master(a, "a")
            copied, go_on = threading.Event(), threading.Event()
            async with client(b) as relay:
                publishing = asyncio.create_task(publish(relay, MODEL, pausing(1, copied, go_on), step=1, run="r"))
                await asyncio.to_thread(copied.wait, 60.0)
                await until(lambda: all_fetch(b, c), "the survivors fetch version 1")
                os.kill(etcd.pid, signal.SIGSTOP)
                try:
                    go_on.set()
                    ticket = await publishing
                    await until(lambda: all_bytes_at(b, c), "the survivors have its bytes")
                    a.kill()
                    with pytest.raises(InDoubt, match="had not reached 'sealed'"):
                        await ticket.wait_sealed(2.5)
                    assert (await held(b), await held(c)) == ((), ())
                finally:
                    os.kill(etcd.pid, signal.SIGCONT)
                try:
                    await ticket.wait_sealed(60.0)
                except VersionLost:
                    assert (await held(b), await held(c)) == ((), ())
                    assert seals(await registered(etcd.endpoint)) == []
                else:
                    await identical([b, c], 1, 1)
                again = await publish_seed(relay, 2)
                await identical([b, c], again.version, 2)
        finally:
            await asyncio.to_thread(relays.close)


# ---- masters that are not any more


async def test_a_stale_masters_transactions_come_late_and_seal_nothing(relays: Relays, etcd: str) -> None:
    """What the old master sent lies on the way until another was elected; then it arrives: only the fence is left."""
    with Middleman(etcd) as between:
        a = await start(relays, "a", "--etcd", between.address)
        b, c = await start(relays, "b"), await start(relays, "c")
        await make_master(a, "a")
        async with client(a) as relay:
            await relay.hold_run(MODEL, "r", "test")
            between.hold("requests", "answers")
            ticket = await publish_seed(relay, 1)  # announced and copied at `a` alone
            assert await ticket.stage() == "copied"
            await until(lambda: led_by(b, "b"), "b is master")
            between.release()
            with pytest.raises(VersionLost, match="master"):
                await ticket.wait_sealed(60.0)
        assert [key for key in await registered(etcd) if "/versions/" in key] == []
        async with client(b) as relay:
            again = await publish_seed(relay, 2)
            await again.wait_copies(3, 60.0)
        await identical([a, b, c], again.version, 2)


async def test_a_master_that_was_stopped_past_its_lease_wakes_and_seals_nothing(relays: Relays, etcd: str) -> None:
    """Its publisher goes on at the next master by itself; the number given by the old one is never sealed."""
    a, b, c = [await start(relays, name) for name in "abc"]
    await make_master(a, "a")
    copied, go_on = threading.Event(), threading.Event()
    async with client(b) as relay, client(a) as old:
        publishing = asyncio.create_task(publish(old, MODEL, pausing(1, copied, go_on), step=1, run="r"))
        await asyncio.to_thread(copied.wait, 60.0)
        await until(lambda: announced(etcd, 1), "version 1 is announced")
        a.process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: led_by(b, "b"), "b is master")
            between = await publish_seed(relay, 2, run="other")
            await between.wait_copies(2, 60.0)
        finally:
            a.process.send_signal(signal.SIGCONT)
        go_on.set()
        with contextlib.suppress(LaminarError):  # the other run may have the model; then it says so
            await (await publishing).wait_sealed(60.0)
        assert 1 not in seals(await registered(etcd))
        await relay.close()  # ends the run
        ticket = await until(lambda: published(relay, 3), "the next run may publish")
        await ticket.wait_copies(3, 60.0)
    await identical([a, b, c], ticket.version, 3)


async def published(relay: RelayClient, seed: int) -> object:
    with contextlib.suppress(LaminarError):
        return await publish_seed(relay, seed, run="last")
    return None


async def test_a_master_whose_lease_was_taken_is_fenced_and_takes_part_again(relays: Relays, etcd: str) -> None:
    a, b, c = [await start(relays, name) for name in "abc"]
    await make_master(a, "a")
    copied, go_on = threading.Event(), threading.Event()
    async with client(b) as relay:
        publishing = asyncio.create_task(publish(relay, MODEL, pausing(1, copied, go_on), step=1, run="r"))
        await asyncio.to_thread(copied.wait, 60.0)
        await until(lambda: announced(etcd, 1), "version 1 is announced")
        await revoke_lease_of(etcd, "a")
        go_on.set()
        ticket = await publishing  # announced again, in the next epoch
        await ticket.wait_copies(3, 60.0)
        assert ticket.version == 2
    await identical([a, b, c], ticket.version, 1)
    assert seals(await registered(etcd)) == [2]


async def test_a_relay_whose_lease_was_taken_goes_on_passing_bytes(relays: Relays, etcd: str) -> None:
    """In mid-broadcast; it registers again, and counts as a holder."""
    a, b, c = await start(relays, "a"), await start(relays, "b", "--max-rate", "2MiB"), await start(relays, "c")
    await make_master(a, "a")
    async with client(a) as relay:
        ticket = await publish_seed(relay, 1, scale=2)
        await until(lambda: in_the_middle(c, ticket.version), "the tail has a part")
        await revoke_lease_of(etcd, "b")
        await identical([a, b, c], ticket.version, 1, scale=2)
        await ticket.wait_copies(3, 60.0)
        assert await ticket.holders() == ("a", "b", "c")
    assert "the lease was lost; registering again" in b.log()


async def revoke_lease_of(etcd: str, name: str) -> None:
    from etcd3aio import Etcd3Client

    async with Etcd3Client([etcd]) as admin:
        assert admin.kv is not None
        assert admin.lease is not None
        found = await admin.kv.get(keys.member_key(name), timeout=60.0)
        await admin.lease.revoke(found.kvs[0].lease, timeout=60.0)
