"""What a model or a client sends that nobody expects: answered in the API's own shape, and never a broken stream."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gateway.tokens import Codec
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
EOS = 2


@pytest.fixture
def codec() -> Codec:
    return codecs.qwen25()


def say(codec: Codec, text: str) -> ScriptedTurns:
    return ScriptedTurns(lambda request: Script([*codec.encode(text), EOS]), context_tokens=1 << 20)


async def post(url: str, body: Any, **headers: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize("inner", ["[" * 2100, "1" * 4400, '{"name": "f", "arguments": {"a": NaN}}', '{"name": 1e999}'])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_call_after_all_is_text(codec: Codec, inner: str, stream: bool) -> None:
    said = f"<tool_call>{inner}</tool_call>"
    async with serving(say(codec, said), codec) as url:
        status, text = await post(url, {**CHAT, "tools": TOOLS, "stream": stream})
    assert status == 200, text
    if stream:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        shown = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
        assert text.rstrip().endswith("data: [DONE]")
    else:
        shown = json.loads(text)["choices"][0]["message"]["content"]
    assert shown == said


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_no_json_reader_takes_are_refused_nowhere(codec: Codec, stream: bool) -> None:
    """As a client may send them back: deep, endless or not a number."""
    for arguments in ("[" * 2100, "1" * 4400, '{"a": NaN}'):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "y"}]
        async with serving(say(codec, "yes"), codec) as url:
            status, text = await post(url, {**CHAT, "messages": messages, "stream": stream})
        assert status == 200, text


ODD = {
    "an integer beyond 64 bits": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}]},
        "tools[0].function.parameters.maximum",
    ),
    "in a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": -(2**64)}}}},
        "response_format.json_schema.schema.maximum",
    ),
    "in metadata": ({"metadata": {"a": [1, 2**64]}}, "metadata.a[1]"),
    "a stop token": ({"stop_token_ids": [2**70]}, "stop_token_ids[0]"),
    "a stop token beyond": ({"stop_token_ids": [2**20]}, "stop_token_ids"),
    "a stop token below": ({"stop_token_ids": [-1]}, "stop_token_ids"),
}


@pytest.mark.parametrize("case", ODD)
async def test_numbers_that_cannot_be_kept_are_refused_by_path(codec: Codec, case: str) -> None:
    change, param = ODD[case]
    async with serving(say(codec, "yes"), codec) as url:
        status, text = await post(url, {**CHAT, **change})
    assert (status, json.loads(text)["error"]["param"]) == (400, param), text


def nested(depth: int) -> bytes:
    """Chat template arguments, so deep."""
    inner = b'{"a":' * depth + b"1" + b"}" * depth
    return json.dumps(CHAT).encode()[:-1] + b',"chat_template_kwargs":' + inner + b"}"


@pytest.mark.parametrize("depth", [100, 400, 2000, 100_000])
async def test_deep_nesting_is_refused(codec: Codec, depth: int) -> None:
    async with serving(say(codec, "yes"), codec) as url:
        status, text = await post(url, nested(depth))
    assert status == 400, text
    assert "nested" in json.loads(text)["error"]["message"]


async def test_nesting_as_schemas_have_it_is_taken(codec: Codec) -> None:
    async with serving(say(codec, "yes"), codec) as url:
        assert (await post(url, nested(40)))[0] == 200


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(json.dumps(CHAT).encode())[:-30]], ids=["none", "cut"])
async def test_a_body_that_does_not_decompress_is_refused(codec: Codec, data: bytes) -> None:
    async with serving(say(codec, "yes"), codec) as url:
        status, text = await post(url, data, **{"Content-Encoding": "gzip"})
    assert status == 400, text
    assert json.loads(text)["error"]["type"] == "invalid_request_error"


@pytest.fixture
async def failing(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A gateway with a fault of its own."""

    def fault(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    async with serving(say(codec, "yes"), codec) as url:
        monkeypatch.setattr("gateway.api.calls.turn_view.Answer.take", fault)
        yield url


@pytest.mark.parametrize("stream", [False, True])
async def test_what_nobody_foresaw_is_logged_and_told_in_the_apis_shape(
    failing: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        status, text = await post(failing, {**CHAT, "stream": stream})
    error = json.loads(text)["error"]
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal")
    assert "a fault" in caplog.text


async def test_a_fault_within_a_stream_is_its_last_event(
    codec: Codec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("gateway.api.openai.writer.Chunks.last", fault)
    with caplog.at_level(logging.ERROR):
        async with serving(say(codec, "yes"), codec) as url:
            status, text = await post(url, {**CHAT, "stream": True})
    assert status == 200
    last = json.loads([line for line in text.splitlines() if line.startswith("data: ")][-1][6:])
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in text
    assert "a fault" in caplog.text


async def test_what_is_no_http_is_answered_in_the_apis_shape(codec: Codec) -> None:
    async with serving(say(codec, "yes"), codec) as url:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n")
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
