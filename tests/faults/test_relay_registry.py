"""etcd replaced, away for several leases, compacted behind a relay's back: what was sealed goes on being served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from paramserver.client import RelayClient, Ticket, publish
from paramserver.membership import LocalEtcd
from paramserver.membership.local import find_etcd
from paramserver.relay.recovery import NUMBERS_SKIPPED
from protos.errors import InDoubt, LaminarError
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
from tests.support.weights import source_of

pytestmark = pytest.mark.slow

AWAY_S = 8.0  # longer than a lease, and than the broadcast that it falls into


@contextlib.asynccontextmanager
async def relays_on(etcd: LocalEtcd, directory: Path) -> AsyncIterator[Relays]:
    found = Relays(etcd.endpoint, directory)
    try:
        yield found
    finally:
        await asyncio.to_thread(found.close)


async def start(relays: Relays, name: str, *flags: str) -> Daemon:
    return await asyncio.to_thread(relays.start, name, *flags)


async def said(daemon: Daemon, words: str) -> None:
    async def found() -> bool:
        return words in daemon.log()

    await until(found, f"{daemon.name} says {words!r}")


async def reachable(daemon: Daemon) -> bool:
    status = await status_of(daemon)
    return status is not None and status.registry_reachable


async def test_etcd_away_for_several_leases_in_mid_broadcast_stops_no_byte(tmp_path: Path) -> None:
    """The version was sealed before; it reaches the tail during the outage, and all are holders after it."""
    async with LocalEtcd() as etcd, relays_on(etcd, tmp_path) as relays:
        a = await start(relays, "a", "--max-rate", "16MiB")
        b, c = await start(relays, "b", "--max-rate", "2MiB"), await start(relays, "c")
        async with client(a) as head:
            ticket = await publish_seed(head, 1, scale=2)
            await ticket.wait_sealed(60.0)
            await until(lambda: in_the_middle(c, ticket.version), "the tail has a part")
            await etcd.kill()
            away_until = asyncio.get_running_loop().time() + AWAY_S
            await identical([a, b, c], ticket.version, 1, scale=2)
            pending = await publish_seed(head, 2)
            while (left := away_until - asyncio.get_running_loop().time()) > 0:
                with pytest.raises(InDoubt, match="it is copied"):
                    await pending.wait_sealed(left)
            assert {await held(daemon) for daemon in (a, b, c)} == {(ticket.version,)}
            await etcd.start()
            await until(lambda: all_hear(etcd.endpoint, pending, a, b, c), "all find it again")
            await settled(head, pending, 2, [a, b, c])


async def all_hear(etcd: str, pending: Ticket, *daemons: Daemon) -> bool:
    """Every relay is registered, and its watch has told it what became of the version."""
    names = [key.rpartition("/")[2] for key in await registered(etcd) if "/members/" in key]
    told = [await newest_sealed(daemon) == pending.version for daemon in daemons]
    return names == ["a", "b", "c"] and (all(told) or await stage_of(pending) == "lost")


async def newest_sealed(daemon: Daemon) -> int | None:
    status = await status_of(daemon)
    return next((m.newest_sealed for m in status.models if m.model == MODEL), None) if status else None


async def settled(head: RelayClient, pending: Ticket, seed: int, daemons: list[Daemon]) -> None:
    """The pending version is sealed or known to be lost, the same on all; then the next one reaches everybody."""
    if await stage_of(pending) == "lost":
        assert all(pending.version not in await held(daemon) for daemon in daemons), "sealed on some"
    else:
        await identical(daemons, pending.version, seed)

    async def published() -> int:
        with contextlib.suppress(LaminarError):
            ticket = await publish_seed(head, 9)
            await ticket.wait_sealed(60.0)
            return ticket.version
        return 0

    await identical(daemons, await until(published, "publishing goes on"), 9)


async def test_an_empty_etcd_in_the_place_of_the_old_one_gets_nothing(tmp_path: Path) -> None:
    """Its revisions begin again, so that its elections look like those of before: only the store's id tells them apart.

    What was sealed is served on; nothing is sealed, and the ticket does not say so, until an operator decides.
    """
    async with LocalEtcd() as etcd, relays_on(etcd, tmp_path) as relays:
        a = await start(relays, "a")
        async with client(a) as head:
            first = await publish_seed(head, 1)
            await first.wait_all(60.0)
            b = await start(relays, "b")
            await identical([a, b], 1, 1)
            await etcd.kill()
            shutil.rmtree(etcd.directory / "etcd")
            await etcd.start()
            new = await start(relays, "new")
            async with client(new) as relay:
                await relay.master_of(MODEL)
            assert await led_by(new, "new")
            with contextlib.suppress(LaminarError):
                ticket = await publish_seed(head, 2)
                with pytest.raises(LaminarError):
                    await ticket.wait_sealed(3.0)
            for daemon in (a, b):
                assert await held(daemon) == (1,)
                async with client(daemon) as relay:
                    lease = await relay.acquire(MODEL, holder="test")
                    await relay.release(lease)
            assert await held(new) == ()
            found = await registered(etcd.endpoint)
            assert not [key for key in found if "/versions/" in key or "/holders/" in key], "of the old store's relays"
            for daemon in (a, b):
                await said(daemon, "another store")
            async with client(new) as relay:
                ticket = await publish_seed(relay, 3)
                await ticket.wait_sealed(60.0)
            await identical([new], ticket.version, 3)
            assert {await held(daemon) for daemon in (a, b)} == {(1,)}


async def led_by(daemon: Daemon, name: str) -> bool:
    return await master_at(daemon) == name


@pytest.mark.parametrize("relays_are", ["restarted", "started with disks alone", "left running"])
async def test_what_was_sealed_after_a_backup_of_etcd_is_there_after_its_restore(
    tmp_path: Path, relays_are: str
) -> None:
    """Versions that the registry does not know any more keep numbers and bytes, and the next one has a new number."""
    data, backup = tmp_path / "etcd", tmp_path / "backup"
    pools = ("--pool-dir", str(Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm")) / "a"))
    flags = (*pools, "--spill", str(tmp_path / "spill"))
    try:
        async with LocalEtcd(data_dir=data) as etcd, relays_on(etcd, tmp_path) as relays:
            a = await start(relays, "a", *flags)
            async with client(a) as relay:
                await (await publish_seed(relay, 1)).wait_sealed(60.0)
                await asyncio.to_thread(etcdctl, "--endpoints", etcd.endpoint, "snapshot", "save", str(backup))
                for seed in (2, 3):
                    await (await publish_seed(relay, seed)).wait_sealed(60.0)
                    await until(lambda seed=seed: on_disk(tmp_path / "spill", seed), "it is on disk")  # type: ignore[misc]
            if relays_are != "left running":
                a.kill()
            if relays_are == "started with disks alone":
                shutil.rmtree(pools[1])
            await etcd.kill()
            shutil.rmtree(data / "etcd")
            await asyncio.to_thread(etcdctl, "snapshot", "restore", str(backup), "--data-dir", str(data / "etcd"))
            await etcd.start()
            if relays_are != "left running":
                a = await start(relays, "a", *flags)
                again = "it does not know versions 2, 3 of policy, sealed before and found here"
                assert a.log().count(again) == 1
                status = await status_of(a)
                assert status is not None
                assert any(again in notice.text for notice in status.notices)
            await identical([a], 3, 3)
            b = await start(relays, "b")
            await identical([b], 3, 3)
            async with client(b) as relay:
                ticket = await publish_seed(relay, 4)
                await ticket.wait_copies(2, 60.0)
                assert ticket.version == (4 if relays_are == "left running" else 3 + NUMBERS_SKIPPED)
            await identical([a, b], ticket.version, 4)
    finally:
        shutil.rmtree(Path(pools[1]).parent)


def etcdctl(*arguments: str) -> None:
    command = [str(find_etcd().with_name("etcdctl")), *arguments]
    subprocess.run(command, check=True, env={**os.environ, "ETCDCTL_API": "3"}, capture_output=True, timeout=120.0)


async def on_disk(spill: Path, version: int) -> bool:
    return (spill / "records" / MODEL / f"v{version:08d}").exists()


async def test_a_relay_whose_watch_was_down_while_history_was_compacted_catches_up(relays: Relays, etcd: str) -> None:
    with Middleman(etcd) as between:
        a, c = await start(relays, "a"), await start(relays, "c")
        b = await start(relays, "b", "--etcd", between.address)
        async with client(a) as head:
            first = await publish_seed(head, 1)
            await identical([a, b, c], first.version, 1)
            between.cut()
            await until(lambda: away(b), "b is cut off from etcd")
            for seed in (2, 3, 4):
                ticket = await publish_seed(head, seed)
                await ticket.wait_copies(2, 60.0)
            await compact(etcd)
            between.mend()
            await identical([a, b, c], ticket.version, 4)
            await ticket.wait_copies(3, 60.0)
            later = await publish_seed(head, 5)
            await identical([a, b, c], later.version, 5)


async def test_a_relay_that_hung_past_its_lease_with_many_versions_loses_none(relays: Relays, etcd: str) -> None:
    """More than one transaction of etcd takes: what it holds must all be in the registry again."""
    many = 150
    a = await start(relays, "a", "--retain", str(many))
    async with client(a) as head:
        for step in range(many):
            ticket = await publish_tiny(head, step)
        await ticket.wait_sealed(60.0)
        held_before = await until(lambda: all_held(a, many), "all are held")
        b = await start(relays, "b")
        await until(lambda: held(b), "the second relay has the newest")
        a.process.send_signal(signal.SIGSTOP)
        await until(lambda: led_by(b, "b"), "the lease of the first one ran out")
        a.process.send_signal(signal.SIGCONT)

        async def all_registered() -> bool:
            keys = [key for key in await registered(etcd) if "/holders/" in key and key.endswith("/a")]
            return len(keys) == many

        await until(all_registered, "the registry knows all that it holds")
        assert await held(a) == held_before
        assert not [key for key in await registered(etcd) if key.endswith("/ended")]


async def test_keys_that_nobody_can_read_keep_no_relay_from_its_work(relays: Relays, etcd: str) -> None:
    a = await start(relays, "a")
    await put_raw(
        etcd, {b"members/x": b"no json", b"holders/\xff": b"", b"models/policy/versions/x/sealed": b"[" * 9999}
    )
    b = await start(relays, "b")
    async with client(a) as head:
        ticket = await publish_seed(head, 1)
        await identical([a, b], ticket.version, 1)
    for daemon in (a, b):
        assert daemon.log().count("cannot be read") == 3, daemon.log()


async def put_raw(etcd: str, below_root: dict[bytes, bytes]) -> None:
    from etcd3aio import Etcd3Client

    async with Etcd3Client([etcd]) as admin:
        assert admin.kv is not None
        for key, value in below_root.items():
            await admin.kv.put(b"/laminar/" + key, value, timeout=60.0)


async def publish_tiny(head: RelayClient, step: int) -> Ticket:
    return await publish(head, MODEL, source_of({"w": np.full(8, step, np.float32)}), step=step, run="r")


async def all_held(daemon: Daemon, many: int) -> tuple[int, ...]:
    found = await held(daemon)
    return found if len(found) == many else ()


async def away(daemon: Daemon) -> bool:
    return not await reachable(daemon)


async def compact(etcd: str) -> None:
    """Forgets all history but the state of now."""
    from etcd3aio import Etcd3Client

    async with Etcd3Client([etcd]) as admin:
        assert admin.kv is not None
        now = (await admin.kv.get("/laminar/store", timeout=60.0)).header.revision
        await admin.kv.compact(now, physical=True, timeout=60.0)
