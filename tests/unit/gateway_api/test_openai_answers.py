"""Answers as the official client reads them, streamed and whole; the turn behind them is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from gateway.api.calls import events
from gateway.api.openai.schema import ChatCompletion, Completion
from gateway.core.types import TurnRequest
from gateway.tokens import Codec
from protos.errors import OutOfCapacity, Unavailable
from protos.trajectories import VersionChange
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

EOS = 2
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def says(text: str, **more: Any) -> Callable[[TurnRequest], Script]:
    """Every turn answers with this text and the end-of-sequence token."""
    ids = [*codecs.tiny().encode(text), EOS]
    return lambda request: Script(ids, **more)


@contextlib.asynccontextmanager
async def client_of(
    turns: ScriptedTurns, codec: Codec | None = None, path: str = "/v1"
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(turns, codec or codecs.tiny()) as url,
        openai.AsyncOpenAI(base_url=url + path, api_key="any", max_retries=0) as client,
    ):
        yield client


async def test_a_whole_answer() -> None:
    turns = ScriptedTurns(says("Hello there."))
    async with client_of(turns) as client:
        answer = await client.chat.completions.create(model="policy", messages=HELLO, max_tokens=99)
    [choice] = answer.choices
    assert choice.message.content == "Hello there."
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    prompt = codecs.tiny().render(HELLO)
    completion = len(codecs.tiny().encode("Hello there.")) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), completion)
    assert turns.requests[0].prompt_ids == tuple(prompt)
    assert turns.outcomes == ["stop"]


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_a_streamed_answer_joins_to_the_whole_one(chunk: int) -> None:
    async with client_of(ScriptedTurns(says("Café 😀 ok", chunk=chunk))) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Café 😀 ok"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(c.usage is None for c in chunks[:-1])
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


async def test_usage_is_not_streamed_unless_asked_for() -> None:
    async with client_of(ScriptedTurns(says("x"))) as client:
        stream = await client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        chunks = [c async for c in stream]
    assert [(len(c.choices), c.usage) for c in chunks] == [(1, None)] * len(chunks)


async def test_tool_calls_whole_and_streamed() -> None:
    turns = ScriptedTurns(says(f"Adding.\n{ADD_CALL}\n{ADD_CALL}"))
    async with client_of(turns) as client:
        whole = await client.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS)
        async with client.chat.completions.stream(model="policy", messages=HELLO, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            joined = await stream.get_final_completion()
    for answer in (whole.choices[0], joined.choices[0]):
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "Adding."
        assert answer.message.tool_calls is not None
        assert [(c.function.name, json.loads(c.function.arguments)) for c in answer.message.tool_calls] == [  # type: ignore[union-attr]
            ("add", {"a": 1})
        ] * 2
        assert len({c.id for c in answer.message.tool_calls}) == 2
    assert "tool_calls.function.arguments.done" in kinds


async def test_tool_calls_alone_have_null_content_and_none_means_text() -> None:
    async with client_of(ScriptedTurns(says(ADD_CALL))) as client:
        called = await client.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS)
        text = await client.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS, tool_choice="none")
        plain = await client.chat.completions.create(model="policy", messages=HELLO)
    assert called.choices[0].message.content is None
    for answer in (text, plain):
        assert answer.choices[0].message.content == ADD_CALL
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_one_entry_a_token(stream: bool) -> None:
    ids = [*codecs.tiny().encode("é a"), EOS]
    async with client_of(ScriptedTurns(lambda request: Script(ids))) as client:
        kwargs: dict[str, Any] = {"model": "policy", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
        if stream:
            chunks = [c async for c in await client.chat.completions.create(stream=True, **kwargs)]
            content = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
        else:
            content = (await client.chat.completions.create(**kwargs)).choices[0].logprobs.content
    assert [t.logprob for t in content] == [-0.5 - token / 1024 for token in ids]
    assert b"".join(bytes(t.bytes) for t in content) == "é a<|im_end|>".encode()
    assert all(len(t.top_logprobs) == 2 for t in content)


async def test_ids_and_versions_on_request() -> None:
    ids = [*codecs.tiny().encode("abcd efgh"), EOS]
    extra = {"return_token_ids": True, "return_weight_versions": True}
    script = Script(ids, versions=(7, 8))
    async with client_of(ScriptedTurns(lambda request: script), path="/s/run-1/v1") as client:
        whole = await client.chat.completions.create(model="policy", messages=HELLO, extra_body=extra)
        chunks = [
            c
            async for c in await client.chat.completions.create(
                model="policy", messages=HELLO, stream=True, extra_body=extra
            )
        ]
    half = len(ids) - len(ids) // 2
    spans = [
        {"version": "7", "start": 0, "end": half, "engine": "e0"},
        {"version": "8", "start": half, "end": len(ids), "engine": "e1"},
    ]
    body: Any = whole.model_dump()
    assert body["choices"][0]["token_ids"] == ids
    assert body["prompt_token_ids"] == codecs.tiny().render(HELLO)
    assert body["choices"][0]["weight_versions"] == spans
    assert body["laminar"]["session_id"] == "run-1"
    streamed: list[Any] = [c.model_dump() for c in chunks]
    assert [i for c in streamed for i in c["choices"][0].get("token_ids") or []] == ids
    assert streamed[0]["prompt_token_ids"] == codecs.tiny().render(HELLO)
    assert streamed[-1]["choices"][0]["weight_versions"] == spans
    assert streamed[-1]["laminar"]["segments"][0]["engine"] == "e0"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 100])
async def test_stop_strings_cut_the_text_and_the_record(stream: bool, chunk: int) -> None:
    turns = ScriptedTurns(says("one two END three", chunk=chunk))
    async with client_of(turns) as client:
        kwargs: dict[str, Any] = {"model": "policy", "messages": HELLO, "stop": ["END", "zzz"]}
        if stream:
            chunks = [c async for c in await client.chat.completions.create(stream=True, **kwargs)]
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = await client.chat.completions.create(**kwargs)
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("one two ", "stop")
    [kept] = turns.early
    said = codecs.tiny().encode("one two END three")
    assert codecs.tiny().decode(said[:kept]).startswith("one two END")
    assert "END" not in codecs.tiny().decode(said[: kept - 1])
    assert turns.outcomes == ["stop"]


async def test_a_stop_token_stays_in_the_ids_and_is_not_shown() -> None:
    ids = codecs.tiny().encode("one two")
    extra = {"stop_token_ids": ids[-1:], "return_token_ids": True}
    async with client_of(ScriptedTurns(lambda request: Script(ids, chunk=2))) as client:
        answer: Any = await client.chat.completions.create(model="policy", messages=HELLO, extra_body=extra)
    assert answer.choices[0].message.content == codecs.tiny().decode(ids[:-1])
    assert answer.choices[0].token_ids == ids


async def test_length_is_told() -> None:
    async with client_of(ScriptedTurns(says("one two three four"))) as client:
        short = await client.chat.completions.create(model="policy", messages=HELLO, max_completion_tokens=2)
        usual = await client.completions.create(model="policy", prompt="x")
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 2
    assert usual.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(stream: bool) -> None:
    ids = [*codecs.tiny().encode("the answer"), EOS]
    turns = ScriptedTurns(lambda request: Script(ids, chunk=2))
    async with client_of(turns) as client:
        kwargs: dict[str, Any] = {"model": "policy", "prompt": [9, 8, 7], "logprobs": 1, "max_tokens": 50}
        if stream:
            chunks = [c async for c in await client.completions.create(stream=True, **kwargs)]
            choices = [c.choices[0] for c in chunks]
        else:
            choices = [(await client.completions.create(**kwargs)).choices[0]]
    assert "".join(c.text for c in choices) == "the answer"
    assert choices[-1].finish_reason == "stop"
    assert turns.requests[0].prompt_ids == (9, 8, 7)
    tokens = [t for c in choices if c.logprobs for t in c.logprobs.tokens or []]
    offsets = [o for c in choices if c.logprobs for o in c.logprobs.text_offset or []]
    assert "".join(tokens) == "the answer<|im_end|>"
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


async def test_text_prompts_are_tokenised() -> None:
    turns = ScriptedTurns(says("x"))
    async with client_of(turns) as client:
        await client.completions.create(model="policy", prompt="the answer")
        await client.completions.create(model="policy", prompt=["the answer"])
    assert [list(r.prompt_ids) for r in turns.requests] == [codecs.tiny().encode("the answer")] * 2
    assert turns.requests[0].sampling.max_tokens == 16


EVERYTHING: dict[str, Any] = {"return_token_ids": True, "return_weight_versions": True, "n": 2}


@pytest.mark.parametrize("fields", [{}, EVERYTHING, {**EVERYTHING, "n": 1}], ids=["plain", "two", "one"])
async def test_an_answer_is_all_that_the_schema_says_and_nothing_more(fields: dict[str, Any]) -> None:
    """As JSON to the struct and back: a field that the struct lacks would be lost."""
    codec = codecs.qwen3()
    ids = codec.encode(f"<think>\nHm.\n</think>\n\nAdding.\n{ADD_CALL}")
    turns = ScriptedTurns(lambda request: Script(ids, versions=(7, 8)))
    turns.version_changes = [VersionChange(0, "t", 7, 8, "lost")] if fields else ()
    chat = {"messages": HELLO, "tools": TOOLS} | ({"logprobs": True, "top_logprobs": 2} if fields else {})
    asked: list[tuple[str, dict[str, Any], type[ChatCompletion] | type[Completion]]] = [
        ("chat/completions", chat, ChatCompletion),
        ("completions", {"prompt": "hello", "logprobs": 2 if fields else None}, Completion),
    ]
    async with serving(turns, codec) as url, aiohttp.ClientSession(url) as http:
        for path, body, kind in asked:
            async with http.post(f"/v1/{path}", json={"model": "policy", **body, **fields}) as answer:
                raw = await answer.read()
                assert answer.status == 200, raw
            assert json.loads(msgspec.json.encode(msgspec.json.decode(raw, type=kind))) == json.loads(raw)
            told = raw.decode()
            extras = ("weight_versions", "version_changes", "top_logprobs")
            assert all((f'"{name}"' in told) == bool(fields) for name in extras)
            assert all((f'"{name}"' in told) == ("chat" in path) for name in ("reasoning_content", "tool_calls"))


async def test_models() -> None:
    async with client_of(ScriptedTurns(says("x"))) as client:
        assert [m.id async for m in client.models.list()] == ["policy"]
        model: Any = await client.models.retrieve("policy")
        assert model.max_model_len == 2048
        with pytest.raises(openai.NotFoundError, match="served: 'policy'"):
            await client.models.retrieve("a/b")


async def test_full_queues_are_429_with_retry_after() -> None:
    full = OutOfCapacity("the queue is full", retry_after_s=2.5)
    for stream in (False, True):
        async with client_of(ScriptedTurns(says("x", error=full))) as client:
            with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
                await client.chat.completions.create(model="policy", messages=HELLO, stream=stream)
        assert caught.value.response.headers["Retry-After"] == "3"
        assert caught.value.code == "out_of_capacity"
        assert caught.value.type == "rate_limit_error"


async def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    lost = Unavailable("no engine is left")
    async with client_of(ScriptedTurns(says("one two three", error=lost, fails_after=2))) as client:
        stream = await client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="no engine is left"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="no engine is left"):
            await client.chat.completions.create(model="policy", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_gives_its_turn_up(stream: bool) -> None:
    gate = asyncio.Event()
    turns = ScriptedTurns(says("one two three four five", gate=gate, free=2))
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession() as session:
        body = {"model": "policy", "messages": HELLO, "stream": stream}
        asked = asyncio.create_task(session.post(f"{url}/v1/chat/completions", json=body))
        if stream:
            answer = await asked
            await answer.content.readline()
            answer.close()
        else:
            async with asyncio.timeout(60):
                while not turns.requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            asked.cancel()
            await asyncio.wait([asked])
        async with asyncio.timeout(60):
            while not turns.outcomes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert turns.outcomes == ["aborted"]


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.01)
    gate = asyncio.Event()
    turns = ScriptedTurns(says("late", gate=gate, chunk=9))
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession() as session:
        body = {"model": "policy", "messages": HELLO, "stream": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            for _ in range(3):
                assert (await asyncio.wait_for(answer.content.readline(), 60)).startswith(b": keep-alive")
                assert await answer.content.readline() == b"\n"
            gate.set()
            rest = await answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"content":"late"' in rest


async def test_a_long_answer_without_stream_is_kept_alive_with_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.01)
    gate = asyncio.Event()
    turns = ScriptedTurns(says("late", gate=gate, chunk=9))
    async with serving(turns, codecs.tiny()) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
        asking = client.chat.completions.with_streaming_response.create(model="policy", messages=HELLO, timeout=20)
        async with asking as raw:  # its head came with the first space
            gate.set()
            assert (await raw.text()).startswith(" ")
            assert (await raw.parse()).choices[0].message.content == "late"
            assert raw.headers["content-type"] == "application/json; charset=utf-8"
        gate.clear()
        async with aiohttp.ClientSession() as session:
            body = {"model": "policy", "messages": HELLO}
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert await asyncio.wait_for(answer.content.read(1), 60) == b" "
                gate.set()
                said = (await answer.json(content_type="application/json"))["choices"][0]["message"]["content"]
                assert said == "late"


async def test_an_error_after_a_space_is_a_broken_connection_never_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.01)
    gate = asyncio.Event()
    turns = ScriptedTurns(says("late", gate=gate, error=Unavailable("the turn is lost"), fails_after=1))
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession() as session:
        body = {"model": "policy", "messages": HELLO}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert await asyncio.wait_for(answer.content.read(1), 60) == b" "
            gate.set()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
    assert not turns.delivered
