"""The Responses API as the official client reads it; the turn behind it is scripted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from gateway.core.types import TurnRequest
from gateway.tokens import Codec
from protos.errors import Unavailable
from tests.support import codecs, families
from tests.support.turns import Script, ScriptedTurns, serving

EOS = 2
TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def says(*texts: str, codec: Codec | None = None, **more: Any) -> Callable[[TurnRequest], Script]:
    """One answer after the other, each with the end-of-sequence token; the last one again and again."""
    codec = codec or codecs.tiny()
    left = list(texts)

    def script(request: TurnRequest) -> Script:
        text = left.pop(0) if len(left) > 1 else left[0]
        return Script([*codec.encode(text), min(codec.eos_ids) if codec is not codecs.tiny() else EOS], **more)

    return script


@contextlib.asynccontextmanager
async def client_of(
    turns: ScriptedTurns, codec: Codec | None = None, path: str = "/v1"
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(turns, codec or codecs.tiny()) as url,
        openai.AsyncOpenAI(base_url=url + path, api_key="any", max_retries=0) as client,
    ):
        yield client


async def test_a_whole_response() -> None:
    turns = ScriptedTurns(says("Hello there."))
    async with client_of(turns) as client:
        response = await client.responses.create(model="policy", input="hello", instructions="Be brief.")
    assert response.output_text == "Hello there."
    assert [item.type for item in response.output] == ["message"]
    assert (response.status, response.object, response.model) == ("completed", "response", "policy")
    assert response.instructions == "Be brief."
    prompt = codecs.tiny().render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}])
    assert turns.requests[0].prompt_ids == tuple(prompt)
    assert response.usage is not None
    sampled = len(codecs.tiny().encode("Hello there.")) + 1
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), sampled)


async def test_a_length_limit_is_named() -> None:
    async with client_of(ScriptedTurns(says("one two three four five"))) as client:
        response = await client.responses.create(model="policy", input="count", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["/v1", "/sessions/mine/v1"])
async def test_the_next_response_extends_the_ids_of_the_previous_one(path: str) -> None:
    turns = ScriptedTurns(says("First answer.", "Second."))
    async with client_of(turns, path=path) as client:
        first = await client.responses.create(model="policy", input="hello")
        raw = await client.responses.with_raw_response.create(
            model="policy", input="and now?", previous_response_id=first.id
        )
    second = raw.parse()
    assert second.previous_response_id == first.id
    assert raw.headers["X-Laminar-History"] == "extended"
    [one, two] = turns.requests
    answered = [*one.prompt_ids, *codecs.tiny().encode("First answer."), EOS]
    assert list(two.prompt_ids[: len(answered)]) == answered
    assert (two.parent, two.session_id) == (one.turn_id, one.session_id)


async def test_instructions_are_not_inherited() -> None:
    turns = ScriptedTurns(says("Yes."))
    async with client_of(turns) as client:
        first = await client.responses.create(model="policy", input="hello", instructions="Old.")
        same = await client.responses.with_raw_response.create(
            model="policy", input="a", instructions="Old.", previous_response_id=first.id
        )
        other = await client.responses.with_raw_response.create(
            model="policy", input="b", instructions="New.", previous_response_id=first.id
        )
    assert same.headers["X-Laminar-History"] == "extended"
    assert other.headers["X-Laminar-History"] == "branch"
    text = codecs.tiny().decode(turns.requests[2].prompt_ids)
    assert "New." in text
    assert "Old." not in text


async def test_of_two_equal_answers_the_named_one_is_extended() -> None:
    turns = ScriptedTurns(says("Yes."))
    async with client_of(turns) as client:
        first = await client.responses.create(model="policy", input="hello")
        left = await client.responses.create(model="policy", input="sure?", previous_response_id=first.id)
        await client.responses.create(model="policy", input="sure?", previous_response_id=first.id)
        await client.responses.create(model="policy", input="really?", previous_response_id=left.id)
    assert turns.requests[3].parent == left.id.removeprefix("resp_")


async def test_a_history_of_items_extends_the_record() -> None:
    """As the agents' libraries send it back: the items of the answer, then the output of its call."""
    turns = ScriptedTurns(says(f"Let me see.\n{CALL}", "It is 2."))
    async with client_of(turns, path="/sessions/s/v1") as client:
        first = await client.responses.create(model="policy", input="1 + 1?", tools=TOOLS)
        [message, call] = first.output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("add", '{"a": 1}')
        history: list[Any] = [
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
            message.to_dict(),
            call.to_dict(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
        ]
        raw = await client.responses.with_raw_response.create(model="policy", input=history, tools=TOOLS)
    assert raw.headers["X-Laminar-History"] == "extended"
    assert raw.parse().output_text == "It is 2."


async def test_the_output_of_a_call_follows_by_the_responses_id() -> None:
    turns = ScriptedTurns(says(CALL, "It is 2."))
    async with client_of(turns) as client:
        first = await client.responses.create(model="policy", input="1 + 1?", tools=TOOLS)
        [call] = first.output
        assert call.type == "function_call"
        output: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        raw = await client.responses.with_raw_response.create(
            model="policy", input=output, tools=TOOLS, previous_response_id=first.id
        )
    assert raw.headers["X-Laminar-History"] == "extended"


async def test_an_unstored_response_cannot_be_continued() -> None:
    async with client_of(ScriptedTurns(says("Yes."))) as client:
        first = await client.responses.create(model="policy", input="hello", store=False)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="policy", input="more", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"
    assert refused.value.param == "previous_response_id"


async def test_another_sessions_response_is_refused() -> None:
    turns = ScriptedTurns(says("Yes."))
    async with client_of(turns, path="/sessions/a/v1") as client:
        first = await client.responses.create(model="policy", input="hello")
        other = client.with_options(base_url=str(client.base_url).replace("/a/", "/b/"))
        with pytest.raises(openai.BadRequestError, match="session a, and the request names b"):
            await other.responses.create(model="policy", input="more", previous_response_id=first.id)


async def test_a_chat_goes_on_from_a_response() -> None:
    turns = ScriptedTurns(says("Yes."))
    async with client_of(turns, path="/sessions/a/v1") as client:
        await client.responses.create(model="policy", input="hello")
        raw = await client.chat.completions.with_raw_response.create(
            model="policy",
            messages=[
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "more"},
            ],
        )
    assert raw.headers["X-Laminar-History"] == "extended"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("background", True, "background"),
        ("conversation", "conv_1", "conversation"),
        ("truncation", "auto", "truncation"),
        ("reasoning", {"effort": "high"}, "reasoning.effort"),
        ("text", {"verbosity": "low"}, "text.verbosity"),
        ("include", ["file_search_call.results"], "include[0]"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("tool_choice", {"type": "mcp", "server_label": "x"}, "tool_choice"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "input[0].content[0].type",
        ),
        ("input", [{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ("input", [{"type": "function_call_output", "output": "2"}], "input[0].call_id"),
        ("input", [], "input"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", 9.0, "temperature"),
        ("text", {"format": {"type": "grammar"}}, "text.format"),
        ("top_logprobs", 3, "top_logprobs"),
        ("surprise", 1, "surprise"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(field: str, value: Any, param: str) -> None:
    turns = ScriptedTurns(says("Yes."))
    async with client_of(turns) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", body={"model": "policy", "input": "hello", field: value}, cast_to=Response)
    assert refused.value.param == param
    assert not turns.requests


async def test_a_long_prompt_names_the_input() -> None:
    async with client_of(ScriptedTurns(says("Yes."), context_tokens=8)) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(model="policy", input="far too long for eight tokens")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


async def test_token_ids_and_versions_on_request() -> None:
    async with client_of(ScriptedTurns(says("Yes."))) as client:
        response = await client.responses.create(
            model="policy", input="hello", extra_body={"return_token_ids": True, "return_weight_versions": True}
        )
    extra = response.model_extra or {}
    assert extra["token_ids"] == [*codecs.tiny().encode("Yes."), EOS]
    assert extra["prompt_token_ids"] == codecs.tiny().render([{"role": "user", "content": "hello"}])
    assert [span["version"] for span in extra["weight_versions"]] == ["7"]
    assert extra["laminar"]["history"] == "first"


async def test_logprobs_on_request() -> None:
    async with client_of(ScriptedTurns(says("Yes."))) as client:
        response = await client.responses.create(
            model="policy", input="hello", top_logprobs=2, include=["message.output_text.logprobs"]
        )
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == len(codecs.tiny().encode("Yes.")) + 1
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


async def test_reasoning_is_an_item() -> None:
    codec = codecs.qwen3()
    turns = ScriptedTurns(says("<think>\nHm, 2.\n</think>\n\nIt is 2.", codec=codec))
    async with client_of(turns, codec) as client:
        response = await client.responses.create(model="policy", input="1 + 1?")
    [reasoning, message] = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Hm, 2."]
    assert message.type == "message"
    assert response.output_text == "It is 2."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_an_engines_error_before_the_first_token_has_its_status() -> None:
    turns = ScriptedTurns(lambda request: Script([1], error=Unavailable("no engine")))
    async with client_of(turns) as client:
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="policy", input="hello", stream=True)


async def test_a_response_is_read_back_from_the_record() -> None:
    turns = ScriptedTurns(says(f"Let me see.\n{CALL}", "It is 2."))
    async with client_of(turns) as client:
        first = await client.responses.create(model="policy", input="1 + 1?", tools=TOOLS, instructions="Compute.")
        call = first.output[-1]
        assert call.type == "function_call"
        output: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        second = await client.responses.create(
            model="policy", input=output, tools=TOOLS, instructions="Compute.", previous_response_id=first.id
        )
        for response in (first, second):
            again = await client.responses.retrieve(response.id)
            assert again.output == response.output
            assert (again.status, again.instructions) == (response.status, response.instructions)
            assert (again.usage, again.previous_response_id) == (response.usage, response.previous_response_id)
            assert [tool.to_dict() for tool in again.tools] == TOOLS
        with pytest.raises(openai.NotFoundError, match=r"no response .resp_nobody.*kept until its session ends"):
            await client.responses.retrieve("resp_nobody")
        with pytest.raises(openai.NotFoundError, match="the id of a response begins with resp_"):
            await client.responses.retrieve(first.id.removeprefix("resp_"))


@pytest.mark.parametrize("family", ["qwen3_5_think", "glm4moe", "deepseekv3", "mistral_v13"])
async def test_calls_of_other_families_go_round(family: str) -> None:
    """The call as the family writes it, its output, and the next prompt, which extends the ids of both."""
    codec = families.codec(family)
    call = {
        "qwen3_5_think": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "glm4moe": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "mistral_v13": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    }[family]
    thought = "Hm.\n</think>\n\n" if family in ("qwen3_5_think", "deepseekv3") else ""
    again = thought if family == "qwen3_5_think" else ""  # DeepSeek's template opens no reasoning after a tool
    turns = ScriptedTurns(says(f"{thought}{call}", f"{again}Done.", codec=codec))
    async with client_of(turns, codec) as client:
        first = await client.responses.create(model="policy", input="1?", tools=TOOLS, parallel_tool_calls=False)
        called = first.output[-1]
        assert called.type == "function_call"
        assert (called.name, called.arguments) == ("add", '{"a": 1}')
        assert [item.type for item in first.output] == [*(["reasoning"] if thought else []), "function_call"]
        output: list[Any] = [{"type": "function_call_output", "call_id": called.call_id, "output": "2"}]
        raw = await client.responses.with_raw_response.create(
            model="policy", input=output, tools=TOOLS, previous_response_id=first.id
        )
    assert raw.headers["X-Laminar-History"] in ("extended", "closed")  # one call alone ends before its turn's end
    assert raw.parse().output_text == "Done."
    before = list(turns.requests[0].prompt_ids)
    assert list(turns.requests[1].prompt_ids[: len(before)]) == before
