"""Sessions through the API: who is meant, what the next prompt is, and how a history that does not fit is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from gateway.core.types import TurnRequest
from gateway.ports import SESSION_KEY_PREFIX
from protos.errors import Unavailable
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


async def test_a_stream_names_the_version_of_its_first_tokens_in_a_header() -> None:
    async with (
        session_client(answering("I think so.")) as client,
        client.chat.completions.with_streaming_response.create(
            model="policy", messages=[{"role": "user", "content": "Is it?"}], stream=True
        ) as answer,
    ):
        assert answer.headers["X-Laminar-Weight-Version"] == "7"
        await answer.read()


async def test_the_next_prompt_is_the_record_and_the_new_messages() -> None:
    codec = codecs.tiny()
    turns = answering("I think so.", "Yes.", "Bye")
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it?"}]
    async with session_client(turns) as client:
        for question in ("Really?", "Sure?", None):
            raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages)
            assert raw.headers["X-Session-ID"] == "s1"
            assert raw.headers["X-Laminar-Weight-Version"] == "7"
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
        (
            {"messages": [{"role": "user", "content": "other"}]},
            "message 0 (user) differs from the record in its content",
        ),
        ({"tools": TOOLS}, "tools"),
        ({"extra_body": {"chat_template_kwargs": {"x": 1}}}, "template arguments"),
    ],
)
async def test_a_history_that_does_not_fit_begins_a_branch_visibly(change: dict[str, Any], reason: str) -> None:
    turns = answering("yes", "no")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with session_client(turns) as client:
        await client.chat.completions.create(model="policy", messages=messages)
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
        raw = await client.chat.completions.with_raw_response.create(
            **{"model": "policy", "messages": messages, **change}
        )
    assert raw.headers["X-Laminar-History"] == "branch"
    assert reason in raw.headers["X-Laminar-History-Reason"]


async def test_completions_keep_the_records_ids() -> None:
    codec = codecs.tiny()
    turns = answering("one", "two", "three")
    async with session_client(turns) as client:
        await client.completions.create(model="policy", prompt="say")
        before = codec.decode(turns.sessions["s1"].tree.ids(turns.sessions["s1"].tree.newest))
        raw = await client.completions.with_raw_response.create(model="policy", prompt=before + "and")
        assert raw.headers["X-Laminar-History"] == "extended"
        raw = await client.completions.with_raw_response.create(model="policy", prompt=[1, 5, 6])
        assert raw.headers["X-Laminar-History"] == "branch"
    first = turns.requests[0]
    assert turns.requests[1].prompt_ids == (*first.prompt_ids, *codec.encode("one"), EOS, *codec.encode("and"))


async def test_identity_in_its_order() -> None:
    turns = answering(*["x"] * 20)
    turns.keys["sk-of-b"] = "by-key"
    sources: list[str] = []
    everything = {"metadata": {"session_id": "by-meta"}, "session_id": "by-field", "user": "by-user"}
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession() as session:

        async def ask(path: str, headers: dict[str, str], body: dict[str, Any]) -> str:
            messages = [{"role": "user", "content": "x"}]
            body = {"model": "policy", "messages": messages, **body}
            async with session.post(f"{url}{path}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                sources.append(answer.headers["X-Laminar-Session-From"])
                return answer.headers["X-Session-ID"]

        key = {"Authorization": "Bearer sk-of-b"}
        header = {"X-Session-ID": "by-header", "Thread-Id": "by-thread"}
        assert await ask("/sessions/by-url", {**key, **header}, everything) == "by-url"
        assert await ask("/s/short", {}, everything) == "short"
        assert await ask("", {**key, **header}, everything) == "by-key"
        assert await ask("", {"Authorization": "Bearer any", "X-Api-Key": "sk-of-b", **header}, everything) == "by-key"
        assert await ask("", {"Authorization": "Bearer sk-unknown", **header}, everything) == "by-header"
        assert await ask("", {"thread-id": "by-thread"}, everything) == "by-thread"
        assert await ask("", {}, everything) == "by-meta"
        assert await ask("", {}, {"session_id": "by-field", "user": "u"}) == "by-field"
        assert await ask("", {}, {"user": "by-user"}) == "by-user"
        assert await ask("", {}, {}) == "own-10"
    assert (
        sources
        == [i.source for i in turns.identities]
        == ["url", "url", "api_key", "api_key", "header", "header", *["body"] * 3, "none"]
    )


async def test_a_key_of_a_session_that_is_known_no_more_is_refused() -> None:
    async with (
        serving(answering("x"), codecs.tiny()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=f"{SESSION_KEY_PREFIX}gone", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError, match="no live session has this API key"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])


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
    assert [t.messages for kept in turns.sessions.values() for t in kept.tree.turns.values()] == [()]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


async def test_an_edited_history_goes_on_from_the_turn_before_the_edit() -> None:
    turns = answering("one", "two", "three", "four")
    async with session_client(turns) as client:

        async def ask(*messages: Any) -> str:
            raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages)
            return f"{raw.headers['X-Laminar-History']} {raw.headers.get('X-Laminar-History-Reason', '')}".strip()

        assert await ask(user("a")) == "first"
        assert await ask(user("a"), assistant("one"), user("b")) == "extended"
        edited = [user("a"), assistant("one"), user("B")]
        assert await ask(*edited) == "branch turn 0 has been extended already"
        assert await ask(*edited, assistant("three"), user("c")) == "extended"
    first, second, third, fourth = turns.requests
    assert (second.parent, third.parent, fourth.parent) == (first.turn_id, first.turn_id, third.turn_id)
    assert [r.turn_index for r in turns.requests] == [0, 1, 1, 2]
    shared = (*first.prompt_ids, *codecs.tiny().encode("one"), EOS)
    assert second.prompt_ids[: len(shared)] == third.prompt_ids[: len(shared)] == shared
    assert len(turns.sessions["s1"].tree.leaves()) == 2


async def test_an_answer_that_the_client_rewrote_is_prompt_and_not_the_policys() -> None:
    turns = answering("one", "two", "three")
    async with session_client(turns) as client:
        messages = [user("a"), assistant("one"), user("b")]
        await client.chat.completions.create(model="policy", messages=messages[:1])  # type: ignore[arg-type]
        await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        messages += [assistant("rewritten"), user("c")]
        await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
    last = turns.requests[2]
    assert last.parent == turns.requests[0].turn_id, "the rewritten answer was not sampled: it is no turn of the tree"
    assert codecs.tiny().decode(last.prompt_ids) == codecs.tiny().render_text(messages)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_are_branches_of_the_session(stream: bool) -> None:
    codec, said = codecs.tiny(), ["one", "two two", "three"]
    turns = ScriptedTurns(lambda request: Script([*codec.encode(said[request.choice]), EOS]))
    async with session_client(turns) as client:
        asked: dict[str, Any] = {"model": "policy", "messages": [user("go")], "n": 3}
        texts = {0: "", 1: "", 2: ""}
        if stream:
            finished = []
            options = {"include_usage": True}
            async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options=options):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    finished += [choice.index] * (choice.finish_reason == "stop")
                usage = chunk.usage
            assert sorted(finished) == [0, 1, 2]
        else:
            answer = await client.chat.completions.create(**asked)
            texts = {choice.index: choice.message.content for choice in answer.choices}
            usage = answer.usage
        assert list(texts.values()) == said
        tokens = sum(len(codec.encode(text)) + 1 for text in said)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(codec.render([user("go")])), tokens)
        history = [user("go"), assistant("two two"), user("on")]
        raw = await client.chat.completions.with_raw_response.create(model="policy", messages=history)
    assert raw.headers["X-Laminar-History"] == "extended"
    assert [r.choice for r in turns.requests] == [0, 1, 2, 0]
    assert turns.requests[3].parent == turns.requests[1].turn_id, "the choice that the client went on with"
    assert len(turns.sessions["s1"].tree.leaves()) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_one_answer_of_n_that_fails_fails_the_request_and_gives_the_others_up(stream: bool) -> None:
    codec, gate = codecs.tiny(), asyncio.Event()

    def script(request: TurnRequest) -> Script:
        ids = [*codec.encode("a long answer"), EOS]
        if request.choice == 1:
            return Script(ids, error=Unavailable("no engine is left"), fails_after=2)
        return Script(ids, gate=gate, free=1)

    turns = ScriptedTurns(script)
    async with session_client(turns) as client:

        async def ask() -> None:
            answer: Any = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "go"}], n=3, stream=stream
            )
            assert stream
            async for _ in answer:
                pass

        with pytest.raises(openai.APIError, match="no engine is left"):
            await ask()
    assert turns.outcomes == ["aborted"] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 50])
async def test_reasoning_and_calls_are_told_apart_from_the_answer(stream: bool, chunk: int) -> None:
    codec = codecs.qwen3()
    said = '<think>\nadd é\n</think>\n\nI ask.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    turns = ScriptedTurns(lambda request: Script([*codec.encode(said), EOS], chunk=chunk))
    asked: dict[str, Any] = {"model": "policy", "messages": [user("1+2?")], "tools": TOOLS}
    async with (
        serving(turns, codec) as url,
        openai.AsyncOpenAI(base_url=f"{url}/s/s1/v1", api_key="any", max_retries=0) as client,
    ):
        if stream:
            deltas = [c.choices[0].delta async for c in await client.chat.completions.create(**asked, stream=True)]
            told = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
            content = "".join(d.content or "" for d in deltas)
            calls = [call for d in deltas for call in d.tool_calls or []]
        else:
            message: Any = (await client.chat.completions.create(**asked)).choices[0].message
            told, content, calls = message.reasoning_content, message.content, message.tool_calls
            together: Any = await client.chat.completions.create(**asked, extra_body={"separate_reasoning": False})
            assert together.choices[0].message.content == said.partition("\n<tool_call>")[0]
        assert (told, content, [c.function.arguments for c in calls]) == ("add é", "I ask.", ['{"a": 1}'])
        history = [
            user("1+2?"),
            {"role": "assistant", "content": content, "tool_calls": [c.model_dump() for c in calls]},
        ]
        history += [{"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
        raw = await client.chat.completions.with_raw_response.create(**{**asked, "messages": history})
        assert raw.headers["X-Laminar-History"] == "extended"
        assert said in codec.decode(turns.requests[-1].prompt_ids), "the thought stays in the record"
        history[1]["content"] += "!"  # type: ignore[operator]
        extra = {"history": "template"}
        raw = await client.chat.completions.with_raw_response.create(**{**asked, "messages": history}, extra_body=extra)
        assert "add é" not in codec.decode(turns.requests[-1].prompt_ids), "an edited answer has no thought on record"
