"""A kind of engine that loads no published versions, beside one that does: with a relay, registered, paused."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

import pytest

from gateway.config import EngineSpec, GatewayConfig, parse_engine
from gateway.core.fleet.config import FleetConfig
from gateway.core.placing.reasons import closed_reason
from gateway.core.types import EngineName
from gateway.engines.kinds import ADAPTERS
from gateway.engines.vllm import VllmEngine
from gateway.operate import doctor
from protos.engines import ENGINE_KINDS
from protos.errors import UnsupportedField
from tests.support.fake_relay import relay
from tests.support.gateway_shell import Shell, check_whole, read, shell
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.support.tiny_model import tiny_tokenizer
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_fleet.test_registered import following, serving
from tests.unit.gateway_operate.test_cli_status import status

FIXED = "fixed"


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for such a kind in the two tables, and nothing else."""
    monkeypatch.setitem(ENGINE_KINDS, FIXED, dataclasses.replace(ENGINE_KINDS["vllm"], loads=False))
    monkeypatch.setitem(ADAPTERS, FIXED, VllmEngine)


def loaded(engine: ScriptedEngine) -> bool:
    return "/update_weights" in dict(engine.calls)


async def test_the_default_relay_is_for_those_that_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (holder, address), e0, e1, shell(tmp_path, e1, relay=address) as found:
        found.fleet.add(EngineSpec("e0", FIXED, e0.url, None))
        await until(lambda: serving(found) == ["e0", "e1"], "both")
        holder.publish(7)
        await until(lambda: e1.version == "7" and serving(found) == ["e0", "e1"], "version 7 where it can be loaded")
        states = found.fleet.state.engines
        fixed = states[EngineName("e0")]
        assert (fixed.version, fixed.available, fixed.loadable, fixed.relay) == (0, 0, frozenset(), "")
        assert (loaded(e0), loaded(e1)) == (False, True)
        await found.fleet.pins.update(0.0)
        assert list(found.fleet.pins.fallbacks.values()) == [7]
        newest = found.session()
        check_whole(run := found.run(newest), await read(run))
        assert [segment.engine for segment in run.segments] == ["e1"], "the newest version first"
        await found.fleet.remove(EngineName("e1"))
        check_whole(run := found.run(), await read(run))
        assert [(segment.engine, segment.version) for segment in run.segments] == [("e0", 0)]
    assert "engine e0 keeps the version that it was started with: kind fixed loads no others" in caplog.text


@pytest.mark.parametrize("mode", ["repack", "inflight", "barrier"])
async def test_the_command_lines_relay_is_not_given_to_it(tmp_path: Path, mode: str) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (holder, address), e0, e1:
        holder.publish(7)
        engines = (EngineSpec("e0", FIXED, e0.url, None), EngineSpec("e1", "vllm", e1.url, None))
        settings = {"engines": engines, "relay": address, "fleet": FleetConfig(mode=mode)}  # type: ignore[arg-type]
        async with gateway(tmp_path, e0, e1, **settings) as (found, http):
            await until(lambda: e1.version == "7", "version 7 where it can be loaded")
            assert found.fleet.handles[EngineName("e0")].spec.relay is None
            told = {engine["name"]: engine for engine in (await get(http, "/status"))["engines"]}
            assert (told["e0"]["loads"], told["e0"]["version"], told["e0"]["state"]) == (False, 0, "serving")
            assert (told["e1"]["loads"], told["e0"]["intake"], told["e0"]["reason"]) == (True, "open", "")
            assert "0 (loads none)" in (await status(found.url)).output
    assert not loaded(e0)


def test_a_relay_of_its_own_is_refused_by_name() -> None:
    assert parse_engine("e0=fixed=http://h:1") == EngineSpec("e0", FIXED, "http://h:1", None)
    with pytest.raises(UnsupportedField, match="kind fixed load no published versions, from h:7070") as refused:
        parse_engine("e0=fixed=http://h:1@h:7070")
    assert "leave the relay out" in refused.value.hint


@pytest.mark.parametrize("check", [True, False])
async def test_a_relay_is_refused_where_it_is_added(tmp_path: Path, check: bool) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path) as (found, http):
        wanted = {"name": "e0", "kind": FIXED, "url": e0.url, "check": check}
        async with http.post("/admin/engines", json={**wanted, "relay": "127.0.0.1:7070"}) as answer:
            assert answer.status == 400
            assert "kind fixed load no published versions" in await answer.text()
        assert not found.fleet.handles
        async with http.post("/admin/engines", json=wanted) as answer:
            assert answer.status == 201
        await until(lambda: [e.status for e in found.fleet.state.sorted_engines()] == ["serving"], "it serves")


async def test_one_that_a_relay_registers_joins_and_leaves_with_it_and_loads_nothing_from_it(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (holder, address), e0, e1, shell(tmp_path) as found, following(found, address) as registered:
        holder.publish(7)
        await registered.register(e0, kind=FIXED)
        await until(lambda: serving(found) == ["e0"], "it serves at once")
        assert found.fleet.relays.addresses() == []
        await registered.register(e1)
        await until(lambda: serving(found) == ["e0", "e1"], "the other, with version 7")
        assert (e0.version, e1.version, loaded(e0)) == ("0", "7", False)
        await registered.vanish("e0")
        await until(lambda: serving(found) == ["e1"], "it leaves")


async def test_what_it_reports_is_its_version_also_after_a_restart(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", version="5")
    async with e0, shell(tmp_path, poll_interval_s=0.05) as found:
        found.fleet.add(EngineSpec("e0", FIXED, e0.url, None))
        await until(lambda: serving(found) == ["e0"], "it serves")
        assert found.fleet.state.served() == [5]
        e0.started_unix_s, e0.version = 2.0, "6"
        await until(lambda: found.fleet.state.served() == [6], "its next life, with other weights")
    assert not loaded(e0)


async def test_one_that_is_paused_serves_once_it_is_resumed(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", paused=True)
    async with e0, shell(tmp_path, poll_interval_s=0.05) as found:
        found.fleet.add(EngineSpec("e0", FIXED, e0.url, None))
        state = found.fleet.state.engines[EngineName("e0")]
        await until(lambda: state.status == "joining", "it answers")
        assert "is paused: resume it, since engines of kind fixed load no version" in _why(found)
        e0.paused = False
        await until(lambda: state.status == "serving", "it serves")
    assert not loaded(e0)


def _why(found: Shell) -> str:
    [state] = found.fleet.state.sorted_engines()
    return closed_reason(found.fleet.state, state, asyncio.get_running_loop().time())


@pytest.mark.parametrize("paused", [False, True])
async def test_the_doctor_wants_no_relay_for_it(paused: bool) -> None:
    async with ScriptedEngine("e0", paused=paused) as e0:
        engines = (EngineSpec("e0", FIXED, e0.url, None),)
        config = GatewayConfig(model=MODEL, tokenizer=tiny_tokenizer(), engines=engines, port=0)
        found = [finding for finding in await doctor.examine(config) if finding.what == "engine e0"]
    assert "version 0, and loads no other" in found[0].found
    assert [finding.remedy for finding in found[1:]] == (
        ["it is paused: resume it, since the gateway loads nothing into it"] if paused else []
    )
