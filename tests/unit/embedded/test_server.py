"""The HTTP dialect over a real engine in this process: generation, aborts, pauses, updates, metrics, refusals."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from safetensors.torch import save_file

from gateway.core.types import Version
from gateway.engines.base import EngineFailed
from gateway.engines.embedded.answers import Answer
from gateway.engines.embedded.batching.sequence import Delta
from gateway.engines.embedded.engine import Engine
from gateway.engines.embedded.server import make_app
from gateway.engines.embedded.service import EngineService
from gateway.engines.embedded.text import Text
from gateway.engines.vllm import VllmEngine
from gateway.fleet.probe import probe
from protos.telemetry.context import TraceContext
from protos.telemetry.spans import Span, Tracer
from tests.support.adapters import lent
from tests.support.tiny_model import tiny_model, tiny_snapshot, weights, write_tiny_model
from tests.unit.embedded.helpers import config, prompts
from tests.unit.embedded.test_weights import broken

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0
PROMPT = prompts(20)[0]


class Client:
    """One serving engine and a client of it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, service: EngineService) -> None:
        self.url, self.session, self.service = url, session, service
        self.go = threading.Event()

    def hold(self, after: int = 4) -> None:
        """From `after` tokens on the engine computes nothing before `go` is set; it takes commands all the while.

        Its thread would be through with a turn of the tiny model before a client on a busy machine does anything.
        """
        loop, step = self.service.loop, self.service.loop._engine.step

        def held() -> list[Delta]:
            return step() if loop.statistics.generation_tokens < after or self.go.wait(0.002) else []

        loop._engine.step = held  # type: ignore[method-assign]

    async def call(self, method: str, path: str, body: object = None, expect: int = 200) -> Any:
        async with self.session.request(method, self.url + path, json=body) as response:
            text = await response.text()
            assert response.status == expect, text
            return json.loads(text) if text and response.content_type == "application/json" else text

    async def complete(self, expect: int = 200, **body: Any) -> Any:
        body = {"model": "policy", "prompt": PROMPT, "temperature": 0.0, "return_token_ids": True, **body}
        return await self.call("POST", "/v1/completions", body, expect)

    async def stream(self, **body: Any) -> list[Any]:
        """The events of a stream; [DONE] as a string."""
        body = {"prompt": PROMPT, "temperature": 0.0, "return_token_ids": True, "stream": True, **body}
        events: list[Any] = []
        async with self.session.post(self.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: "):
                    data = line[6:].strip().decode()
                    events.append(data if data == "[DONE]" else json.loads(data))
        return events

    async def metric(self, name: str) -> float:
        text = await self.call("GET", "/metrics")
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{")]
        assert len(values) == 1, f"{name}: {values}"
        return values[0]

    async def reload(self, path: Path, label: str) -> None:
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        await self.call("POST", "/start_weight_update")
        await self.call("POST", "/update_weights", {"update_info": {"path": str(path), "version": 2, "digest": "d"}})
        await self.call("POST", "/finish_weight_update", {"weight_version": label})


@asynccontextmanager
async def serving(tracer: Tracer | None = None, **overrides: Any) -> AsyncIterator[Client]:
    cfg = config(**overrides)
    service = EngineService(Engine(cfg))
    service.loop.start()
    runner = web.AppRunner(make_app(service, Text(cfg.model), tracer), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
            yield Client(f"http://127.0.0.1:{runner.addresses[0][1]}", session, service)
    finally:
        service.loop.abort(None)
        await runner.cleanup()
        service.loop.stop()


@pytest.fixture
async def shared() -> AsyncIterator[Client]:
    async with serving() as client:
        yield client


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Polls until it holds."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.005)


async def test_completion_and_its_stream_say_the_same() -> None:
    async with serving() as client:
        options = {"max_tokens": 12, "logprobs": 0, "return_weight_versions": True}
        whole = (await client.complete(**options))["choices"][0]
        *chunks, usage, done = await client.stream(**options, stream_options={"include_usage": True})
        choices = [chunk["choices"][0] for chunk in chunks]
        assert done == "[DONE]"
        assert [id for c in choices for id in c["token_ids"]] == whole["token_ids"]
        assert "".join(c["text"] for c in choices) == whole["text"]
        logprobs = [value for c in choices for value in c["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(whole["logprobs"]["token_logprobs"])
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert choices[0]["prompt_token_ids"] == PROMPT
        assert choices[1]["prompt_token_ids"] is None
        assert choices[-1]["weight_versions"] == [{"version": "1", "start": 0, "end": 12}]
        assert "weight_versions" not in choices[0]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 12


async def test_a_request_is_a_span_below_its_callers_or_below_none() -> None:
    spans: list[Span] = []
    above = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)
    async with serving(Tracer(spans.append, 1.0)) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        for traceparent in (above.traceparent, "00-malformed-01"):
            headers = {"traceparent": traceparent}
            async with client.session.post(f"{client.url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
        await client.complete(expect=400, prompt="x", max_tokens=0)
    called, own = spans
    assert (called.context.trace_id, called.parent) == (above.trace_id, above)
    assert own.context.trace_id != above.trace_id
    found = called.attributes
    assert (found["laminar.outcome"], found["laminar.prompt_tokens"], found["laminar.sampled_tokens"]) == (
        "length",
        3,
        4,
    )
    first_token_s = found["laminar.first_token_s"]
    assert isinstance(first_token_s, float)
    assert first_token_s > 0


async def test_an_engine_with_nan_in_its_weights_gives_itself_away_to_the_gateways_probe(tmp_path: Path) -> None:
    """A logprob that is NaN travels as null."""
    tensors = weights("qwen2", "float32", 7)
    tensors["model.norm.weight"][:] = math.nan
    directory = write_tiny_model(tmp_path / "m", "qwen2", "float32", 7)
    save_file(tensors, directory / "model.safetensors")
    async with serving(model=directory) as client:
        adapter = VllmEngine(client.url, lent())
        with pytest.raises(EngineFailed, match=r"version 8 computes NaN.*weights hold NaN"):
            await probe(adapter, "i", Version(8))
        await adapter.close()


async def test_stream_interval_gathers_tokens() -> None:
    async with serving() as client:
        *chunks, _ = await client.stream(max_tokens=42, stream_interval=20, ignore_eos=True)
        sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
        assert sum(sizes) == 42
        assert sizes[0] < 20, "the first token does not wait for company"
        assert all(size >= 20 for size in sizes[1:-1])


async def test_logprobs_of_the_likeliest_and_text_offsets() -> None:
    async with serving() as client:
        logprobs = (await client.complete(max_tokens=3, logprobs=2))["choices"][0]["logprobs"]
        assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
        for token, value, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
            assert top[token] == pytest.approx(value)
        assert logprobs["text_offset"][0] == 0


async def test_tokens_are_named_by_id_on_request() -> None:
    async with serving() as client:
        choice = (await client.complete(max_tokens=3, logprobs=2, return_tokens_as_token_ids=True))["choices"][0]
        names = [f"token_id:{id}" for id in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))


async def test_text_prompt_and_default_max_tokens() -> None:
    async with serving() as client:
        answer = await client.call("POST", "/v1/completions", {"prompt": "What is the sum?", "temperature": 0})
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["model"] == "policy"


async def test_same_seed_same_turn_also_when_resumed() -> None:
    async with serving(dtype="bfloat16", batch_invariant=True) as client:
        options = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "ignore_eos": True}
        whole = (await client.complete(max_tokens=20, **options))["choices"][0]["token_ids"]
        rest = await client.complete(prompt=PROMPT + whole[:9], max_tokens=11, **options)
        assert whole[:9] + rest["choices"][0]["token_ids"] == whole


async def test_a_client_that_leaves_frees_its_kv() -> None:
    async with serving() as client:
        client.hold()
        body = {"prompt": PROMPT, "max_tokens": 230, "stream": True, "ignore_eos": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            assert await client.metric("vllm:kv_cache_usage_perc") > 0
            response.close()

        async def empty() -> bool:
            return await client.metric("vllm:kv_cache_usage_perc") == 0 and client.service.num_open == 0

        await until(empty)
        assert await client.metric("vllm:num_requests_running") == 0
        assert await client.metric("vllm:generation_tokens_total") < 230


async def test_a_client_that_leaves_just_before_an_event_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connections: list[asyncio.Transport] = []
    prepare, take = web.StreamResponse.prepare, Answer.take

    async def noting(self: web.StreamResponse, request: web.BaseRequest) -> object:
        connections.append(request.transport)  # type: ignore[arg-type]
        return await prepare(self, request)

    def left(self: Answer) -> dict[str, Any]:
        connections[0].abort()
        return take(self)

    monkeypatch.setattr(web.StreamResponse, "prepare", noting)
    monkeypatch.setattr(Answer, "take", left)
    async with serving() as client:
        with pytest.raises(aiohttp.ClientError):
            await client.stream(max_tokens=8)

        async def over() -> bool:
            return client.service.num_open == 0

        await until(over)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def start_long(client: Client, **body: Any) -> asyncio.Task[Any]:
    """A turn that is held in its middle."""
    client.hold()
    task = asyncio.create_task(
        client.complete(max_tokens=200, ignore_eos=True, return_weight_versions=True, logprobs=0, **body)
    )

    async def running() -> bool:
        return client.service.loop.statistics.generation_tokens > 0

    await until(running)
    return task


async def test_abort_requests_returns_what_was_generated() -> None:
    async with serving() as client:
        task = await start_long(client, request_id="mine")
        assert await client.call("POST", "/abort_requests", {"request_ids": ["other"]}) == {
            "status": "aborted",
            "aborted": 0,
        }
        assert (await client.call("POST", "/abort_requests", {"request_ids": ["mine"]}))["aborted"] == 1
        choice = (await task)["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) < 200
        assert choice["weight_versions"][0]["end"] == len(choice["token_ids"])


async def test_pause_abort_cuts_and_refuses_until_resume() -> None:
    async with serving() as client:
        task = await start_long(client)
        assert await client.call("POST", "/pause?mode=abort") == {"status": "paused"}
        assert (await task)["choices"][0]["finish_reason"] == "abort"
        assert await client.call("GET", "/is_paused") == {"is_paused": True}
        refused = await client.complete(expect=503)
        assert refused["error"]["code"] == "engine_paused"
        assert await client.call("GET", "/health") == ""
        client.go.set()
        await client.call("POST", "/resume")
        assert (await client.complete(max_tokens=1))["choices"][0]["finish_reason"] == "length"


async def test_pause_wait_drains_first() -> None:
    async with serving() as client:
        task = await start_long(client)
        pausing = asyncio.create_task(client.call("POST", "/pause?mode=wait"))

        async def draining() -> bool:
            return bool((await client.call("GET", "/is_paused"))["is_paused"])

        await until(draining)
        assert not pausing.done()
        client.go.set()
        assert (await task)["choices"][0]["finish_reason"] == "length"
        assert await pausing == {"status": "paused"}
        await client.complete(expect=503)


@pytest.mark.slow
@pytest.mark.parametrize("clear", ["true", "false"])
async def test_pause_keep_across_an_update_gives_two_spans(clear: str) -> None:
    async with serving() as client:
        task = await start_long(client)
        await client.call("POST", f"/pause?mode=keep&clear_cache={clear}")
        client.go.set()
        queued = asyncio.create_task(client.complete(max_tokens=2, return_weight_versions=True))
        generated = client.service.loop.statistics.generation_tokens
        await client.reload(tiny_snapshot(seed=7), "2")
        assert client.service.loop.statistics.generation_tokens == generated, "nothing is generated while paused"
        await client.call("POST", "/resume")
        choice = (await task)["choices"][0]
        assert choice["finish_reason"] == "length"
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"]) == ("1", "2")
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], 200)
        assert (await queued)["choices"][0]["weight_versions"] == [{"version": "2", "start": 0, "end": 2}]


async def test_an_update_changes_weights_label_and_nothing_else() -> None:
    async with serving() as client, serving(model=tiny_model(seed=0)) as other:
        before = (await client.complete(max_tokens=8))["choices"][0]["token_ids"]
        await client.reload(tiny_snapshot(seed=7), "2")
        assert await client.call("GET", "/weight_info") == {"weight_version": "2"}
        after = (await client.complete(max_tokens=8))["choices"][0]["token_ids"]
        await other.call(
            "POST",
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(tiny_snapshot(seed=7))}},
        )
        assert await other.call("GET", "/weight_info") == {"weight_version": "1"}, "a bare reload sets no label"
        assert (await other.complete(max_tokens=8))["choices"][0]["token_ids"] == after != before


async def test_a_refused_snapshot_leaves_weights_alone_but_fenced(tmp_path: Path) -> None:
    broken(tmp_path, "shape")
    async with serving() as client:
        before = await client.complete(max_tokens=8)
        await client.call("POST", "/init_weight_transfer_engine", {})
        await client.call("POST", "/start_weight_update")
        error = await client.call("POST", "/update_weights", {"update_info": {"path": str(tmp_path)}}, expect=400)
        assert "has shape [319, 64]" in error["error"]["message"]
        await client.complete(expect=503)
        assert (
            "false label"
            in (await client.call("POST", "/finish_weight_update", {"weight_version": "2"}, 409))["error"]["message"]
        )
        await client.call("POST", "/finish_weight_update", {"weight_version": "1"})
        assert (await client.complete(max_tokens=8))["choices"] == before["choices"]


async def test_a_load_that_fails_halfway_stays_fenced_until_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as client:
        model = client.service.loop._engine._model
        load_layer = model._load_layer

        def fail_late(at: str, *rest: Any) -> Any:
            if at == "model.layers.2":
                raise OSError("the disk went away")
            return load_layer(at, *rest)

        await client.call("POST", "/init_weight_transfer_engine", {})
        await client.call("POST", "/start_weight_update")
        update = {"update_info": {"path": str(tiny_snapshot(seed=7))}}
        with monkeypatch.context() as patch:
            patch.setattr(model, "_load_layer", fail_late)
            error = await client.call("POST", "/update_weights", update, expect=500)
        assert "the disk went away" in error["error"]["message"]
        await client.call("POST", "/finish_weight_update", {"weight_version": "2"}, expect=409)
        await client.call("POST", "/resume", expect=409)
        await client.complete(expect=503)
        assert await client.call("GET", "/health") == ""
        assert await client.call("GET", "/weight_info") == {"weight_version": "1"}
        await client.call("POST", "/update_weights", update)
        await client.call("POST", "/finish_weight_update", {"weight_version": "2"})
        assert (await client.complete(max_tokens=2))["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
async def test_a_running_request_waits_out_an_update_without_a_pause() -> None:
    async with serving() as client:
        task = await start_long(client)
        await client.call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        await client.call("POST", "/start_weight_update")
        client.go.set()
        await client.reload(tiny_snapshot(seed=7), "2")
        versions = [span["version"] for span in (await task)["choices"][0]["weight_versions"]]
        assert versions == ["1", "2"]


async def test_label_only_and_small_routes() -> None:
    async with serving() as client:
        assert await client.call("POST", "/update_weight_version", {"new_version": "9"}) == {
            "success": True,
            "new_version": "9",
        }
        assert (await client.call("GET", "/weight_info"))["weight_version"] == "9"
        text = Text(tiny_model())
        told = await client.call(
            "POST", "/tokenize", {"model": "policy", "prompt": "a text", "add_special_tokens": False}
        )
        assert told["tokens"] == text.encode("a text", False)
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), config().max_model_len)
        await client.call("POST", "/tokenize", {"model": "another", "prompt": "a text"}, 400)
        [card] = (await client.call("GET", "/v1/models"))["data"]
        assert (card["id"], card["max_model_len"]) == ("policy", 256)
        assert await client.call("GET", "/get_world_size") == {"world_size": 1}
        assert await client.call("GET", "/load") == {"server_load": 0}
        assert "laminar" in (await client.call("GET", "/version"))["version"]
        await client.complete(max_tokens=2)
        assert await client.call("POST", "/reset_prefix_cache") == {"success": True}
        assert client.service.loop.statistics.num_blocks_used == 0


async def test_metrics_have_vllms_names() -> None:
    async with serving() as client:
        await client.complete(max_tokens=4)
        await client.complete(max_tokens=4)
        assert await client.metric("vllm:generation_tokens_total") == 8
        assert await client.metric("vllm:prompt_tokens_total") == 40
        assert await client.metric("vllm:prefix_cache_hits_total") == 16
        assert await client.metric("vllm:prefix_cache_queries_total") == 40
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
            assert await client.metric(f"vllm:{name}") == 0
        text = await client.call("GET", "/metrics")
        assert 'block_size="16"' in text
        assert 'num_gpu_blocks="64"' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="policy"} 2.0' in text
        assert await client.metric("vllm:time_to_first_token_seconds_count") == 2
        assert "process_start_time_seconds" in text


async def test_the_queue_is_bounded() -> None:
    async with serving(max_waiting=2, max_num_seqs=1) as client:
        client.hold()
        long = [asyncio.create_task(client.complete(max_tokens=200, ignore_eos=True)) for _ in range(3)]

        async def full() -> bool:
            return client.service.num_open == 3

        await until(full)
        refused = await client.complete(expect=429)
        assert "--max-waiting" in refused["error"]["message"]
        await client.call("POST", "/abort_requests", {})
        client.go.set()
        assert {(await task)["choices"][0]["finish_reason"] for task in long} == {"abort"}
        await client.complete(max_tokens=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_model_loop_fails_requests_and_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as client:

        def explode(*_: Any, **__: Any) -> Any:
            raise AssertionError("a bug in the model")

        monkeypatch.setattr(client.service.loop._engine._model, "forward", explode)
        error = await client.complete(expect=503)
        assert "the engine died" in error["error"]["message"]
        await client.call("GET", "/health", expect=503)
        await client.complete(expect=503)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "gpt"}, 404, "model 'gpt' is not served here (this engine serves 'policy')"),
        ({"max_token": 3}, 400, "unknown field `max_token`"),
        ({"max_tokens": "3"}, 400, "Expected `int | null`, got `str` - at `$.max_tokens`"),
        ({"max_tokens": 0}, 400, "max_tokens is 0 (at least 1)"),
        ({"max_tokens": 250}, 400, "20 tokens and max_tokens is 250: 270 in all"),
        ({"prompt": [5] * 300}, 400, "maximum context length here is 256"),
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": [1, 512]}, 400, "prompt holds token id 512 (ids of this model are 0 to 511)"),
        ({"prompt": [[1], [2]]}, 400, "prompt holds 2 prompts"),
        ({"prompt": [1, [2]]}, 400, "prompt mixes token ids and lists"),
        ({"temperature": -1}, 400, "temperature is -1"),
        ({"top_p": 0}, 400, "top_p is 0"),
        ({"top_k": -2}, 400, "top_k is -2"),
        ({"logprobs": 99}, 400, "logprobs is 99 (0 to 20)"),
        ({"min_tokens": 20}, 400, "min_tokens is 20 (0 to max_tokens)"),
        ({"n": 2}, 400, "n=2 is not supported"),
        ({"stop": ["x"]}, 400, "match stop strings in the gateway"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty is 2.5 (-2 to 2)"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty is 0"),
        ({"min_p": 1.5}, 400, "min_p is 1.5 (0 (off) to 1)"),
        ({"logit_bias": {"600": 1}}, 400, "logit_bias holds token id 600"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias holds 'x': 1"),
        ({"structured_outputs": {"json": "{}"}}, 400, "structured_outputs={'json': '{}'} is not supported"),
        ({"stop_token_ids": [9999]}, 400, "stop_token_ids holds token id 9999"),
        ({"stream_interval": 0}, 400, "stream_interval is 0"),
        ({"cache_salt": ""}, 400, "cache_salt is empty or too long"),
    ],
)
async def test_bad_completions_are_refused_by_name(
    shared: Client, body: dict[str, Any], status: int, message: str
) -> None:
    error = await shared.complete(expect=status, **body)
    assert message in error["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/pause?mode=never", None, 400, "pause mode 'never' is unknown (abort, wait or keep)"),
        ("/pause?clear_cache=perhaps", None, 400, "clear_cache='perhaps' is not a boolean"),
        ("/start_weight_update", None, 409, "POST /init_weight_transfer_engine first"),
        ("/update_weights", {"update_info": {"path": "/x"}}, 409, "POST /start_weight_update first"),
        ("/update_weights", {"update_info": {}}, 400, "missing required field `path`"),
        ("/finish_weight_update", {"weight_version": "2"}, 409, "no weight update is active"),
        ("/collective_rpc", {"method": "exec", "kwargs": {"weights_path": "x"}}, 400, "Invalid enum value 'exec'"),
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}},
            404,
            "/nowhere is not a directory",
        ),
        ("/v1/chat/completions", {}, 404, "routes: /abort_requests"),
    ],
)
async def test_bad_control_calls_are_refused(
    shared: Client, path: str, body: object, status: int, message: str
) -> None:
    error = await shared.call("POST", path, body, expect=status)
    assert message in error["error"]["message"]


async def test_a_body_that_is_not_json_is_refused(shared: Client) -> None:
    async with shared.session.post(shared.url + "/v1/completions", data=b"{nope") as response:
        assert response.status == 400
        assert "the body is not JSON" in (await response.json())["error"]["message"]


async def test_a_request_id_in_use_is_refused(shared: Client) -> None:
    task = await start_long(shared, request_id="one")
    error = await shared.complete(request_id="one", expect=409)
    assert "'one' is in use" in error["error"]["message"]
    await shared.call("POST", "/abort_requests", {})
    await task
