"""Engines of both kinds behind one door: the same fields for a client, and turns that go from one kind to the other."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tokenizers import Tokenizer

from gateway.app import start
from gateway.config import EngineSpec, GatewayConfig
from gateway.core.sampling import segment_seed
from gateway.core.types import EngineName, SessionId, Version
from gateway.operate.status_view import warnings_of
from protos.engines import ENGINE_KINDS
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.support.sglang.engine import HELD_TOKENS, Engine
from tests.support.sglang.server import Server
from tests.support.sglang.weights import said
from tests.support.tiny_model import CONTEXT, EOS_ID, tiny_tokenizer
from tests.support.turns import serving_app
from tests.unit.gateway_api.test_status import config

TURNS, BUDGET, WEIGHTS = 16, 60, "w0"


async def test_a_server_that_is_to_end_keeps_its_turns_and_gets_no_more(tmp_path: Path) -> None:
    """SGLang after SIGTERM: it answers everything until its last request has ended."""
    sglang = Engine(WEIGHTS, "0", MODEL, hold=tmp_path / "hold")
    (tmp_path / "hold").touch()
    async with serving_app(Server(sglang).app()) as url, ScriptedEngine("vllm", version="1") as vllm:
        spec = EngineSpec("sglang", "sglang", url, None)
        found = await start(dataclasses.replace(config(tmp_path), engines=(spec,), poll_interval_s=0.02))
        state = found.fleet.state.engines[EngineName("sglang")]
        await until(lambda: state.status == "serving", "it")
        async with aiohttp.ClientSession(found.url) as http:
            body = {"model": MODEL, "prompt": [5, 6], "max_tokens": HELD_TOKENS + 1}
            first = asyncio.create_task(post(http, {**body, "session_id": "s"}))
            await until(lambda: len(state.turns) == 1, "a turn there")
            added = await http.post("/admin/engines", json={"name": "vllm", "url": vllm.url})
            assert added.status == 201
            await until(lambda: found.fleet.state.engines[EngineName("vllm")].status == "serving", "another engine")
            sglang.draining = True
            await until(lambda: state.suspicion, "that it is not ready")
            for _ in range(4):
                assert (await post(http, {**body, "max_tokens": 2}))["choices"]
            assert len(sglang.requests) == 1
            more = await post(http, {**body, "max_tokens": 2, "session_id": "s", "return_token_ids": True})
            [change] = more["laminar"]["version_changes"]
            assert change["to_version"] == 1, "its sessions do not wait for its end"
            [told] = [e for e in found.status.report().engines if e.name == "sglang"]
            assert (told.state, "not ready" in told.reason) == ("suspected", True)
            (tmp_path / "hold").unlink()
            assert (await first)["choices"][0]["finish_reason"] == "length"
            sglang.draining = False
            await until(lambda: not state.suspected, "its return: it was only paused")
        await found.close(1.0)


@pytest.mark.parametrize("deterministic", [False, True], ids=["ignores seeds", "takes seeds"])
async def test_a_seed_that_its_engine_ignores_stands_in_no_record_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, deterministic: bool
) -> None:
    sglang = Engine(WEIGHTS, "0", MODEL, deterministic=deterministic)
    async with serving_app(Server(sglang).app()) as url:
        spec = EngineSpec("sglang", "sglang", url, None)
        found = await start(dataclasses.replace(config(tmp_path), engines=(spec,)))
        state = found.fleet.state.engines[EngineName("sglang")]
        await until(lambda: state.status == "serving", "it")
        async with aiohttp.ClientSession(found.url) as http:
            body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2, "seed": 7, "return_token_ids": True}
            answer = await post(http, body)
        report = found.status.report()
        seeds = [segment["seed"] for segment in answer["laminar"]["segments"]]
        assert seeds == [segment_seed(7, 0, 0, 0) if deterministic else None]
        assert (report.engines[0].seeds, report.counters.turns_unseeded) == (deterministic, int(not deterministic))
        warned = [
            line for line in warnings_of(msgspec.to_builtins(report, str_keys=True)) if "seed was ignored" in line
        ]
        assert len(warned) == int(not deterministic)
        assert ("ignores the `seed` of a request" in caplog.text) is not deterministic
        await found.close(1.0)


async def post(http: aiohttp.ClientSession, body: Any) -> Any:
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def says(ids: Sequence[int]) -> list[int]:
    """What the stand-in for SGLang says, too; more than is asked for."""
    return said(WEIGHTS, tuple(ids), BUDGET + 1)[0]


def with_tokenizer(directory: Path, *engines: EngineSpec) -> GatewayConfig:
    return dataclasses.replace(config(directory), tokenizer=tiny_tokenizer(), engines=engines, probe=False)


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
async def test_turns_move_between_vllm_and_sglang_both_ways_and_keep_every_field(
    tmp_path: Path, incremental: bool
) -> None:
    sglang = Engine(WEIGHTS, "0", MODEL, step_s=0.005)
    async with (
        serving_app(Server(sglang, incremental=incremental, disconnect_s=0.5).app()) as url,
        ScriptedEngine("vllm", generate=says, chunk=1, pause_s=0.005, dtype="bfloat16") as vllm,
    ):
        engines = (EngineSpec("vllm", "vllm", vllm.url, None), EngineSpec("sglang", "sglang", url, None))
        found = await start(dataclasses.replace(config(tmp_path), engines=engines, tokens_per_event=1))
        states = found.fleet.state.engines
        await until(lambda: {e.status for e in states.values()} == {"serving"}, "both kinds")
        async with aiohttp.ClientSession(found.url) as http:
            asked = [asyncio.create_task(ask(http, number)) for number in range(TURNS)]
            running = found.sessions.running
            await until(
                lambda: [len(r.record.token_ids) > 5 for r in running.values()] == [True] * TURNS, "their tokens"
            )
            runs = list(running.values())
            for run in runs:
                assert run.move(next(name for name in states if name != run.engine)) is not None
            for number, choice in enumerate(await asyncio.wait_for(asyncio.gather(*asked), 60)):
                assert choice["token_ids"] == said(WEIGHTS, prompt_of(number), BUDGET)[0]
                assert len(choice["logprobs"]["token_logprobs"]) == BUDGET
                assert choice["finish_reason"] == "length"
                assert [(span["version"], span["end"]) for span in choice["weight_versions"]][-1] == ("0", BUDGET)
        assert {tuple(s.engine for s in run.segments) for run in runs} == {("vllm", "sglang"), ("sglang", "vllm")}
        counters = found.sessions.counters
        assert (counters.turns_cut, counters.turns_lost, counters.turns_completed) == (0, 0, TURNS)
        for run in runs:
            dtypes = {"vllm": "bfloat16", "sglang": "float32"}
            assert [segment.dtype for segment in run.segments] == [dtypes[segment.engine] for segment in run.segments]
        assert counters.turns_mixed_dtype == TURNS, "not greedy-equal, and the record says so"
        assert {engine.name: engine.dtype for engine in found.status.report().engines} == dtypes
        await found.close(1.0)


async def test_a_call_that_was_asked_for_is_held_to_by_sglang_and_never_sent_to_who_cannot(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer() / "tokenizer.json"))
    sglang = Engine(WEIGHTS, "0", MODEL, encode=lambda text: [*tokenizer.encode(text).ids, EOS_ID] if text else [])
    async with (
        serving_app(Server(sglang, incremental=True, disconnect_s=0.5).app()) as url,
        ScriptedEngine("embedded") as other,
    ):
        engines = (EngineSpec("embedded", "embedded", other.url, None), EngineSpec("sglang", "sglang", url, None))
        found = await start(with_tokenizer(tmp_path, *engines))
        await until(lambda: {e.status for e in found.fleet.state.engines.values()} == {"serving"}, "both kinds")
        tools = [{"type": "function", "function": {"name": name}} for name in ("add", "look_up")]
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 200}
        named = {"type": "function", "function": {"name": "add"}}
        async with aiohttp.ClientSession(found.url) as http:
            for choice, name in (("required", "look_up"), (named, "add")):
                async with http.post("/v1/chat/completions", json={**body, "tool_choice": choice}) as answer:
                    assert answer.status == 200, await answer.text()
                    [told] = (await answer.json())["choices"]
                [call] = told["message"]["tool_calls"]
                assert (told["finish_reason"], call["function"]) == ("tool_calls", {"name": name, "arguments": "{}"})
        assert other.requests == []
        await found.close(1.0)


@pytest.mark.parametrize(("name", "value", "default"), [("min_p", 0.1, 0), ("min_tokens", 2, 0), ("seed", 7, None)])
async def test_a_parameter_that_a_kind_of_engine_lacks_is_never_sent_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float, default: float | None
) -> None:
    """Neither for a call of its own nor for a turn of a session, which the embedded engine holds already."""
    lacking = dataclasses.replace(ENGINE_KINDS["embedded"], lacks=frozenset({name}))
    monkeypatch.setitem(ENGINE_KINDS, "embedded", lacking)
    async with (
        serving_app(Server(Engine(WEIGHTS, "0", MODEL), incremental=True, disconnect_s=0.5).app()) as url,
        ScriptedEngine("embedded") as other,
    ):
        engines = (EngineSpec("embedded", "embedded", other.url, None), EngineSpec("sglang", "sglang", url, None))
        found = await start(dataclasses.replace(config(tmp_path), engines=engines, probe=False))
        await until(lambda: {e.status for e in found.fleet.state.engines.values()} == {"serving"}, "both kinds")
        body = {"model": MODEL, "prompt": prompt_of(0), "max_tokens": 3}
        async with aiohttp.ClientSession(found.url, raise_for_status=True) as http:
            await http.post("/sessions", json={"session_id": "s", "train": False})
            session = found.sessions.live.get(SessionId("s"))
            for more in ({"temperature": 0}, {"session_id": "s"}, {"session_id": "s", "stream": True}):
                session.engine, session.version = EngineName("embedded"), Version(0)
                await (await http.post("/v1/completions", json={**body, **more, name: value})).read()
            assert session.engine == "sglang"
            assert other.requests == []
            session.engine = EngineName("embedded")
            await http.post("/v1/completions", json={**body, "session_id": "s", name: default})
        assert [name in request.body for request in other.requests] == [False]
        await found.close(1.0)


async def test_an_engine_that_reports_no_context_has_the_models(tmp_path: Path) -> None:
    engine = Engine(WEIGHTS, "0", MODEL)
    engine.context = 0
    async with serving_app(Server(engine, incremental=True, disconnect_s=0.5).app()) as url:
        engines = (EngineSpec("sglang", "sglang", url, None),)
        found = await start(with_tokenizer(tmp_path, *engines))
        await until(lambda: {e.status for e in found.fleet.state.engines.values()} == {"serving"}, "the engine")
        assert found.fleet.context_tokens == CONTEXT
        await found.close(1.0)


def prompt_of(number: int) -> tuple[int, ...]:
    return (5, 6, 7 + number)


async def ask(http: aiohttp.ClientSession, number: int) -> Any:
    body = {"model": MODEL, "prompt": prompt_of(number), "max_tokens": BUDGET, "logprobs": 0, "ignore_eos": True}
    body |= {"session_id": f"s{number}", "return_token_ids": True, "return_weight_versions": True}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]
