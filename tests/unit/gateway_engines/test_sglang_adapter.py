"""What the SGLang adapter asks, in which order, and what it makes of refusals; the stand-in runs in this loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.api.openai.constraints import forced_call
from gateway.api.openai.forced import CallForm
from gateway.api.openai.requests import decode_chat
from gateway.core.types import SamplingParams
from gateway.engines.base import EngineChunk, EngineFailed, RequestRefused
from gateway.engines.sglang import LOADER, SglangEngine
from tests.support.adapters import lent
from tests.support.scripted_engine import until
from tests.support.sglang.engine import Engine
from tests.support.sglang.server import Server
from tests.support.sglang.weights import read_directory, said
from tests.support.snapshots import seal, tear
from tests.support.tiny_model import tiny_model

PROMPT = (5, 6, 7)


class Scene:
    """An adapter, the stand-in behind it, and the POSTs between them."""

    def __init__(self, engine: Engine, adapter: SglangEngine, posts: list[tuple[str, Any]]) -> None:
        self.engine, self.adapter, self.posts = engine, adapter, posts

    async def read(self, **sampling: Any) -> list[EngineChunk]:
        wanted = SamplingParams(**{"max_tokens": 4, **sampling})
        async with self.adapter.generate(PROMPT, wanted, "r1", "s1") as chunks:
            return [chunk async for chunk in chunks]

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.posts]


@asynccontextmanager
async def scene(**how: Any) -> AsyncIterator[Scene]:
    engine = Engine(**{"weights": "w0", "step_s": 0.0, **how})
    posts: list[tuple[str, Any]] = []

    @web.middleware
    async def noted(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "POST":
            posts.append((request.path, json.loads(await request.read())))
        answer: web.StreamResponse = await handler(request)
        return answer

    app = Server(engine).app()
    app.middlewares.append(noted)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    adapter = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}/", lent(stall_timeout_s=5.0))
    try:
        yield Scene(engine, adapter, posts)
    finally:
        await adapter.close()
        await runner.cleanup()


async def test_a_server_of_another_kind_is_told_apart() -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    adapter = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", lent(stall_timeout_s=5.0))
    with pytest.raises(
        EngineFailed, match=r"answered 404: 404: Not Found \(name the server's own URL, without /v1, and"
    ):
        await adapter.limits()
    await adapter.close()
    await runner.cleanup()


SAMPLED = {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": ((5, -1.0),)}


async def test_what_is_asked() -> None:
    async with scene() as found:
        await found.read()
        await found.read(seed=0, top_k=5, min_tokens=2, stop_token_ids=(4,), ignore_eos=True, top_logprobs=3, **SAMPLED)
    (_, plain), (_, full) = found.posts
    params = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "skip_special_tokens": False, "no_stop_trim": True}
    assert plain == {
        "rid": "r1",
        "input_ids": list(PROMPT),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": True,
    }
    more = {"sampling_seed": 0, "top_k": 5, "min_new_tokens": 2, "stop_token_ids": [4], "ignore_eos": True}
    more |= {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {"5": -1.0}}
    assert full == {**plain, "sampling_params": {**params, **more}, "top_logprobs_num": 3}


async def test_a_server_that_samples_by_seeds_gets_one_for_each_turn() -> None:
    """It would sample all turns without one by the same: a group would have the same answer many times."""
    for deterministic in (False, True):
        async with scene(deterministic=deterministic) as found:
            assert (await found.adapter.limits()).seeds is deterministic
            for _ in range(8):
                await found.read()
            await found.read(seed=7)
            seeds = [body["sampling_params"].get("sampling_seed") for _, body in found.posts]
            assert seeds[-1] == 7
            assert len(set(seeds[:-1])) > 1 if deterministic else set(seeds[:-1]) == {None}


async def test_one_that_is_paused_or_ends_is_not_ready() -> None:
    async with scene() as found:
        assert (await found.adapter.report()).ready
        found.engine.draining = True
        assert not (await found.adapter.report()).ready
        assert (await found.read())[-1].finish_reason == "length", "it still takes turns"
        found.engine.draining, found.engine.paused = False, "retract"
        assert not (await found.adapter.report()).ready


async def test_a_stream_left_early_is_aborted_by_name_and_one_that_ended_is_not() -> None:
    async with scene(step_s=0.001) as found:
        await found.read()
        async with found.adapter.generate(PROMPT, SamplingParams(max_tokens=500), "left", "s1") as chunks:
            await anext(aiter(chunks))
        await until(lambda: "/abort_request" in found.paths, "the abort")
        await until(lambda: not found.engine.requests, "the end of the request")
        assert found.posts[2:] == [("/abort_request", {"rid": "left", "abort_all": False})]


@pytest.mark.parametrize("sampling", [{"top_p": 2.0}, {"max_tokens": 4000}, {"temperature": -1.0}])
async def test_an_error_in_the_stream_of_a_wrong_request_is_a_refusal(sampling: dict[str, Any]) -> None:
    async with scene() as found:
        with pytest.raises(RequestRefused, match="refused the request"):
            await found.read(**sampling)


def forced_call_of(*names: str) -> str:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    body = {"model": "policy", "messages": [], "tools": tools, "tool_choice": "required"}
    return forced_call(decode_chat(json.dumps(body).encode()), CallForm("hermes")).structural_tag


async def test_an_answer_is_held_to_a_call() -> None:
    async with scene(encode=lambda text: [*text.encode(), 2]) as found:
        for names in (("f",), ("f", "g")):
            chunks = await found.read(structural_tag=forced_call_of(*names), max_tokens=500)
            ids = [token for chunk in chunks for token in chunk.token_ids]
            called = f'{{"name": "{names[-1]}", "arguments": {{}}}}'
            assert bytes(ids[:-1]).decode() == f"<tool_call>\n{called}\n</tool_call>"
            assert (ids[-1], chunks[-1].finish_reason) == (2, "stop")
    assert found.posts[0][1]["sampling_params"]["structural_tag"] == forced_call_of("f")


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"structural_tag": "{"}, "Failed to compile"),
        ({"structural_tag": '{"type": "structural_tag"}'}, "missing required field `format`"),
        ({"structural_tag": '{"structures": [], "triggers": []}'}, "Failed to compile"),
        ({"structural_tag": forced_call_of("f"), "regex": "a"}, "Only one of"),
    ],
)
async def test_a_grammar_that_does_not_compile_is_a_refusal(sampling: dict[str, Any], told: str) -> None:
    async with scene() as found:
        with pytest.raises(RequestRefused, match=told):
            await found.read(**sampling)


@pytest.mark.slow
async def test_a_load_from_disk_keeps_the_pause_until_it_is_checked(tmp_path: Path) -> None:
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    async with scene() as found:
        assert await found.adapter.load(snapshot.path, 3, snapshot.digest) > 0
        assert found.paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        pause, update = (body for _, body in found.posts[:2])
        assert pause == {"mode": "abort"}
        wanted = {"weight_version": "3", "keep_pause": True, "flush_cache": True, "abort_all_requests": False}
        assert update == {"model_path": str(snapshot.path), **wanted}
        chunks = await found.read()
    assert [i for c in chunks for i in c.token_ids] == said(read_directory(snapshot.path), PROMPT, 4)[0]


@pytest.mark.slow
async def test_several_data_parallel_ranks_load_from_disk_though_the_loader_is_there(tmp_path: Path) -> None:
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    async with scene(dp_size=2, loaders=(LOADER,)) as found:
        await found.adapter.load(snapshot.path, 3, snapshot.digest)
        assert "/update_weights_from_disk" in found.paths


@pytest.mark.slow
async def test_a_session_that_a_failed_load_left_open_is_ended_first(tmp_path: Path) -> None:
    good, torn = seal(tmp_path / "a", 3, tiny_model(seed=3)), tear(seal(tmp_path / "b", 4, tiny_model(seed=4)))
    async with scene(loaders=(LOADER,), tp_size=2) as found:
        with pytest.raises(EngineFailed, match=f"did not load version 4: .*{torn.path}"):
            await found.adapter.load(torn.path, 4, torn.digest)
        tried = ["/begin_weight_update", "/update_weights_from_tensor", "/get_weights_by_name"]
        assert found.paths == ["/pause_generation", *tried]
        assert (found.engine.died, found.engine.label) == ("", "default"), "it lives, and has no new label"
        assert (found.engine.paused, (await found.adapter.limits()).fenced) == ("abort", True)
        found.posts.clear()
        await found.adapter.load(good.path, 3, good.digest)
        begun = ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
        pushed = ["/update_weights_from_tensor", "/get_weights_by_name", "/end_weight_update"]
        assert found.paths == ["/pause_generation", *begun, *pushed, "/update_weight_version", "/continue_generation"]
        assert len(found.posts[4][1]["serialized_named_tensors"]) == 2
        assert (await found.adapter.limits()).fenced is False


@pytest.mark.slow
@pytest.mark.parametrize(
    "said", [None, [], [300.0], [123.0, 125.0], [float(b) for b in b'{"digest": "x", "error": ""}']]
)
async def test_a_load_whose_loader_does_not_report_it_is_no_success(tmp_path: Path, said: list[float] | None) -> None:
    """SGLang takes each return of a loader for a success."""
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    async with scene(loaders=(LOADER,)) as found:
        update = found.engine.update_from_tensor

        async def updates(body: Any) -> None:
            await update(body)
            found.engine.model.get_weights_by_name = lambda *_, **__: said

        found.engine.update_from_tensor = updates  # type: ignore[method-assign]
        with pytest.raises(EngineFailed):
            await found.adapter.load(snapshot.path, 3, snapshot.digest)
        assert "/continue_generation" not in found.paths


@pytest.mark.slow
async def test_a_restart_during_the_load_is_no_success(tmp_path: Path) -> None:
    """The same label may come from a server that was started with it."""
    snapshot = seal(tmp_path, 3, tiny_model(seed=3))
    async with scene() as found:
        take = found.engine._take

        def restarted(*taken: Any, **how: Any) -> None:
            take(*taken, **how)
            found.engine.seed += 1

        found.engine._take = restarted  # type: ignore[method-assign]
        with pytest.raises(EngineFailed, match="was restarted while it loaded version 3"):
            await found.adapter.load(snapshot.path, 3, snapshot.digest)
        assert "/continue_generation" not in found.paths


@pytest.mark.parametrize(
    ("flag", "dtype"), [("bfloat16", "bfloat16"), ("half", "float16"), ("float", "float32"), ("auto", ""), ("", "")]
)
async def test_what_it_computes_in_is_its_flag_unless_that_is_auto(flag: str, dtype: str) -> None:
    async with scene(dtype=flag) as s:
        assert await s.adapter.dtype() == dtype
