"""Sessions through the API: who is meant, what the next prompt is, and how a history that does not fit is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

EOS = 2
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@contextlib.asynccontextmanager
async def session_client(turns: ScriptedTurns, path: str = "/sessions/s1/v1") -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(turns, codecs.tiny()) as url,
        openai.AsyncOpenAI(base_url=url + path, api_key="any", max_retries=0) as client,
    ):
        yield client


def answering(*texts: str, end: bool = True) -> ScriptedTurns:
    """Each turn answers with the next text; without `end`, as if cut by its length."""
    codec, left = codecs.tiny(), list(texts)

    def script(_: object) -> Script:
        ids = codec.encode(left.pop(0))
        return Script([*ids, EOS]) if end else Script(ids, finish="length")

    return ScriptedTurns(script)


async def test_the_next_prompt_is_the_record_and_the_new_messages() -> None:
    codec = codecs.tiny()
    turns = answering("I think so.", "Yes.", "Bye")
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it?"}]
    async with session_client(turns) as client:
        for question in ("Really?", "Sure?", None):
            raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages)
            assert raw.headers["X-Session-ID"] == "s1"
            assert raw.headers["X-Laminar-History"] == ("first" if len(turns.requests) == 1 else "extended")
            messages.append(raw.parse().choices[0].message)  # the client's own object, as agents send it back
            messages.append({"role": "user", "content": question})
    first, second, third = (request.prompt_ids for request in turns.requests)
    answer = (*codec.encode("I think so."), EOS)
    assert second[: len(first) + len(answer)] == (*first, *answer)
    assert codec.decode(third).startswith(codec.decode(second))
    assert codec.decode(third).endswith("user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    assert [request.turn_index for request in turns.requests] == [0, 1, 2]


async def test_a_tool_loop_extends_the_record() -> None:
    call = '<tool_call>\n{"name": "add",   "arguments": {"a": 1}}\n</tool_call>'  # odd spacing: must be kept
    turns = answering(call, "It is 3.")
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]
    async with session_client(turns) as client:
        said = (await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
        assert said.tool_calls is not None
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}
        messages += [said.model_dump(), result]
        raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages, tools=TOOLS)
    assert raw.headers["X-Laminar-History"] == "extended"
    text = codecs.tiny().decode(turns.requests[1].prompt_ids)
    assert call in text
    assert "<tool_response>\n3\n</tool_response>" in text


async def test_a_cut_turn_is_closed_by_the_template_and_said_so() -> None:
    turns = answering("unfinished", "ok", end=False)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with session_client(turns) as client:
        first = await client.chat.completions.create(model="policy", messages=messages)
        assert first.choices[0].finish_reason == "length"
        messages += [{"role": "assistant", "content": "unfinished"}, {"role": "user", "content": "more"}]
        raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages)
    assert raw.headers["X-Laminar-History"] == "closed"
    assert "unfinished<|im_end|>\n<|im_start|>user\nmore" in codecs.tiny().decode(turns.requests[1].prompt_ids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"messages": [{"role": "user", "content": "other"}]}, "1 messages, the record 2"),
        ({"tools": TOOLS}, "tools"),
        ({"extra_body": {"chat_template_kwargs": {"x": 1}}}, "template arguments"),
    ],
)
async def test_a_history_that_does_not_fit_begins_anew_visibly(change: dict[str, Any], reason: str) -> None:
    turns = answering("yes", "no")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with session_client(turns) as client:
        await client.chat.completions.create(model="policy", messages=messages)
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
        raw = await client.chat.completions.with_raw_response.create(
            **{"model": "policy", "messages": messages, **change}
        )
    assert raw.headers["X-Laminar-History"] == "anew"
    assert reason in raw.headers["X-Laminar-History-Reason"]


async def test_completions_keep_the_records_ids() -> None:
    codec = codecs.tiny()
    turns = answering("one", "two", "three")
    async with session_client(turns) as client:
        await client.completions.create(model="policy", prompt="say")
        before = codec.decode(turns.sessions["s1"].ids)
        raw = await client.completions.with_raw_response.create(model="policy", prompt=before + "and")
        assert raw.headers["X-Laminar-History"] == "extended"
        raw = await client.completions.with_raw_response.create(model="policy", prompt=[1, 5, 6])
        assert raw.headers["X-Laminar-History"] == "anew"
    first = turns.requests[0]
    assert turns.requests[1].prompt_ids == (*first.prompt_ids, *codec.encode("one"), EOS, *codec.encode("and"))


async def test_identity_in_its_order() -> None:
    turns = answering(*["x"] * 20)
    turns.keys["sk-of-b"] = "by-key"
    everything = {"metadata": {"session_id": "by-meta"}, "session_id": "by-field", "user": "by-user"}
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession() as session:

        async def ask(path: str, headers: dict[str, str], body: dict[str, Any]) -> str:
            messages = [{"role": "user", "content": "x"}]
            body = {"model": "policy", "messages": messages, **body}
            async with session.post(f"{url}{path}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                return answer.headers["X-Session-ID"]

        key = {"Authorization": "Bearer sk-of-b"}
        header = {"X-Session-ID": "by-header", "Thread-Id": "by-thread"}
        assert await ask("/sessions/by-url", {**key, **header}, everything) == "by-url"
        assert await ask("/s/short", {}, everything) == "short"
        assert await ask("", {**key, **header}, everything) == "by-key"
        assert await ask("", {"Authorization": "Bearer sk-unknown", **header}, everything) == "by-header"
        assert await ask("", {"thread-id": "by-thread"}, everything) == "by-thread"
        assert await ask("", {}, everything) == "by-meta"
        assert await ask("", {}, {"session_id": "by-field", "user": "u"}) == "by-field"
        assert await ask("", {}, {"user": "by-user"}) == "by-user"
        assert await ask("", {}, {}) == "own-9"
    assert [i.source for i in turns.identities] == ["url", "url", "api_key", "header", "header", *["body"] * 3, "none"]


async def test_a_bad_session_id_is_refused() -> None:
    turns = answering("x")
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession() as session:
        body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "session_id": "x" * 300}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            error = json.loads(await answer.text())["error"]
    assert (answer.status, error["param"]) == (400, "session_id")
    assert turns.identities == []


async def test_an_answer_to_nobodys_session_is_not_recorded() -> None:
    turns = answering("x")
    async with session_client(turns, "/v1") as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    assert [kept.messages for kept in turns.sessions.values()] == [()]
