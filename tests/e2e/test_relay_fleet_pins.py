"""A pin for the whole fleet: so many relays keep a version, whoever of them dies; room for a new version goes first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paramserver.client import RelayClient, publish
from protos.errors import NotFound
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import source_of, weights

MODEL = "policy"
pytestmark = pytest.mark.slow


def client(daemon: Daemon) -> RelayClient:
    return RelayClient(daemon.ready["grpc"])


async def publish_on(daemon: Daemon, *steps: int) -> None:
    async with client(daemon) as relay:
        for step in steps:
            await (await publish(relay, MODEL, source_of(weights(step)), step=step, run="r")).wait_all(60.0)


async def holders(daemons: Sequence[Daemon], version: int) -> list[str]:
    found = []
    for daemon in daemons:
        async with client(daemon) as relay:
            if version in [one.version for one in await relay.versions(MODEL)]:
                found.append(daemon.ready["name"])
    return found


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


async def test_as_many_relays_as_asked_keep_a_pinned_version(relays: Relays) -> None:
    daemons = [relays.start(name, "--retain", "1") for name in "abcd"]
    await publish_on(daemons[0], 1)
    async with client(daemons[2]) as pinning:
        lease = await pinning.acquire(MODEL, 1, holder="gateway", ttl_s=30.0, copies=2)
        [pin] = (await pinning.status()).pins
        assert (pin.holder, pin.copies) == ("gateway", 2)
        await publish_on(daemons[0], 2, 3)

        async def two_copies() -> bool:
            return await holders(daemons, 1) == ["a", "c"] and await holders(daemons, 2) == []

        await until(two_copies, "the pinning relay and one more keep it; of the rest only the newest stays")
        await pinning.release(lease)

        async def retired() -> bool:
            return await holders(daemons, 1) == []

        await until(retired, "nobody keeps what nobody wants")


async def test_the_other_copy_stays_until_the_holder_had_time_to_pin_it(relays: Relays) -> None:
    daemons = [relays.start(name, "--retain", "1") for name in "abc"]
    await publish_on(daemons[0], 1)
    async with client(daemons[2]) as pinning:
        lease = await pinning.acquire(MODEL, 1, holder="gateway", ttl_s=30.0, copies=2)
        await publish_on(daemons[0], 2)
        daemons[2].kill()

        async def gone() -> bool:
            async with client(daemons[0]) as relay:
                return "c" not in (await relay.status()).members

        await until(gone, "the pinning relay's own lease ran out")
        await publish_on(daemons[0], 3)
        copy, *_ = await holders(daemons[:2], 1)  # after some seconds there are two of them again
        async with client(daemons["ab".index(copy)]) as relay:
            again = await relay.acquire(MODEL, lease.version, holder="gateway", copies=2)
            assert again.root_digest == lease.root_digest


@pytest.mark.parametrize("dies", ["the relay with the pin", "the other one"])
async def test_a_copy_that_died_is_made_again_elsewhere_as_long_as_the_pin_lives(relays: Relays, dies: str) -> None:
    daemons = {name: relays.start(name, "--retain", "1") for name in "abcd"}
    await publish_on(daemons["a"], 1)
    async with client(daemons["c"]) as pinning:
        lease = await pinning.acquire(MODEL, 1, holder="gateway", ttl_s=60.0, copies=2)
        await publish_on(daemons["a"], 2)

        async def held_by(*names: str) -> bool:
            live = [daemon for daemon in daemons.values() if daemon.process.poll() is None]
            return await holders(live, 1) == list(names)

        await until(lambda: held_by("a", "c"), "two copies")
        stays = "a" if dies == "the relay with the pin" else "c"
        before = files(lease.path)
        daemons["c" if stays == "a" else "a"].kill()
        await until(lambda: held_by(*sorted((stays, "b"))), "a further copy")
        async with client(daemons["b"]) as relay:
            copy = await relay.acquire(MODEL, 1, holder="engine")
            assert (copy.root_digest, files(copy.path)) == (lease.root_digest, before)


async def test_a_pin_on_a_copy_that_turns_out_bad_is_none(relays: Relays) -> None:
    daemons = {name: relays.start(name, "--retain", "1") for name in "abc"}
    await publish_on(daemons["a"], 1)
    async with client(daemons["c"]) as pinning:
        lease = await pinning.acquire(MODEL, 1, holder="gateway", ttl_s=60.0, copies=2)
        await publish_on(daemons["a"], 2)
        [file] = lease.path.glob("*.safetensors")
        whole = file.read_bytes()
        with file.open("r+b") as damaged:
            damaged.seek(len(whole) - 1)
            damaged.write(bytes([whole[-1] ^ 1]))
        daemons["a"].kill()

        async def over() -> bool:
            try:
                await pinning.renew(lease)
            except NotFound:
                return True
            return False

        await until(over, "b asks for a copy, and c finds its own bad")
        assert "on policy version 1 ends with it: chunk" in daemons["c"].log()
        assert await holders([daemons["b"], daemons["c"]], 1) == []


async def test_a_pin_for_the_fleet_gives_way_to_a_publish_and_a_load_does_not(relays: Relays) -> None:
    size = sum(tensor.nbytes for tensor in weights(1).values())
    relay_process = relays.start("a", "--retain", "1", pool_bytes=str(4 * (size + (1 << 20))))
    async with client(relay_process) as relay:
        await publish_on(relay_process, 1)
        loading = await relay.acquire(MODEL, 1, holder="engine")
        await publish_on(relay_process, 2)
        oldest = await relay.acquire(MODEL, 2, holder="gateway", copies=1)
        await publish_on(relay_process, 3)
        newer = await relay.acquire(MODEL, 3, holder="gateway", copies=1)
        await publish_on(relay_process, 4, 5)
        await relay.renew(loading)
        assert 1 in [one.version for one in await relay.versions(MODEL)]
        with pytest.raises(NotFound):
            await relay.renew(oldest)
        await relay.renew(newer)
        assert "pin of gateway on policy version 2 gives way" in relay_process.log()
