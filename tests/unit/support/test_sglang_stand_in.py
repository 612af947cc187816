"""The SGLang stand-in refuses what the real server refuses, and shows what an adapter must not do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.support.scripted_engine import until
from tests.support.sglang import server as server_module
from tests.support.sglang.engine import Engine
from tests.support.sglang.server import Server
from tests.support.sglang.weights import read_directory, said
from tests.support.snapshots import seal, tear
from tests.support.tiny_model import tiny_model

PROMPT = [5, 6, 7]
Post = Callable[..., Awaitable[tuple[int, Any]]]


@asynccontextmanager
async def stand_in(**how: Any) -> AsyncIterator[tuple[Engine, Post]]:
    """The engine and `post(path, body)` to it: status and body."""
    engine = Engine(**{"weights": "w0", "step_s": 0.0005, **how})
    runner = web.AppRunner(Server(engine).app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:

        async def post(path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
            async with http.request(method, path, json=body) as answer:
                is_json = answer.content_type == "application/json"
                return answer.status, await (answer.json() if is_json else answer.text())

        yield engine, post
    engine.abort("", everything=True)
    await runner.cleanup()


def generate(tokens: int = 4, rid: str = "r", **params: Any) -> dict[str, Any]:
    return {"rid": rid, "input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens, **params}}


async def started(engine: Engine, post: Post, tokens: int = 2000) -> asyncio.Task[tuple[int, Any]]:
    """A request under way; at 0.05 s a token it is far from its end however slow the machine is."""
    task = asyncio.create_task(post("/generate", generate(tokens)))
    await until(lambda: any(request.ids for request in engine.requests.values()), "tokens")
    return task


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/generate", {"input_ids": []}, "empty"),
        ("/generate", {"input_ids": ["5"]}, "Expected `int`"),
        ("/generate", {"input_ids": [9999]}, "vocabulary"),
        ("/generate", generate(temperature=-1), "temperature"),
        ("/generate", generate(top_k=0), "top_k"),
        ("/generate", generate(tokens=4, min_new_tokens=5), "min_new_tokens"),
        ("/generate", generate(max_tokens=4), "unknown field `max_tokens`"),
        ("/generate", {**generate(), "request_id": "r"}, "unknown field `request_id`"),
        ("/pause_generation", {"mode": "keep"}, "keep"),
        ("/end_weight_update", {}, "no weight update session"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, "no weight update session"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "Cannot find any model weights"),
        ("/update_weights_from_disk", {"path": "/nowhere"}, "unknown field `path`"),
    ],
)
async def test_what_is_refused(path: str, body: Any, why: str) -> None:
    async with stand_in() as (engine, post):
        status, told = await post(path, body)
        told = told["error"] if path == "/generate" else told
        assert (status, why in told["message"]) == (400, True), told
        assert (engine.weights, engine.label) == ("w0", "default")


async def test_sessions_open_once_and_take_the_right_number_of_ranks() -> None:
    async with stand_in(tp_size=2, loaders=("x.y",)) as (_, post):
        assert (await post("/begin_weight_update", {"selector": "all"}))[0] == 200
        assert "already open" in (await post("/begin_weight_update", {"selector": "all"}))[1]["message"]
        tensors = {"serialized_named_tensors": ["x"], "load_format": "x.y"}
        assert "for 2 ranks" in (await post("/update_weights_from_tensor", tensors))[1]["message"]
        unknown = {"serialized_named_tensors": ["x", "x"], "load_format": "a.b"}
        assert "Unknown load_format=a.b" in (await post("/update_weights_from_tensor", unknown))[1]["message"]
        assert (await post("/end_weight_update", {}))[1]["success"] is True


async def test_a_request_id_is_taken_once_and_aborted_by_all_of_it() -> None:
    async with stand_in(step_s=0.05) as (engine, post):
        task = await started(engine, post)
        [request] = engine.requests.values()
        assert "Duplicate" in (await post("/generate", generate()))[1]["error"]["message"]
        for rid in ("", "r-1", "r"):
            assert await post("/abort_request", {"rid": rid}) == (200, "")
            assert (request.finish is None) == (rid != "r")
        _, answer = await task
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert answer["output_ids"] == said("w0", PROMPT, meta["completion_tokens"])[0]


@pytest.mark.slow
async def test_whatever_a_load_raises_ends_it(tmp_path: Path) -> None:
    torn = tear(seal(tmp_path, 3, tiny_model(seed=3)))
    blocked = base64.b64encode(b"ctorch\ntensor\n.").decode()
    for path, body in {
        "/update_weights_from_disk": {"model_path": str(torn.path), "weight_version": "3"},
        "/update_weights_from_tensor": {"serialized_named_tensors": [blocked], "load_format": "x.y"},
    }.items():
        async with stand_in(loaders=("x.y",)) as (engine, post):
            await post("/begin_weight_update", {"selector": "all"}) if "tensor" in path else None
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await post(path, body)
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await post("/generate", generate())
            assert engine.label == "default"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "flush", "clean"),
    [("retract", True, True), ("retract", False, False), ("in_place", True, False), ("abort", True, True)],
)
async def test_kv_of_the_old_weights_shows(mode: str, flush: bool, clean: bool, tmp_path: Path) -> None:
    """`in_place` keeps it whatever is asked; the others keep what is not flushed."""
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    async with stand_in() as (_, post):
        await post("/generate", generate())
        await post("/pause_generation", {"mode": mode})
        body = {"model_path": str(snapshot.path), "weight_version": "3", "flush_cache": flush, "keep_pause": True}
        assert (await post("/update_weights_from_disk", body))[0] == 200
        await post("/continue_generation", {})
        _, answer = await post("/generate", generate())
        new = said(read_directory(snapshot.path), PROMPT, 4)[0]
        assert (answer["output_ids"] == new) is clean


@pytest.mark.slow
async def test_an_update_that_does_not_keep_the_pause_ends_it(tmp_path: Path) -> None:
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    async with stand_in() as (_, post):
        await post("/pause_generation", {"mode": "abort"})
        assert (await post("/ready", method="GET"))[0] == 503
        await post("/update_weights_from_disk", {"model_path": str(snapshot.path)})
        assert (await post("/ready", method="GET"))[0] == 200
        assert (await post("/v1/models", method="GET"))[1]["data"][0]["id"] == str(snapshot.path)


async def test_what_waits_while_it_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_TIMEOUT_S", 0.05)
    async with stand_in() as (engine, post):
        await post("/pause_generation", {"mode": "retract"})
        task = asyncio.create_task(post("/generate", generate()))
        assert (await post("/health", method="GET"))[0] == 503
        load = (await post("/v1/loads?include=core&format=json", method="GET"))[1]["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 1)
        assert not task.done()
        await post("/continue_generation", {})
        assert (await task)[1]["output_ids"] == said(engine.weights, PROMPT, 4)[0]


async def test_flushing_needs_an_idle_or_retracted_engine() -> None:
    async with stand_in(step_s=0.05) as (engine, post):
        task = await started(engine, post)
        assert (await post("/flush_cache"))[0] == 400
        await post("/pause_generation", {"mode": "retract"})
        assert (await post("/flush_cache"))[0] == 200
        assert (await post("/v1/loads?include=everything", method="GET"))[0] == 400
        task.cancel()


async def test_a_new_label_aborts_everything_unless_told_not_to() -> None:
    async with stand_in(step_s=0.05) as (engine, post):
        task = await started(engine, post)
        await post("/update_weight_version", {"new_version": "5", "abort_all_requests": False})
        assert (engine.label, task.done()) == ("5", False)
        await post("/update_weight_version", {"new_version": "6"})
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
