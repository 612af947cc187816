"""An operator's repack through a real gateway's routes: looked at first, then done, then read in its receipt."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import start
from gateway.config import EngineSpec, GatewayConfig
from gateway.core.fleet.config import FleetConfig
from gateway.core.types import Version
from gateway.operate.repack_view import describe, request_plans
from gateway.repack import loop
from gateway.runtime import supervisor
from tests.support.fake_relay import relay
from tests.support.scripted_engine import MODEL, ScriptedEngine, scripted, until
from tests.support.words import tokenizer
from tests.unit.gateway_api.test_status import gateway as running

PROMPT = [11, 12, 13]
BUDGET = 400


async def test_a_dry_run_moves_nothing_and_a_round_leaves_its_receipt(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        found_relay, address = await stack.enter_async_context(relay())
        found_relay.publish(1)
        engines = [await stack.enter_async_context(ScriptedEngine(f"e{i}", hold_at=6)) for i in range(2)]
        config = GatewayConfig(
            model=MODEL,
            tokenizer=tokenizer(tmp_path / "model"),
            port=0,
            engines=tuple(EngineSpec(e.name, "vllm", e.url, address) for e in engines),
            fleet=FleetConfig(mode="drain"),
        )
        gateway = await start(config)
        stack.push_async_callback(gateway.close, 1.0)
        states = gateway.fleet.state.sorted_engines
        await until(lambda: all(e.status == "serving" and e.version == 1 for e in states()), "version 1", 60)
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url))
        asking = [asyncio.create_task(complete(http)) for _ in range(2)]
        await until(lambda: [len(e.turns) for e in states()] == [1, 1], "a turn on each", 60)
        runs = gateway.sessions.running
        await until(lambda: all(len(r.record.token_ids) == 6 for r in runs.values()), "held turns", 60)
        found_relay.publish(2)
        await until(lambda: not any(e.intake_open for e in states()), "closed intakes", 60)

        [plan] = (await request_plans(gateway.url, dry_run=True))["plans"]
        [freed], [move] = plan["freed"], plan["moves"]
        assert "would free " + freed["engine"] in describe({"plans": [plan]}, dry_run=True)[0]
        assert gateway.sessions.counters.moves == 0
        assert [len(e.turns) for e in states()] == [1, 1], "it only looked"

        [done] = (await request_plans(gateway.url, dry_run=False))["plans"]
        assert done["moves"] == [move]
        for engine in engines:
            engine.hold_at = None
            engine.go.set()
        for task in asking:
            assert await task == scripted(PROMPT, BUDGET)[0]
        await until(lambda: [e.version for e in states()] == [2, 2], "the freed engine's refresh, and the other's", 60)
        book = gateway.parts.repacker.book
        await until(lambda: book.receipts[-1].gain_measured_s is not None, "the measured gain", 60)
        async with http.get("/admin/receipts") as answer:
            [receipt] = (await answer.json())["receipts"]
        assert (receipt["version"], receipt["engine"]) == (1, freed["engine"])
        assert receipt["price_s"]["estimated"] == freed["price_s"]
        assert 0 < receipt["price_s"]["measured"] < 10
        assert receipt["gain_s"]["estimated"] == freed["gain_s"]
        assert receipt["gain_s"]["measured"] >= 0
        [moved] = receipt["moves"]
        assert (moved["outcome"], {name: moved[name] for name in move}) == ("moved", move)


async def complete(http: aiohttp.ClientSession) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": BUDGET, "return_token_ids": True}
    async with http.post("/v1/completions", json=body) as answer:
        return (await answer.json())["choices"][0]["token_ids"]


async def test_a_round_that_fails_as_nobody_foresaw_is_said_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = 0

    def none_behind(*_: object) -> list[Version]:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise ZeroDivisionError("nobody thought of it")
        return []

    monkeypatch.setattr(supervisor, "RETRY_S", 0.01)
    monkeypatch.setattr(loop, "behind", none_behind)
    async with ScriptedEngine("e0") as e0, running(tmp_path, e0, repack_interval_s=0.01):
        await until(lambda: rounds > 2, "further rounds")
    assert caplog.text.count("repack failed, and begins again until it does not") == 1
