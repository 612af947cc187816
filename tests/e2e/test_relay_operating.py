"""What operators do to running relays: drain one before an upgrade, adopt an etcd that was replaced."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from safetensors.numpy import save

from paramserver.client import RelayClient, Ticket, publish
from paramserver.membership import LocalEtcd
from paramserver.membership.local import free_port
from protos.errors import Conflict, UnknownModel
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import source_of, weights

MODEL = "policy"
pytestmark = pytest.mark.slow


def client(daemon: Daemon) -> RelayClient:
    return RelayClient(daemon.ready["grpc"])


async def version_on(relay: RelayClient, seed: int) -> Ticket:
    return await publish(relay, MODEL, source_of(weights(seed)), step=seed, run="r")


async def check_newest(daemon: Daemon, seed: int) -> int:
    async with client(daemon) as relay:
        lease = await relay.acquire(MODEL, holder="test")
        assert (lease.path / "model.safetensors").read_bytes() == save(weights(seed))
        await relay.release(lease)
        return lease.version


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paramserver", *words], capture_output=True, text=True, timeout=60, check=False
    )


async def test_a_drained_master_hands_over_and_is_safe_to_stop(relays: Relays) -> None:
    a, b = relays.start("a"), relays.start("b")
    async with client(a) as head, client(b) as other:
        await (await version_on(head, 1)).wait_all(60.0)
        lease = await head.acquire(MODEL, holder="engine-7")
        still = await asyncio.to_thread(command, "drain", "--relay", a.ready["grpc"], "--wait-s", "1.5")
        assert still.returncode == 1
        assert "still needed after 1.5 s as pin of engine-7 on policy version 1" in still.stderr
        await head.release(lease)
        done = await asyncio.to_thread(command, "drain", "--relay", a.ready["grpc"])
        assert (done.returncode, done.stdout) == (0, "it is not needed any more: it can be stopped\n")

        async def led_by_b() -> bool:
            return any(model.master == "b" for model in (await other.status()).models)

        await until(led_by_b, "b is master")
        ticket = await version_on(head, 2)  # through the drained relay: it says where the master is
        await ticket.wait_all(60.0)
        assert await ticket.holders() == ("b",), "the drained one takes no more"
    assert a.stop() == 0
    assert await check_newest(b, 2) == 2


async def test_the_last_holder_says_that_it_is_needed(relays: Relays) -> None:
    a = relays.start("a")
    async with client(a) as head:
        await (await version_on(head, 1)).wait_sealed(60.0)
        assert "only holder of policy version 1" in await head.drain()
        await check_newest(a, 1)


async def test_relays_adopt_an_etcd_that_was_replaced_and_bring_their_versions_along(tmp_path: Path) -> None:
    async with AsyncExitStack() as first_life:
        first = await first_life.enter_async_context(LocalEtcd())
        port = int(first.endpoint.rpartition(":")[2])
        with contextlib.closing(Relays(first.endpoint, tmp_path)) as relays:
            a, b = [await asyncio.to_thread(relays.start, name) for name in "ab"]
            async with client(a) as head:
                for seed in (1, 2):
                    await (await version_on(head, seed)).wait_all(60.0)
                with pytest.raises(Conflict, match="is the store that a belongs to"):
                    await head.adopt()
            await first_life.aclose()
            async with LocalEtcd(port=port):
                await _adopted(relays, a, b)


async def test_a_trainer_refuses_an_etcd_that_was_replaced_until_that_one_goes_on_with_it(tmp_path: Path) -> None:
    """The relay was restarted too, and knows of nothing: only who published before can notice."""
    async with AsyncExitStack() as first_life:
        first = await first_life.enter_async_context(LocalEtcd())
        port = int(first.endpoint.rpartition(":")[2])
        with contextlib.closing(Relays(first.endpoint, tmp_path)) as relays:
            a = await asyncio.to_thread(relays.start, "a", "--port", str(free_port()))
            address = a.ready["grpc"]
            async with client(a) as trainer:
                for seed in (1, 2):
                    await (await version_on(trainer, seed)).wait_sealed(60.0)
                before = (await trainer.status()).store_id
                await first_life.aclose()
                a.kill()
                async with LocalEtcd(port=port):
                    a = await asyncio.to_thread(relays.start, "a", "--port", address.rpartition(":")[2])
                    refusal = f"not published: the registry was replaced: .* versions up to 2 are of {before}"
                    with pytest.raises(Conflict, match=refusal) as refused:
                        await version_on(trainer, 3)
                    assert f"--continues {before} --model policy --above 2" in refused.value.hint
                    words = ("--continues", before, "--model", MODEL, "--above", "2")
                    told = await asyncio.to_thread(command, "adopt", "--relay", address, *words)
                    assert told.returncode == 0, told.stderr
                    ticket = await version_on(trainer, 3)
                    assert ticket.version == 3
                    await ticket.wait_sealed(60.0)
                    assert (await trainer.status()).continues == (before,)


async def test_a_restarted_relay_gives_no_number_again_that_its_disk_knows_of_another_registry(tmp_path: Path) -> None:
    spill = ("--spill", str(tmp_path / "spill"))
    async with LocalEtcd() as etcd:
        with contextlib.closing(Relays(etcd.endpoint, tmp_path)) as relays:
            a = await asyncio.to_thread(relays.start, "a", *spill)
            async with client(a) as head:
                for seed in (1, 2):
                    await (await version_on(head, seed)).wait_sealed(60.0)
                    await until(lambda seed=seed: _said(a, f"version {seed} of policy spilled"), "it is on disk")  # type: ignore[misc]
    async with LocalEtcd() as etcd:
        with contextlib.closing(Relays(etcd.endpoint, tmp_path)) as relays:
            a = await asyncio.to_thread(relays.start, "a2", *spill)
            assert "the registry was replaced: it is" in a.log()
            assert "--model policy --above 2`" in a.log()
            async with client(a) as head:
                assert (await version_on(head, 3)).version == 3


async def test_what_a_replaced_registry_had_is_kept_aside_until_an_operator_decides_or_its_room_is_needed(
    tmp_path: Path,
) -> None:
    async with LocalEtcd() as etcd:
        with contextlib.closing(Relays(etcd.endpoint, tmp_path)) as relays:
            a = await asyncio.to_thread(relays.start, "a")
            [found] = relays.pools.glob("a-*")
            pool = ("--pool-dir", str(found))
            async with client(a) as head:
                for seed in (1, 2):
                    await (await version_on(head, seed)).wait_sealed(60.0)
                before = (await head.status()).store_id
            assert a.stop() == 0
            async with LocalEtcd() as other:
                for life in ("before the decision", "after it"):
                    a = await asyncio.to_thread(relays.start, "a", "--etcd", other.endpoint, *pool)
                    async with client(a) as head:
                        status = await head.status()
                        if life == "after it":
                            break
                        assert status.held.get(MODEL, ()) == ()
                        assert f"is of {before}; readers refuse this one until" in status.notices[0].text
                        await head.adopt(continues=before, model=MODEL, above=2)
                    assert a.stop() == 0
                assert status.held[MODEL] == (1, 2)
                await check_newest(a, 2)
                assert a.stop() == 0
            async with LocalEtcd() as other:
                options = ("--etcd", other.endpoint, "--pool-bytes", "13MiB", *pool)  # for two versions of 5.3 MiB
                a = await asyncio.to_thread(relays.start, "a", *options)
                async with client(a) as head:
                    await (await version_on(head, 3)).wait_sealed(60.0)
                await check_newest(a, 3)
                await until(lambda: _said(a, "version 1 of policy, kept aside, makes room"), "it")
                assert "version 2 of policy, kept aside" not in a.log()


async def _adopted(relays: Relays, a: Daemon, b: Daemon) -> None:
    for daemon in (a, b):
        await until(lambda daemon=daemon: _said(daemon, "is another store now"), "it sees another store")  # type: ignore[misc]
    async with client(a) as head, client(b) as tail:
        assert "than this relay's" in (await head.status()).trouble
        assert "takes nothing new until `paramserver adopt`" in command("status", "--relay", a.ready["grpc"]).stdout
        await check_newest(b, 2)  # what is held is served on
        with pytest.raises(Conflict, match=r"was replaced by another: nothing seals there \(run `paramserver adopt`"):
            await version_on(head, 99)
        told = await asyncio.to_thread(command, "adopt", "--relay", a.ready["grpc"])
        assert told.returncode == 0, told.stderr
        assert told.stdout.endswith("with policy version 1, policy version 2\n")
        await tail.adopt()
        status = await head.status()
        assert (status.trouble, len(status.continues)) == ("", 1), "it goes on with the one before"
        ticket = await version_on(head, 3)
        await ticket.wait_sealed(60.0)
        assert ticket.version > 1000, "numbers go on, above those that a relay may have missed"
        for daemon in (a, b):
            await until(lambda daemon=daemon: _newest(daemon, 3), "both hold the newest")  # type: ignore[misc]
            await check_newest(daemon, 3)
        joined = await asyncio.to_thread(relays.start, "c")
        await until(lambda: _newest(joined, 3), "one that joins later gets it too")


async def _said(daemon: Daemon, words: str) -> bool:
    return words in daemon.log()


async def _newest(daemon: Daemon, step: int) -> bool:
    async with client(daemon) as relay:
        with contextlib.suppress(UnknownModel):
            found = await relay.newest(MODEL)
            return found is not None and found.step == step
    return False


async def test_a_model_that_nobody_uses_is_dropped_from_memory_and_disk_by_one_command(
    relays: Relays, tmp_path: Path
) -> None:
    flags = {name: ("--spill", str(tmp_path / name)) for name in "ab"}
    a, b = [await asyncio.to_thread(relays.start, name, *flags[name]) for name in "ab"]
    async with client(a) as head, client(b) as tail:
        await (await version_on(head, 1)).wait_all(60.0)
        for name in "ab":
            await until(lambda name=name: _on_disk(tmp_path / name, 1), "it is on disk")  # type: ignore[misc]
        refused = await asyncio.to_thread(command, "drop", "--relay", b.ready["grpc"], "--model", MODEL)
        assert "publishes to policy (run r)" in refused.stderr
        await head.release_run(MODEL, "r")
        told = await asyncio.to_thread(command, "drop", "--relay", b.ready["grpc"], "--model", MODEL)
        assert (told.returncode, told.stdout) == (0, "dropped policy with versions 1\n"), told.stderr
        for relay in (head, tail):

            async def nothing_left(relay: RelayClient = relay) -> bool:
                status = await relay.status()
                return not status.models and not status.used_bytes

            await until(nothing_left, "its memory is free")
        for name in "ab":
            await until(lambda name=name: _on_disk(tmp_path / name, 0), "and the disk is")  # type: ignore[misc]
        ticket = await version_on(head, 2)
        await ticket.wait_all(60.0)
        assert ticket.version == 2
        await check_newest(b, 2)


async def _on_disk(directory: Path, num: int) -> bool:
    return len(await asyncio.to_thread(lambda: list(directory.glob(f"records/{MODEL}/*")))) == num
