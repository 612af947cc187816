"""Every parameter of OpenAI's and Anthropic's official clients, from their own types: it changes the turn or its
answer, or it is refused by name, or it is documented as not read. Nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import aiohttp
import anthropic.types.beta.message_count_tokens_params as beta_counted
import anthropic.types.beta.message_create_params as beta_messages
import anthropic.types.message_count_tokens_params as counted
import anthropic.types.message_create_params as messages
import msgspec
import openai.types.chat.completion_create_params as chat
import openai.types.completion_create_params as completion
import openai.types.responses.response_create_params as responses
import pytest
from anthropic.types import ThinkingConfigEnabledParam, ToolParam
from anthropic.types.output_config_param import OutputConfigParam
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.responses import FunctionToolParam, ResponseTextConfigParam
from openai.types.shared_params import FunctionDefinition, Reasoning

from gateway.api.anthropic.bodies import NEUTRAL as NEUTRAL_MESSAGES
from gateway.api.anthropic.bodies import (
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    Thinking,
    ToolDefinition,
)
from gateway.api.calls.fields import FIELDS, UNREAD
from gateway.api.openai.bodies import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    ChatRequest,
    CompletionRequest,
    FunctionSpec,
    StreamOptions,
)
from gateway.api.responses.bodies import NEUTRAL as NEUTRAL_RESPONSES
from gateway.api.responses.bodies import NEUTRAL_TOOL as NEUTRAL_RESPONSES_TOOL
from gateway.api.responses.bodies import ReasoningOptions, ResponsesRequest, TextOptions
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

pytestmark = pytest.mark.slow  # it imports anthropic

USER = {"role": "user", "content": "Say one two three."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NO_VALUE = "no value of this field"


@dataclass(frozen=True)
class Door:
    """One route. `types`: its parameters by the client. `body`: a request that is answered. `changed`: for each field
    that is honoured a value with which the turn or the answer differs, alone or as (value, fields that it needs)."""

    path: str
    types: tuple[type, ...]
    struct: type[msgspec.Struct]
    neutral: Mapping[str, tuple[Any, ...]]
    body: Mapping[str, Any]
    changed: Mapping[str, Any]

    def parameters(self) -> set[str]:
        return {name for kind in self.types for name in fields_of(kind)} - {
            "extra_headers",
            "extra_query",
            "extra_body",
        }

    def honoured(self) -> set[str]:
        return {name for name in self.parameters() if name not in self.neutral and FIELDS.get(name) != UNREAD}


def fields_of(kind: type) -> set[str]:
    """The keys of a TypedDict and of those that it extends."""
    return set(kind.__required_keys__ | kind.__optional_keys__)  # type: ignore[attr-defined]


SAMPLED: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5}
OPENAI: dict[str, Any] = {
    **SAMPLED,
    "frequency_penalty": 1.0,
    "presence_penalty": 1.0,
    "logit_bias": {"5": 10},
    "max_tokens": 2,
    "n": 2,
    "seed": 3,
    "stop": " two",
    "stream": True,
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "user": "ann",
}
DOORS = {
    "chat": Door(
        "/v1/chat/completions",
        (chat.CompletionCreateParamsBase, chat.CompletionCreateParamsStreaming),
        ChatRequest,
        NEUTRAL_CHAT,
        {"model": "policy", "messages": [USER]},
        {
            **OPENAI,
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": (2, {"logprobs": True}),
            "metadata": {"session_id": "mine"},
            "parallel_tool_calls": (False, {"tools": [TOOL]}),
            "response_format": {"type": "json_object"},
            "tools": [TOOL],
            "tool_choice": ("required", {"tools": [TOOL]}),
        },
    ),
    "completion": Door(
        "/v1/completions",
        (completion.CompletionCreateParamsBase, completion.CompletionCreateParamsStreaming),
        CompletionRequest,
        NEUTRAL_COMPLETION,
        {"model": "policy", "prompt": "Say one two three."},
        {**OPENAI, "logprobs": 2},
    ),
    "responses": Door(
        "/v1/responses",
        (responses.ResponseCreateParamsBase, responses.ResponseCreateParamsStreaming),
        ResponsesRequest,
        NEUTRAL_RESPONSES,
        {"model": "policy", "input": "Say one two three."},
        {
            **SAMPLED,
            "include": ["message.output_text.logprobs"],
            "instructions": "Be brief.",
            "max_output_tokens": 2,
            "metadata": {"session_id": "mine"},
            "parallel_tool_calls": (False, {"tools": [{"type": "function", "name": "add"}]}),
            "previous_response_id": "resp_before",
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "stream_options": ({"include_usage": True}, {"stream": True}),
            "text": {"format": {"type": "json_object"}},
            "tools": [{"type": "function", "name": "add"}],
            "tool_choice": ("required", {"tools": [{"type": "function", "name": "add"}]}),
            "top_logprobs": (2, {"include": ["message.output_text.logprobs"]}),
            "user": "ann",
        },
    ),
    "messages": Door(
        "/v1/messages",
        (
            messages.MessageCreateParamsBase,
            messages.MessageCreateParamsStreaming,
            beta_messages.MessageCreateParamsBase,
            beta_messages.MessageCreateParamsStreaming,
        ),
        MessagesRequest,
        NEUTRAL_MESSAGES,
        {"model": "policy", "max_tokens": 64, "messages": [USER]},
        {
            "metadata": {"user_id": "ann"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "stop_sequences": [" two"],
            "stream": True,
            "system": "Be brief.",
            "thinking": {"type": "disabled"},
            "thread": {"id": "t"},
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "tool_choice": ({"type": "any"}, {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}),
        },
    ),
    "count_tokens": Door(
        "/v1/messages/count_tokens",
        (counted.MessageCountTokensParams, beta_counted.MessageCountTokensParams),
        CountTokensRequest,
        NEUTRAL_MESSAGES,
        {"model": "policy", "messages": [USER]},
        {
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "system": "Be brief.",
            "thinking": {"type": "disabled"},
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "tool_choice": ({"type": "any"}, {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}),
        },
    ),
}
ALWAYS = {"model", "messages", "prompt", "input", "max_tokens"}
"""What every request has."""
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters that Anthropic's client sends as headers."""
NOT_IN_PROMPT = {"output_config", "tool_choice"}
"""They constrain an answer, and take no tokens to count."""
NESTED = [
    (ChatCompletionStreamOptionsParam, StreamOptions),
    (FunctionDefinition, FunctionSpec),
    (ResponseTextConfigParam, TextOptions),
    (Reasoning, ReasoningOptions),
    (ToolParam, ToolDefinition),
    (ThinkingConfigEnabledParam, Thinking),
    (OutputConfigParam, OutputConfig),
]


def rows(what: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, door in DOORS.items():
        chosen = {
            "honoured": door.honoured() - ALWAYS - HEADERS,
            "refused": door.parameters() & door.neutral.keys(),
            "unread": {field for field in door.parameters() if FIELDS.get(field) == UNREAD},
        }[what]
        found += ((name, field) for field in sorted(chosen))
    return found


EACH_TIME = re.compile(r'(resp|msg|chatcmpl|cmpl|rs|fc|req)_?-?[0-9a-f]{24}(_\d)?|"created(_at)?": ?\d+')
"""Of an answer: ids and times."""


CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def answered(body: Mapping[str, Any]) -> ScriptedTurns:
    """Two calls, where there are tools."""
    codec = codecs.qwen3()
    text = f"{CALL}\n{CALL}" if body.get("tools") else "one two three four"
    return ScriptedTurns(lambda request: Script([*codec.encode(text), min(codec.eos_ids)]))


async def sent(door: Door, body: Mapping[str, Any]) -> tuple[int, Any, Any]:
    """The status, the answer without what differs each time, and the turns."""
    turns = answered(body)
    async with (
        serving(turns, codecs.qwen3()) as url,
        aiohttp.ClientSession(url) as http,
        http.post(door.path, json=body) as answer,
    ):
        text = EACH_TIME.sub("", await answer.text())
        named = answer.headers.get("X-Laminar-Session-From")
    shown = [(turn.prompt_ids, turn.sampling, turn.choice) for turn in turns.requests]
    return answer.status, (text, named), (shown, [identity.kept for identity in turns.identities])


@pytest.mark.parametrize("name", DOORS)
def test_no_parameter_is_unknown(name: str) -> None:
    door = DOORS[name]
    known = {field.encode_name for field in msgspec.structs.fields(door.struct)}
    assert door.parameters() - HEADERS - known == set()


@pytest.mark.parametrize(("theirs", "ours"), NESTED, ids=lambda kind: kind.__name__)
def test_no_nested_parameter_is_unknown(theirs: type, ours: type[msgspec.Struct]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(ours)} | {"type"}
    assert fields_of(theirs) - known == set()


def test_no_parameter_of_a_tool_is_unknown() -> None:
    known = {field.encode_name for field in msgspec.structs.fields(FunctionSpec)} | NEUTRAL_RESPONSES_TOOL.keys()
    assert fields_of(FunctionToolParam) - known - {"type"} == set()


@pytest.mark.parametrize(("name", "field"), rows("refused"))
async def test_what_is_not_supported_is_refused_by_its_name(name: str, field: str) -> None:
    door = DOORS[name]
    refusals = []
    for value in (NO_VALUE, {"a": 1}, [1], [{"a": 1}], 3.5, 7, True):
        status, (text, _), _ = await sent(door, {**door.body, field: value})
        assert status == 400, f"{field}={value!r} is taken"
        refusals.append(json.loads(text)["error"]["message"])
    assert all(field in message for message in refusals), refusals
    assert any(f"`{field}`" in message for message in refusals)


@pytest.mark.parametrize(("name", "field"), rows("unread"))
async def test_what_is_not_read_changes_nothing_and_is_documented(name: str, field: str) -> None:
    door = DOORS[name]
    before = await sent(door, door.body)
    kind = next(f.type for f in msgspec.structs.fields(door.struct) if f.encode_name == field)
    value: Any = (
        "any"
        if kind is Any or str in (get_args(kind) or (kind,))
        else {}
        if dict in map(get_origin, get_args(kind))
        else 0
    )
    assert await sent(door, {**door.body, field: value}) == before


@pytest.mark.parametrize(("name", "field"), rows("honoured"))
async def test_what_is_honoured_changes_the_turn_or_its_answer(name: str, field: str) -> None:
    door = DOORS[name]
    given = door.changed[field]
    value, needs = given if isinstance(given, tuple) else (given, {})
    before, after = await sent(door, {**door.body, **needs}), await sent(door, {**door.body, **needs, field: value})
    assert before[0] == 200, before
    assert (after != before) is not (name == "count_tokens" and field in NOT_IN_PROMPT)


@pytest.mark.parametrize("name", DOORS)
def test_the_table_has_no_row_that_is_none(name: str) -> None:
    assert set(DOORS[name].changed) == DOORS[name].honoured() - ALWAYS - HEADERS | (
        {"max_tokens"} & set(DOORS[name].changed)
    )
