"""`/v1/messages` as the official client reads it; the turn behind it is scripted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from gateway.core.types import TurnRequest
from gateway.tokens import Codec
from protos.errors import OutOfCapacity, Unavailable
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

if TYPE_CHECKING:  # the library takes more than a second to import, in each process that collects this
    import anthropic

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def says(codec: Codec, *texts: str, **more: Any) -> Callable[[TurnRequest], Script]:
    """Turns answer with these texts, in this order."""
    left = list(texts)
    (end,) = codec.turn_end_ids
    return lambda _: Script([*codec.encode(left.pop(0)), end], **more)


@contextlib.asynccontextmanager
async def client_of(
    turns: ScriptedTurns, codec: Codec | None = None, path: str = "/s/s1", **options: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with (
        serving(turns, codec or codecs.tiny()) as url,
        anthropic.AsyncAnthropic(base_url=url + path, api_key="any", max_retries=0, **options) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def posting(turns: ScriptedTurns) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession(url) as http:
        yield http


def blocks(message: Any) -> list[tuple[str, Any]]:
    shown = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, shown[block.type])) for block in message.content]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls_are_blocks_and_come_back_as_the_record(stream: bool) -> None:
    """The second turn extends the first, thinking and calls included, whatever a template would make of them."""
    codec = codecs.qwen3()
    first = f"<think>\nOne and one.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    turns = ScriptedTurns(says(codec, first, "<think>\nSo.\n</think>\n\nIt is 2."))
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 500, "tools": [ADD], "system": "Be brief."}
    messages = list(HELLO)
    async with client_of(turns, codec) as client:
        if stream:
            async with client.messages.stream(messages=messages, **asked) as events:
                kinds = [(event.type, getattr(event, "index", None)) async for event in events]
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(messages=messages, **asked)
        assert blocks(answer) == [
            ("thinking", "One and one."),
            ("text", "Let me see."),
            ("tool_use", {"a": 1}),
            ("tool_use", {"a": 1}),
        ]
        assert answer.stop_reason == "tool_use"
        assert answer.content[0].signature
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "2"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        later = {"type": "text", "text": "Well?"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [*results, later]}]
        raw = await client.messages.with_raw_response.create(messages=messages, **asked)
    assert raw.headers["X-Laminar-History"] == "extended", raw.headers.get("X-Laminar-History-Reason")
    assert blocks(await raw.parse()) == [("thinking", "So."), ("text", "It is 2.")]
    before, after = turns.requests
    recorded = [*before.prompt_ids, *codec.encode(first), *codec.turn_end_ids]
    assert list(after.prompt_ids[: len(recorded)]) == recorded
    rest = codec.decode(after.prompt_ids[len(recorded) :])
    assert rest.count("<tool_response>\n2\n</tool_response>") == 2
    assert "<|im_start|>user\nWell?<|im_end|>" in rest
    if stream:
        starts = [index for kind, index in kinds if kind == "content_block_start"]
        ends = [index for kind, index in kinds if kind == "content_block_stop"]
        assert starts == ends == [0, 1, 2, 3], "one block is open at a time"


async def test_thinking_is_switched_where_the_template_has_a_switch() -> None:
    codec = codecs.qwen3()
    turns = ScriptedTurns(says(codec, *["Yes."] * 3))
    async with client_of(turns, codec, path="") as client:
        for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            await client.messages.create(model="policy", messages=HELLO, max_tokens=9, thinking=thinking)  # type: ignore[arg-type]
    off, *on = [codec.decode(turn.prompt_ids) for turn in turns.requests]
    assert off.endswith("<think>\n\n</think>\n\n")
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in on)


async def test_a_request_of_a_coding_agent_is_taken_as_it_comes() -> None:
    """Its accounting changes with each request, and is not part of the prompt; its marks for caching move."""
    turns = ScriptedTurns(says(codecs.tiny(), "Yes.", "No."))
    named = {"X-Claude-Code-Session-Id": "agent-1"}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    async with client_of(turns, path="", default_headers=named) as client:
        for number, history in enumerate(("first", "extended")):
            mark = {"cache_control": {"type": "ephemeral"}}
            messages[-1]["content"][-1] |= mark
            raw = await client.messages.with_raw_response.create(
                model="policy",
                max_tokens=8192,
                system=[
                    {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={number};"},
                    {"type": "text", "text": "You are an agent.", **mark},  # type: ignore[typeddict-item]
                ],
                messages=messages,
                metadata={"user_id": "someone"},
                thinking={"type": "adaptive"},
                extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
                extra_query={"beta": "true"},
                output_config={"effort": "medium"},
                tools=[{**ADD, "eager_input_streaming": True}],
            )
            assert raw.headers["X-Laminar-History"] == history
            assert raw.headers["X-Session-ID"] == "agent-1"
            messages[-1]["content"][-1].pop("cache_control")
            answer = [
                {"type": "text", "text": block.text} for block in (await raw.parse()).content if block.type == "text"
            ]
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": [{"type": "text", "text": "go on"}]},
            ]
    assert "billing" not in codecs.tiny().decode(turns.requests[0].prompt_ids)


async def test_the_beginning_of_an_answer_is_continued() -> None:
    turns = ScriptedTurns(says(codecs.tiny(), " four.", "Yes."))
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    async with client_of(turns) as client:
        answer = await client.messages.create(model="policy", messages=begun, max_tokens=9)
        assert blocks(answer) == [("text", " four.")]
        whole = [*HELLO, {"role": "assistant", "content": "It is four."}, {"role": "user", "content": "Sure?"}]
        raw = await client.messages.with_raw_response.create(model="policy", messages=whole, max_tokens=9)
    assert codecs.tiny().decode(turns.requests[0].prompt_ids).endswith("<|im_start|>assistant\nIt is")
    assert raw.headers["X-Laminar-History"] == "extended"


async def test_the_count_is_that_of_the_next_prompt_and_makes_no_session() -> None:
    turns = ScriptedTurns(says(codecs.tiny(), "Yes."))
    async with client_of(turns) as client:
        asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "tools": [ADD], "system": "Be brief."}
        counted = await client.messages.count_tokens(**asked)
        assert not turns.sessions
        await client.messages.create(**asked, max_tokens=9)
    assert counted.input_tokens == len(turns.requests[0].prompt_ids)


async def test_a_tool_that_has_to_be_called_is_forced() -> None:
    turns = ScriptedTurns(says(codecs.tiny(), CALL, CALL, "Yes.", f"{CALL}\n{CALL}"))
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "tools": [ADD], "max_tokens": 99}
    async with client_of(turns, path="") as client:
        await client.messages.create(**asked, tool_choice={"type": "any"})
        await client.messages.create(**asked, tool_choice={"type": "tool", "name": "add"})
        await client.messages.create(**asked, tool_choice={"type": "none"})
        one = await client.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    forced = [bool(turn.sampling.structural_tag) for turn in turns.requests]
    assert forced == [True, True, False, False]
    assert [kind for kind, _ in blocks(one)] == ["tool_use"]


async def test_an_answer_is_held_to_a_schema() -> None:
    turns = ScriptedTurns(says(codecs.tiny(), "{}"))
    schema = {"type": "object", "properties": {}}
    async with client_of(turns) as client:
        await client.messages.create(
            model="policy",
            messages=HELLO,
            max_tokens=9,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    assert json.loads(turns.requests[0].sampling.json_schema) == schema


@pytest.mark.parametrize("arguments", ['"no object"', "[1]", '{"n": 12345678901234567890123, "x": 1.50}'])
async def test_arguments_of_any_kind_come_back_as_they_were(arguments: str) -> None:
    call = f'{{"name": "add", "arguments": {arguments}}}'
    turns = ScriptedTurns(says(codecs.tiny(), f"<tool_call>{call}</tool_call>", "Yes."))
    asked: dict[str, Any] = {"model": "policy", "tools": [ADD], "max_tokens": 99}
    async with client_of(turns) as client:
        answer = await client.messages.create(messages=HELLO, **asked)
        [used] = answer.content
        assert used.type == "tool_use"
        block = {"type": "tool_use", "id": used.id, "name": used.name, "input": used.input}
        result = {"type": "tool_result", "tool_use_id": used.id, "is_error": True}
        more: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [result]},
        ]
        raw = await client.messages.with_raw_response.create(messages=more, **asked)
    assert raw.headers["X-Laminar-History"] == "extended"
    assert "error" in codecs.tiny().decode(turns.requests[1].prompt_ids[len(turns.requests[0].prompt_ids) :])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "`messages` is empty"),
    ({"max_tokens": 0}, "`max_tokens`: expected `int` >= 1"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "unknown role 'tool' (one of user, assistant, system)"),
    ({"messages": [{"role": "user", "content": []}]}, "a user message needs content"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "type 'document'"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "type 'thinking'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text block needs a string `text`"),
    ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "not an assistant's text that can be continued"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`tools[0].type`='web_search_20250305'"),
    ({"tools": [{"name": "add"}]}, "`tools[0]` needs an `input_schema`"),
    ({"tool_choice": {"type": "tool"}}, "needs the tool's `name`"),
    ({"mcp_servers": [{"url": "x"}]}, "connect to them in the client"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edit the history in the client"),
    ({"service_tier": "priority"}, "`service_tier`='priority' is not supported"),
    ({"metadata": {"user_id": 1}}, "`metadata.user_id` is not a string"),
    ({"stop_sequences": ["x"] * 17}, "17 stop strings"),
    ({"temperature": 3}, "`temperature`=3.0 is out of range"),
    ({"messages": [{"role": "user", "content": "x " * 4000}]}, "prompt is too long: this model's maximum context"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
async def test_what_it_does_not_do_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    turns = ScriptedTurns(says(codecs.tiny(), "Yes."))
    body = {"model": "policy", "messages": HELLO, "max_tokens": 9, **change}
    async with posting(turns) as http, http.post("/v1/messages", json=body) as answer:
        found = await answer.json()
    assert (answer.status, found["type"]) == (400, "error")
    assert found["error"]["type"] == "invalid_request_error"
    assert message in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"]
    assert not turns.requests


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/v1/messages", 404, "not_found_error"),
    ],
)
async def test_routes_that_are_not_there_answer_in_anthropics_form(
    method: str, path: str, status: int, kind: str
) -> None:
    turns = ScriptedTurns(says(codecs.tiny()))
    async with posting(turns) as http, http.request(method, path, json={}) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (status, kind)
        assert answer.headers["request-id"]


async def test_errors_before_and_within_a_stream_reach_the_client() -> None:
    import anthropic

    codec = codecs.tiny()
    script = says(codec, "one two three", error=Unavailable("the engine is gone"), fails_after=3)
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 99}
    async with client_of(ScriptedTurns(script)) as client:
        events = []
        with pytest.raises(anthropic.APIStatusError, match="the engine is gone") as caught:  # noqa: PT012 (it is read)
            async for event in await client.messages.create(**asked, stream=True):
                events.append(event.type)  # noqa: PERF401 (until it fails)
    assert caught.value.type == "overloaded_error"
    assert events[:2] == ["message_start", "content_block_start"]
    full = OutOfCapacity("no room", retry_after_s=3.0)
    async with client_of(ScriptedTurns(says(codec, "x", error=full))) as client:
        with pytest.raises(anthropic.RateLimitError, match="no room") as refused:
            await client.messages.create(**asked, stream=True)
    assert refused.value.type == "rate_limit_error"
    assert refused.value.response.headers["Retry-After"] == "3"
