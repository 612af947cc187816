"""The vLLM adapter against a real server: what it asks, what it reads, and which error each failure becomes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.fleet import refresh
from gateway.core.types import SamplingParams, TopLogprob
from gateway.engines.base import (
    CONTROL_TIMEOUT_S,
    EngineChunk,
    EngineFailed,
    EngineLimits,
    EngineReport,
    RequestRefused,
    StreamCut,
)
from gateway.engines.http import cut_reason, reason_in
from gateway.engines.kinds import connect
from gateway.engines.vllm import Reader, VllmEngine
from tests.support.adapters import lent
from tests.support.fake_relay import relay
from tests.support.gateway_shell import STALL_S, check_whole, read, shell
from tests.support.scripted_engine import (
    LOAD_STEPS,
    MODEL,
    Answer,
    Cut,
    CutKind,
    ScriptedEngine,
    pass_time,
    scripted,
    until,
)

PROMPT = (5, 6, 7)
REASONS: dict[CutKind, str] = {
    "reset": "reset",
    "closed": "reset",
    "death": "reset",
    "eof": "early_end",
    "done": "early_end",
    "abort": "abort",
    "error_event": "server_error",
    "500": "server_error",
    "503": "no_room",
    "hang": "stalled",
    "silent": "stalled",
    "malformed": "protocol",
    "no_logprobs": "protocol",
    "torn_500": "server_error",
    "not_utf8": "protocol",
    "huge_line": "protocol",
}


@asynccontextmanager
async def adapter(engine: ScriptedEngine, **how: Any) -> AsyncIterator[VllmEngine]:
    made = VllmEngine(engine.url + "/", lent(MODEL, **{"stall_timeout_s": STALL_S, **how}))
    try:
        yield made
    finally:
        await made.close()


async def generate(found: VllmEngine, max_tokens: int = 8, **sampling: Any) -> list[EngineChunk]:
    async with found.generate(PROMPT, SamplingParams(max_tokens=max_tokens, **sampling), "r1", "s1") as chunks:
        return [chunk async for chunk in chunks]


# -- generation


async def test_a_stream_is_read_to_its_finish() -> None:
    tops: list[dict[str, float] | None] = [{"token_id:8": -1.0, "token_id:9": -2.0, "as text": -3.0}, None]
    async with ScriptedEngine(split=True, top=tops, version="12") as e0, adapter(e0) as found:
        chunks = await generate(found, top_logprobs=2)
    ids, logprobs = scripted(PROMPT, 8)
    assert [t for c in chunks for t in c.token_ids] == ids
    assert [p for c in chunks for p in c.logprobs] == logprobs
    assert [c.finish_reason for c in chunks] == [None, None, None, "length"]
    assert [c.versions for c in chunks] == [(), (), (), ("12",)]
    assert {c.top_logprobs for c in chunks} == {((TopLogprob(8, -1.0), TopLogprob(9, -2.0)), ())}


async def test_what_is_asked() -> None:
    async with ScriptedEngine() as e0, adapter(e0) as found:
        await generate(found)
        await generate(found, seed=0, top_k=5, min_tokens=2, stop_token_ids=(4,), ignore_eos=True, top_logprobs=3)
    plain, full = (asked.body for asked in e0.requests)
    assert plain == {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **dict.fromkeys(("stream", "return_token_ids", "return_weight_versions"), True),
        **dict.fromkeys(("add_special_tokens", "skip_special_tokens"), False),
        "model": MODEL,
        "prompt": list(PROMPT),
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "logprobs": 0,
        "request_id": "r1",
    }
    async with ScriptedEngine() as e0, adapter(e0) as found:
        sampled = {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": ((5, -1.0),)}
        await generate(found, **sampled, presence_penalty=0.5, frequency_penalty=-1.0, json_schema='{"type":"object"}')
    asked = e0.requests[0].body
    assert (asked["presence_penalty"], asked["frequency_penalty"]) == (0.5, -1.0)
    assert (asked["min_p"], asked["repetition_penalty"], asked["logit_bias"]) == (0.1, 1.2, {"5": -1.0})
    assert asked["structured_outputs"] == {"json": '{"type":"object"}'}
    async with ScriptedEngine() as engine, adapter(engine) as found:
        await generate(found, regex="yes|no")
    assert engine.requests[0].body["structured_outputs"] == {"regex": "yes|no"}
    extra = {"seed": 0, "top_k": 5, "min_tokens": 2, "stop_token_ids": [4], "ignore_eos": True, "logprobs": 3}
    assert full == {**plain, **extra, "return_tokens_as_token_ids": True}


@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
async def test_every_failure_is_a_cut_with_its_reason_and_what_came_before_stands(kind: CutKind, reason: str) -> None:
    before, whole = list[EngineChunk](), kind in ("500", "503", "silent", "torn_500")

    async def taken(_: int) -> None:
        await until(lambda: whole or len(before) == 2, "two chunks")

    async def take(found: VllmEngine) -> None:
        async with found.generate(PROMPT, SamplingParams(max_tokens=8), "r1", "s1") as chunks:
            async for chunk in chunks:
                before.append(chunk)

    async with ScriptedEngine(cuts=deque([Cut(kind, 4)]), before_cut=taken) as e0, adapter(e0) as found:
        taking = asyncio.create_task(take(found))
        if reason == "stalled":
            await until(lambda: e0.requests, "the request")
            await taken(4)
            pass_time(STALL_S)
        with pytest.raises(StreamCut, match=e0.url) as cut:
            await taking
        assert cut.value.reason == reason
        assert [t for c in before for t in c.token_ids] == scripted(PROMPT, 0 if whole else 4)[0]
        if kind != "death":
            assert len(await generate(found)) == 4  # the adapter is none the worse


async def test_nobody_listening_is_refused() -> None:
    async with ScriptedEngine() as e0, adapter(e0) as found:
        await e0.die()
        with pytest.raises(StreamCut, match="does not accept connections") as cut:
            await generate(found)
    assert cut.value.reason == "refused"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"error": {"message": "`n` is 3", "code": 400}}', "`n` is 3"),
        ('{"object": "error", "message": "too long"}', "too long"),
        ('{"detail": "no"}', '{"detail": "no"}'),
        ("<html>\n  <p>Bad gateway", "<html> <p>Bad gateway"),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_what_a_server_says_is_told_without_its_wrapping(body: str, reason: str) -> None:
    assert reason_in(body) == reason


@pytest.mark.parametrize(
    ("status", "reason"),
    [(s, None) for s in (400, 405, 409, 413, 415, 422, 499)]
    + [(s, "no_room") for s in (408, 429, 503)]
    + [(s, "server_error") for s in (302, 401, 403, 404, 500, 501, 502, 504)],
)
def test_whom_a_status_blames(status: int, reason: str | None) -> None:
    """Its client (None), nobody while the engine has no room, or the engine: its fault, or how it was set up."""
    assert cut_reason(status) == reason


async def test_a_4xx_is_the_requests_fault() -> None:
    async with ScriptedEngine(cuts=deque([Cut("400")])) as e0, adapter(e0) as found:
        with pytest.raises(RequestRefused, match=r"127\.0\.0\.1:\d+ refused the request: .*scripted to answer 400"):
            await generate(found)


async def test_a_refusal_that_comes_as_an_event_is_the_requests_fault_too() -> None:
    def event(code: int) -> bytes:
        return b'data: {"error": {"message": "Token id 1048576 is out of vocabulary", "code": %d}}' % code

    with pytest.raises(RequestRefused, match="out of vocabulary"):
        Reader("http://e0", top=False).chunk(event(400)[6:])
    for code, reason in ((408, "no_room"), (404, "server_error"), (500, "server_error")):
        with pytest.raises(StreamCut, match="out of vocabulary") as cut:
            Reader("http://e0", top=False).chunk(event(code)[6:])
        assert cut.value.reason == reason


async def test_leaving_a_stream_early_aborts_it_upstream() -> None:
    async with ScriptedEngine(hold_at=4) as e0, adapter(e0) as found:
        async with found.generate(PROMPT, SamplingParams(max_tokens=8), "r1", "s1") as chunks:
            assert (await anext(aiter(chunks))).token_ids == tuple(scripted(PROMPT, 2)[0])
        await until(lambda: e0.requests[0].left, "the abort")


async def test_tokens_come_as_they_are_said() -> None:
    sampling = SamplingParams(max_tokens=8)
    async with (
        ScriptedEngine(hold_at=2) as e0,
        adapter(e0) as found,
        found.generate(PROMPT, sampling, "r1", "s1") as chunks,
    ):
        reading = aiter(chunks)
        got = [await anext(reading)]
        e0.go.set()
        got += [chunk async for chunk in reading]
    assert [t for c in got for t in c.token_ids] == scripted(PROMPT, 8)[0]


# -- looking


async def test_what_a_report_reads() -> None:
    metrics = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
vllm:num_requests_waiting{engine="0",model_name="a b"} 2
vllm:num_requests_waiting{engine="1",model_name="a b"} 3.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 100
vllm:kv_cache_usage_perc 2.5e-01
"""
    async with ScriptedEngine(extra_metrics=metrics, started_unix_s=17.25) as e0, adapter(e0) as found:
        assert await found.report() == EngineReport(incarnation="17.25", kv_usage=0.25, running=0, waiting=5)
        e0.answers["/metrics"] = ""
        assert await found.report() == EngineReport("unknown", 0.0, 0, 0)


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (None, 16_000),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1', 0),
        ('vllm:cache_config_info{a="x,y=z",num_gpu_blocks="3",cache_dtype="auto",block_size="32"} 1.0', 96),
        ("vllm:other 1", 0),
    ],
)
async def test_what_limits_read(metrics: str | None, tokens: int) -> None:
    async with ScriptedEngine(version="41") as e0, adapter(e0) as found:
        if metrics is not None:
            e0.answers["/metrics"] = metrics
        assert await found.limits() == EngineLimits(4096, tokens, "41")


CONFIGURATION = "model='m', kv_cache_dtype=fp8, dtype=torch.bfloat16, max_seq_len=64, pad_dtype=int8"


@pytest.mark.parametrize(
    ("answers", "dtype"),
    [
        ({"/v1/models": '{"data": [{"id": "policy", "dtype": "float32"}]}'}, "float32"),
        ({"/server_info": f'{{"vllm_config": "{CONFIGURATION}"}}'}, "bfloat16"),
        ({"/server_info": '{"vllm_config": "kv_cache_dtype=fp8"}'}, ""),
        ({"/server_info": "{}"}, ""),
    ],
)
async def test_what_it_computes_in_is_told_with_its_model_or_in_its_configuration(
    answers: dict[str, Answer], dtype: str
) -> None:
    async with ScriptedEngine(answers=answers) as e0, adapter(e0) as found:
        assert await found.dtype() == dtype


@pytest.mark.parametrize(
    "answers",
    [
        {"/server_info": 404},
        {"/server_info": '{"vllm_config": {"model": "json"}}'},
        {"/server_info": '{"vllm_config": "dtype=' + "x" * 99 + '"}'},
        {"/v1/models": '{"data": [{"id": "policy", "dtype": "not a\\u0000 name"}]}'},
    ],
)
async def test_no_word_of_it_and_what_is_no_dtype_are_failures_of_the_look(answers: dict[str, Answer]) -> None:
    async with ScriptedEngine(answers=answers) as e0:
        found = connect("vllm", e0.url, lent(MODEL))
        with pytest.raises(EngineFailed):
            await found.dtype()
        await found.close()


async def test_another_model_is_named() -> None:
    async with ScriptedEngine() as e0, adapter(e0) as found:
        e0.answers["/v1/models"] = '{"data": [{"id": "critic"}]}'
        with pytest.raises(EngineFailed, match=r"serves \['critic'\], not 'policy'") as error:
            await found.limits()
        assert "--served-model-name" in error.value.hint


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/weight_info"])
@pytest.mark.parametrize("failure", [500, 404, "reset", "hang", "away"])
async def test_an_engine_that_cannot_be_looked_at_failed(path: str, failure: Any) -> None:
    asked = asyncio.Event()

    def answer(asked_path: str, _: object) -> Any:
        if asked_path != path:
            return None
        asked.set()
        return failure

    async with ScriptedEngine(answer=None if failure == "away" else answer) as e0, adapter(e0) as found:
        if failure == "away":
            await e0.die()
        looking = asyncio.create_task(found.limits())
        if failure == "hang":
            await asyncio.wait_for(asked.wait(), 60)
            pass_time(CONTROL_TIMEOUT_S)
        with pytest.raises(EngineFailed, match=f"GET {e0.url}") as error:
            await looking
        assert failure == "away" or path in error.value.message


NONSENSE = [("/metrics", "<html>\nnot an engine\n</html>"), ("/v1/models", "{}"), ("/v1/models", "hello")]


@pytest.mark.parametrize(("path", "answer"), [*NONSENSE, ("/weight_info", "{}")])
async def test_an_answer_that_no_engine_gives_failed(path: str, answer: str) -> None:
    async with ScriptedEngine(answers={path: answer}) as e0, adapter(e0) as found:
        with pytest.raises(EngineFailed, match=path):
            await look(found)


@pytest.mark.parametrize(("path", "answer"), NONSENSE)
async def test_one_engine_that_answers_nonsense_harms_no_other(path: str, answer: str, tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1", answers={path: answer})
    async with e0, e1, shell(tmp_path, e0, broken=[e1]) as found:
        await until(lambda: found.fleet.state.sorted_engines()[1].last_error, "notice of the nonsense")
        assert found.status(e1) == "dead"
        run = found.run()
        check_whole(run, await read(run))


# -- loading


async def look(found: VllmEngine) -> None:
    await found.report()
    await found.limits()


INIT = "/init_weight_transfer_engine"
SNAPSHOT = {"path": "/snapshots/3", "version": "3", "digest": "digest-3"}


async def load(found: VllmEngine, version: int = 3) -> float:
    return await found.load(Path("/snapshots/3"), version, "digest-3")


async def test_a_load_proves_fences_loads_checks_and_unfences() -> None:
    async with ScriptedEngine() as e0, adapter(e0) as found:
        assert await load(found) > 0
        assert [path for path, _ in e0.calls] == list(LOAD_STEPS)
        asked = [body["init_info"] for path, body in e0.calls if path == INIT]
        assert asked == [SNAPSHOT, {"expect": "closed"}, {"version": "3", "expect": "loaded"}]
        bodies = dict(e0.calls)
        assert bodies["/update_weights"] == {"update_info": SNAPSHOT}
        assert bodies["/finish_weight_update"] == {"weight_version": "3"}


async def test_an_update_that_was_left_open_is_gone_on_with() -> None:
    def answer(path: str, body: Any) -> Any:
        still_open = path == INIT and body["init_info"].get("expect") == "closed"
        return (500, "rank 0: Conflict: a weight update is open") if still_open else None

    async with ScriptedEngine(answer=answer) as e0, adapter(e0) as found:
        await load(found)
        assert [path for path, _ in e0.calls] == [step for step in LOAD_STEPS if step != "/start_weight_update"]
        assert e0.version == "3"


@pytest.mark.parametrize("failure", [500, "reset"])
@pytest.mark.parametrize("number", range(len(LOAD_STEPS)))
async def test_a_step_that_fails_ends_the_load_before_the_engine_is_unfenced(number: int, failure: Any) -> None:
    def answer(*_: Any) -> Any:
        return failure if len(e0.calls) > number else None

    async with ScriptedEngine(answer=answer) as e0, adapter(e0) as found:
        with pytest.raises(EngineFailed, match=LOAD_STEPS[number]):
            await load(found)
        called = [path for path, _ in e0.calls]
        assert called[: number + 1] == list(LOAD_STEPS[: number + 1])
        assert set(called[number:]) == {LOAD_STEPS[number]}  # aiohttp repeats a GET whose connection broke


async def test_an_engine_that_was_restarted_in_mid_load_is_not_unfenced() -> None:
    def answer(path: str, _: Any) -> None:
        e0.started_unix_s += path == "/update_weights"

    async with ScriptedEngine(answer=answer) as e0, adapter(e0) as found:
        with pytest.raises(EngineFailed, match="was restarted while it loaded version 3"):
            await load(found)
        assert "/resume" not in dict(e0.calls)


async def test_an_engine_without_the_control_routes_is_told_what_it_lacks() -> None:
    async with ScriptedEngine(answers={INIT: 404}) as e0, adapter(e0) as found:
        with pytest.raises(EngineFailed, match="answered 404") as error:
            await load(found)
        assert "VLLM_SERVER_DEV_MODE=1" in error.value.hint
        assert "without /v1" in error.value.hint


async def test_a_label_that_differs_after_the_load_leaves_the_engine_fenced() -> None:
    async with ScriptedEngine(answers={"/weight_info": '{"weight_version": "2"}'}) as e0, adapter(e0) as found:
        with pytest.raises(EngineFailed, match="reports version '2' after loading version 3"):
            await load(found)
        assert "/resume" not in dict(e0.calls)


@pytest.mark.parametrize("step", sorted({*LOAD_STEPS} - {"/weight_info", INIT}))
async def test_an_engine_stays_fenced_until_a_load_succeeds(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "RETRY_S", 0.01)
    async with (
        relay() as (holder, address),
        ScriptedEngine("e0") as e0,
        ScriptedEngine("e1") as e1,
        AsyncExitStack() as s,
    ):
        found = await s.enter_async_context(shell(tmp_path, e0, e1, relay=address))
        e0.answers[step] = 500
        holder.publish(7)
        await until(lambda: found.status(e0) == "fenced", "a fence")
        await until(lambda: (e1.version, found.status(e1)) == ("7", "serving"), "the other's refresh")
        state = found.fleet.state.sorted_engines()[0]
        assert (state.intake_open, step in state.last_error, e0.requests) == (False, True, [])
        runs = [found.run() for _ in range(3)]
        for run in runs:
            check_whole(run, await read(run))
        assert {seg.engine for r in runs for seg in r.segments} == {"e1"}
        assert {v for r in runs for v in r.session.sampled_versions} == {7}
        assert found.fleet.statistics().refresh_failures >= 1
        e0.answers.clear()
        await until(lambda: found.fleet.reconcile() or found.status(e0) == "serving", "another try")  # type: ignore[func-returns-value]
        assert (state.version, e0.version, holder.leases) == (7, "7", [])
        assert found.fleet.statistics().refreshes == 2
        assert state.last_error == ""
        fenced = [e.fields for e in found.timeline.read()[1] if e.fields.get("state") == "fenced"]
        assert step in fenced[0]["reason"], "what went wrong is still to be read"


@pytest.mark.parametrize("step", ["/update_weights", INIT])
async def test_a_version_that_never_loads_leaves_the_engine_on_the_one_before(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "RETRY_S", 0.01)

    def answer(path: str, body: Any) -> Any:
        return 500 if path == step and "8" in str(body) else None

    async with relay() as (holder, address), ScriptedEngine("e0") as e0, AsyncExitStack() as s:
        found = await s.enter_async_context(shell(tmp_path, e0, relay=address))
        holder.publish(7)
        await until(lambda: (e0.version, found.status(e0)) == ("7", "serving"), "version 7")
        [state] = found.fleet.state.sorted_engines()
        e0.answer = answer
        holder.publish(8)
        await until(
            lambda: found.fleet.reconcile() or (state.given_up, found.status(e0)) == (8, "serving"), "the return"
        )  # type: ignore[func-returns-value]
        assert (e0.version, state.version, holder.leases) == ("7", 7, [])
        run = found.run()
        check_whole(run, await read(run))
        assert run.session.sampled_versions == (7,)
        loads = [path for path, _ in e0.calls].count("/update_weights")
        # Refused before the fence, it never had to be loaded again; fenced half-way, it had.
        assert loads == (1 if step == INIT else 4)
