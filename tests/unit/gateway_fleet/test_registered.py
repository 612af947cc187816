"""The fleet follows what relays register, and leaves alone what came in another way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gateway.config import EngineSpec
from gateway.core.types import EngineName
from gateway.fleet.fleet import Fleet
from gateway.fleet.registrations import Registrations
from paramserver.client import RegisteredEngine
from paramserver.core import view as keys
from paramserver.membership import MemoryRegistry, MemoryStore
from paramserver.membership.registry import Delete, Put
from tests.support.fake_relay import relay
from tests.support.gateway_shell import Shell, check_whole, read, shell
from tests.support.reading import heard
from tests.support.scripted_engine import ScriptedEngine, until


class Relay:
    """Registers and takes back, as a relay and its lease do."""

    def __init__(self, store: MemoryStore, address: str) -> None:
        self._registry, self._address = MemoryRegistry(store), address

    async def register(self, engine: ScriptedEngine, kind: str = "vllm", name: str = "") -> None:
        record = RegisteredEngine(name or engine.name, kind, engine.url, self._address)
        await self._registry.transact([], [Put(keys.engine_key(record.name), msgspec.json.encode(record))])

    async def put(self, name: str, record: RegisteredEngine | bytes) -> None:
        """Whatever it is, under `name`."""
        value = record if isinstance(record, bytes) else msgspec.json.encode(record)
        await self._registry.transact([], [Put(keys.engine_key(name), value)])

    async def vanish(self, name: str) -> None:
        await self._registry.transact([], [Delete(keys.engine_key(name))])


@asynccontextmanager
async def following(found: Shell, address: str, store_id: bytes = b"store") -> AsyncIterator[Relay]:
    store = MemoryStore(lambda: 0.0)
    await MemoryRegistry(store).transact([], [Put(keys.STORE, store_id)])
    task = asyncio.create_task(Registrations(MemoryRegistry(store), found.fleet).run())
    try:
        yield Relay(store, address)
    finally:
        task.cancel()
        await asyncio.wait([task])


def serving(found: Shell) -> list[str]:
    return [e.name for e in found.fleet.state.sorted_engines() if e.status == "serving"]


async def test_an_engine_comes_with_its_registration_and_goes_with_it(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1")
    async with relay() as (_, address), e0, e1, shell(tmp_path) as found, following(found, address) as registered:
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0"], "e0")
        run = found.run()
        async with run:
            await until(lambda: len(run.record.token_ids) == 4, "tokens")
            await registered.register(e1)
            await until(lambda: serving(found) == ["e0", "e1"], "e1")
            await registered.vanish("e0")
            deltas = await heard(run)
        check_whole(run, deltas)
        assert [s.engine for s in run.segments] == ["e0", "e1"]
        assert list(found.fleet.handles) == ["e1"]
        left = f"engine e0 left with relay {address}, which registered it: it joins again when that is started"
        assert found.fleet.elsewhere == {"e0": left}
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0", "e1"], "e0 again")
        assert found.fleet.elsewhere == {}


async def test_a_registration_that_changes_is_taken_over(tmp_path: Path) -> None:
    e0, again = ScriptedEngine("e0"), ScriptedEngine("e0")
    async with relay() as (_, address), e0, again, shell(tmp_path) as found, following(found, address) as registered:
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0"], "e0")
        await registered.register(again)
        await until(lambda: [m.spec.url for m in found.fleet.handles.values()] == [again.url], "the new address")
        await until(lambda: serving(found) == ["e0"], "e0 again")
        run = found.run()
        check_whole(run, await read(run))
        assert (len(e0.requests), len(again.requests)) == (0, 1)


async def test_engines_of_the_configuration_stay_whatever_relays_say(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (_, address), e0, e1, shell(tmp_path, e0) as found, following(found, address) as registered:
        await registered.register(e1, name="e0")  # a taken name
        await registered.register(e0, name="x")  # a taken address
        await registered.register(e1, kind="tgi", name="y")
        await registered.register(e1)
        await until(lambda: serving(found) == ["e0", "e1"], "e1")
        assert list(found.fleet.handles) == ["e0", "e1"]
        for name in ("e0", "x", "y", "e1"):
            await registered.vanish(name)
        await until(lambda: list(found.fleet.handles) == ["e0"], "e1 to leave")
        assert found.fleet.handles[EngineName("e0")].spec.url == e0.url


async def test_what_an_operator_took_out_stays_out_until_it_registers_anew(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (_, address), e0, e1, shell(tmp_path) as found, following(found, address) as registered:
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0"], "e0")
        await found.fleet.remove(EngineName("e0"))
        await registered.register(e1)
        await until(lambda: serving(found) == ["e1"], "e1 alone")
        await registered.vanish("e0")
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0", "e1"], "both")


@pytest.mark.parametrize("others", [False, True])
async def test_a_relay_is_let_go_with_the_last_engine_beside_it(others: bool, tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (holder, address), e0, e1, shell(tmp_path) as found, following(found, address) as registered:
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0"], "e0")
        if others:
            await registered.register(e1)
            await until(lambda: serving(found) == ["e0", "e1"], "e1")
        await registered.vanish("e0")
        await until(lambda: "e0" not in found.fleet.handles, "e0 to leave")
        await until(lambda: found.fleet.relays.addresses() == ([address] if others else []), "the relay's connection")
        await registered.register(e0)
        await until(lambda: "e0" in serving(found), "e0 again")
        holder.publish(7)
        await until(lambda: e0.version == "7", "version 7")


async def test_an_engine_that_joins_late_beside_a_known_relay_loads_before_it_serves(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (holder, address), e0, e1, shell(tmp_path) as found, following(found, address) as registered:
        holder.publish(7)
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0"] and e0.version == "7", "version 7")
        await registered.register(e1)
        runs = [found.run() for _ in range(4)]
        for run in runs:
            check_whole(run, await read(run))
        await until(lambda: serving(found) == ["e0", "e1"], "e1")
        assert e1.version == "7"
        assert {asked.version for asked in (*e0.requests, *e1.requests)} == {"7"}


ODD_URLS = ("http://127.0.0.1:99999", "http://[::1", f"http://{'a' * 64}.example", "ftp://host", "")


@pytest.mark.parametrize("url", ODD_URLS)
async def test_a_registration_that_cannot_be_followed_costs_its_own_engine_alone(tmp_path: Path, url: str) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (_, address), e0, e1, shell(tmp_path) as found, following(found, address) as registered:
        await registered.register(e0)
        await registered.put("a", RegisteredEngine("a", "vllm", url, address))
        await registered.put("b", RegisteredEngine("b", "vllm", e1.url, "no-relay"))
        await registered.put("c", RegisteredEngine("not-c", "vllm", e1.url, address))
        await registered.put("d", b'{"name": "\xff"}')
        await registered.put("e", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
        await registered.register(e1)
        await until(lambda: serving(found) == ["e0", "e1"], "the sound ones")
        assert list(found.fleet.handles) == ["e0", "e1"]
        for name in ("a", "b", "c", "d", "e", "e0"):
            await registered.vanish(name)
        await until(lambda: list(found.fleet.handles) == ["e1"], "e0 to leave")


async def test_what_fails_with_one_engine_as_nobody_foresaw_is_said_and_the_others_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add, e0, e1 = Fleet.add, ScriptedEngine("e0"), ScriptedEngine("e1")

    def adds(fleet: Fleet, spec: EngineSpec) -> None:
        if spec.name == "e0":
            raise KeyError("nobody thought of it")
        add(fleet, spec)

    monkeypatch.setattr(Fleet, "add", adds)
    async with relay() as (_, address), e0, e1, shell(tmp_path) as found, following(found, address) as registered:
        await registered.register(e0)
        await registered.register(e1)
        await until(lambda: serving(found) == ["e1"], "e1")
    assert "nobody thought of it" in caplog.text


async def test_a_store_whose_id_nobody_can_read_still_has_engines(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    async with (
        relay() as (_, address),
        e0,
        shell(tmp_path) as found,
        following(found, address, b"\xff\xfe") as registered,
    ):
        await registered.register(e0)
        await until(lambda: serving(found) == ["e0"], "e0")
