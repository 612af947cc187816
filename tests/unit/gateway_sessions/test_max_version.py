"""`max_version` over HTTP: a session is never on a newer version, whatever becomes of the one it is on."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway, start
from gateway.config import EngineSpec
from gateway.core.fleet.config import FleetConfig
from tests.support.fake_relay import FakeRelay, relay
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import config, gateway, get
from tests.unit.gateway_sessions.test_rewards import post


@asynccontextmanager
async def refreshed(directory: Path, *engines: ScriptedEngine) -> AsyncIterator[tuple[Gateway, Any, FakeRelay]]:
    """A gateway whose engines load what a relay has, as soon as they may; and its client."""
    async with AsyncExitStack() as stack:
        holder, address = await stack.enter_async_context(relay())
        holder.publish(1)
        specs = tuple(EngineSpec(e.name, "vllm", e.url, address) for e in engines)
        quick = FleetConfig(intake_min_batch=0, version_hold_s=0.2)
        settings = dataclasses.replace(config(directory, *engines), engines=specs, fleet=quick, probe=False)
        found = await start(settings)
        stack.push_async_callback(found.close, 1.0)
        http = await stack.enter_async_context(aiohttp.ClientSession(found.url))
        await until(lambda: served(found) == [1] * len(engines), "version 1", 60)
        yield found, http, holder


def served(found: Gateway) -> list[int]:
    return [int(e.version) if e.status == "serving" else -1 for e in found.fleet.state.sorted_engines()]


async def turn(http: aiohttp.ClientSession, session: str, status: int = 200) -> Any:
    body = {"model": MODEL, "prompt": [5], "max_tokens": 2}
    return await post(http, f"/s/{session}/v1/completions", body, status)


@pytest.mark.slow
async def test_a_session_is_not_moved_past_it_and_its_version_is_loaded_again_while_there_is_one(
    tmp_path: Path,
) -> None:
    async with (
        ScriptedEngine("e0") as e0,
        ScriptedEngine("e1") as e1,
        refreshed(tmp_path, e0, e1) as (found, http, holder),
    ):
        await post(http, "/sessions", {"session_id": "bound", "max_version": 1, "on_version_loss": "segment"})
        await post(http, "/sessions", {"session_id": "free", "on_version_loss": "segment"})
        for name in ("bound", "free"):
            await turn(http, name)
        holder.publish(2)
        await until(lambda: served(found) == [2, 2], "both past it", 60)
        await turn(http, "free")
        assert (await get(http, "/sessions/free"))["version"] == 2
        await turn(http, "bound")
        told = await get(http, "/sessions/bound")
        assert (told["version"], told["versions"], told["version_changes"]) == (1, [1], [])

        await until(lambda: served(found) == [2, 2], "nobody holds it any more", 60)
        holder.retire(1)
        await until(lambda: found.fleet.state.gone(told["version"]), "the relay without it")
        lost = (await turn(http, "bound", 410))["error"]
        assert lost["code"] == "version_lost"
        assert "no relay holds it any more" in lost["message"]
        assert "it may be on no version newer than 1" in lost["message"]


async def test_a_new_session_is_told_when_every_engine_is_past_it(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (_, http):
        for name, newest in (("same", 3), ("older", 2)):
            await post(http, "/sessions", {"session_id": name, "max_version": newest})
        await turn(http, "same")
        lost = (await turn(http, "older", 410))["error"]
        assert lost["code"] == "version_lost"
        assert "every engine is past version 2, the newest that it may be on" in lost["message"]
        assert "name a `version`, which is loaded again" in lost["message"]


@pytest.mark.parametrize("bounds", [{"min_version": 4}, {"version": 4}, {"version": 4, "min_version": 2}], ids=str)
async def test_it_is_no_older_than_what_else_is_asked_for(tmp_path: Path, bounds: dict[str, int]) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (_, http):
        told = (await post(http, "/sessions", {**bounds, "max_version": 3}, 400))["error"]
        assert (told["param"], told["message"]) == ("max_version", "`max_version`=3 is out of range (at least 4)")
        await post(http, "/sessions", {**bounds, "max_version": 4})
