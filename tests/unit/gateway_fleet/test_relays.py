"""The gateway's view of the relays beside engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.core.types import Version
from gateway.fleet import relays
from gateway.fleet.relays import Relays
from gateway.runtime import supervisor
from gateway.runtime.supervisor import Supervisor
from gateway.store import Database
from gateway.store.lineage import LineageStore
from paramserver.client import RelayClient
from protos.errors import Corrupt
from tests.support.fake_relay import relay
from tests.support.scripted_engine import until


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RETRY_S", 0.01)


@asynccontextmanager
async def followed(*addresses: str) -> AsyncIterator[Relays]:
    tasks = Supervisor()
    found = Relays("policy", tasks, lambda address, version: None)
    for address in addresses:
        found.follow(address)
    try:
        yield found
    finally:
        for address in addresses:
            await found.unfollow(address)
        await tasks.close()


async def test_a_relay_that_does_not_answer_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0
    versions = RelayClient.versions

    async def counted(client: RelayClient, model: str) -> object:
        nonlocal asked
        asked += 1
        return await versions(client, model)

    monkeypatch.setattr(relays, "RETRY_S", 0.01)
    monkeypatch.setattr(RelayClient, "versions", counted)
    async with followed("127.0.0.1:1"):
        await until(lambda: asked > 3, "the relay asked again")
    said = [r.getMessage() for r in caplog.records if r.name == "gateway.fleet.relays"]
    assert len(said) == 1
    assert "relay 127.0.0.1:1 does not respond yet; retrying until it does: no relay answers at" in said[0]


async def test_the_run_of_a_version_is_known_while_a_relay_holds_it() -> None:
    async with relay() as (fake, address), followed(address) as found:
        fake.versions = [1]
        await until(lambda: found.run_of(Version(1)) == "run-1", "the version that was there")
        fake.publish(2)
        await until(lambda: found.run_of(Version(2)) == "run-2", "the one that came")
        fake.retire(1)
        await until(lambda: found.run_of(Version(1)) == "", "the end of the first")


@pytest.mark.parametrize("error", [KeyError("nobody thought of it"), Corrupt("bytes"), asyncio.CancelledError()])
async def test_a_watch_that_fails_begins_again_and_costs_no_other_relay(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A relay's error, one that nobody foresaw, or gRPC's cancellation of a call of its own."""
    async with relay() as (odd, address), relay() as (sound, other):
        watch, failed = RelayClient.watch, 0

        async def watches(client: RelayClient, model: str) -> AsyncIterator[object]:
            nonlocal failed
            if client.address == address and failed < 2:
                failed += 1
                raise error
            async for event in watch(client, model):
                yield event

        monkeypatch.setattr(RelayClient, "watch", watches)
        odd.versions, sound.versions = [1], [1]
        async with followed(address, other) as found:
            await until(lambda: failed == 2, "both failures")
            odd.publish(2)
            sound.publish(3)
            await until(lambda: (found.newest(address), found.newest(other)) == (2, 3), "what came later")


async def test_a_watch_that_begins_again_forgets_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with relay() as (holder, address):
        watch, fail = RelayClient.watch, asyncio.Event()

        async def watches(client: RelayClient, model: str) -> AsyncIterator[object]:
            if not fail.is_set():
                await fail.wait()
                holder.versions = [2, 3]
                raise KeyError("nobody thought of it")
            async for event in watch(client, model):
                yield event

        monkeypatch.setattr(RelayClient, "watch", watches)
        holder.versions = [1, 2]
        async with followed(address) as found:
            await until(lambda: found.held(address) == {1, 2}, "what it holds")
            fail.set()
            await until(lambda: found.held(address) == {2, 3}, "what it holds now")


async def test_a_version_that_no_master_gives_is_left_out() -> None:
    async with relay() as (holder, address), followed(address) as found:
        await until(lambda: found.newest(address) == 0, "nothing yet")
        holder.publish((1 << 63) - 1)
        holder.publish(5)
        await until(lambda: found.newest(address) == 5, "the version that can be")
        assert found.held(address) == frozenset({Version(5)})


async def test_a_registry_that_replaced_another_is_refused_until_it_goes_on_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers begin again: a trainer would publish versions that no engine loads, and nobody would say so."""
    monkeypatch.setattr(relays, "RETRY_S", 0.01)
    async with relay() as (fake, address):
        fake.versions = [26, 27]
        async with followed(address) as found:
            await until(lambda: found.held(address) == {26, 27}, "its versions")
            fake.replace_registry("another", 1)
            await until(lambda: bool(found.refused()), "it is refused")
            adopt = f"`paramserver adopt --relay {address} --continues store --model policy --above 27`"
            assert found.refused() == {
                address: "the registry was replaced: it is another, and versions up to 27 are of store "
                f"(bring registry store back (its etcd's data), or go on with this one by {adopt})"
            }
            assert found.held(address) == frozenset()
            fake.replace_registry("another", *range(1, 30))  # above the newest, and other weights all the same
            before = fake.num_listed
            await until(lambda: fake.num_listed > before + 2, "it was asked again")
            assert found.held(address) == frozenset()
            said = [r.getMessage() for r in caplog.records if "are refused" in r.getMessage()]
            assert len(said) == 1
            assert adopt in said[0]
            fake.replace_registry("another", 28, continues=["store"])
            await until(lambda: found.held(address) == {28}, "it goes on with the one before")
            assert found.refused() == {}


async def test_which_registry_versions_came_from_outlives_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    async with relay() as (fake, address):
        for life, store_id in enumerate(("store", "another")):
            fake.replace_registry(store_id, 5 - life)
            async with Database(path) as database:
                kept = LineageStore(database)
                await kept.open()
                tasks = Supervisor()
                found = Relays("policy", tasks, lambda *_: None, lineage=kept.lineage, saw=kept.keep)
                found.follow(address)
                await until(lambda found=found: found.newest(address) is not None, "the relay answered")  # type: ignore[misc]
                assert bool(found.refused()) == bool(life)
                await found.unfollow(address)
                await tasks.close()
    assert (kept.lineage.store_id, kept.lineage.newest) == ("store", 5)
