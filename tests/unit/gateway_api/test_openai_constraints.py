"""A tool call that was asked for: what engines are held to is what the gateway parses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.errors import RefusedField
from gateway.api.openai.bodies import ChatRequest
from gateway.api.openai.constraints import Constraint, constraint
from gateway.api.openai.requests import decode_chat
from gateway.ports import ModelInfo
from gateway.tokens.toolcalls import ToolCallParser
from gateway.tokens.toolformats import ToolFormat

MODEL = ModelInfo("policy", 50, 0)
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TIME = {"name": 'what "time"?'}
NAMED = {"type": "function", "function": {"name": "add"}}


def body(choice: Any, *functions: dict[str, Any]) -> ChatRequest:
    tools = [{"type": "function", "function": one} for one in functions]
    return decode_chat(json.dumps({"model": "policy", "messages": [], "tools": tools, "tool_choice": choice}).encode())


def parsed(form: ToolFormat, text: str) -> list[tuple[str, str]]:
    parser = ToolCallParser(form)
    first, last = parser.feed(text), parser.finish()
    assert first.text + last.text == "", "all of it is calls"
    return [(call.name, call.arguments) for call in (*first.calls, *last.calls)]


def written(tag: dict[str, Any], arguments: dict[str, Any]) -> str:
    """What an engine that is held to the tag writes."""
    assert (tag["type"], tag["content"]["type"]) == ("tag", "json_schema")
    return str(tag["begin"] + json.dumps(arguments) + tag["end"])


def test_a_named_call_in_the_form_of_hermes() -> None:
    held = constraint(body(NAMED, ADD, TIME), MODEL, "hermes")
    tag = json.loads(held.structural_tag)["format"]
    assert tag["content"]["json_schema"] == ADD["parameters"]
    assert parsed("hermes", written(tag, {"a": 3})) == [("add", '{"a": 3}')]


def test_any_of_several_calls_in_the_form_of_hermes() -> None:
    tags = json.loads(constraint(body("required", ADD, TIME), MODEL, "hermes").structural_tag)["format"]
    assert tags["type"] == "or"
    calls = [call for tag in tags["elements"] for call in parsed("hermes", written(tag, {}))]
    assert calls == [("add", "{}"), (TIME["name"], "{}")], "whatever the name has in it"


def test_calls_in_the_form_of_llama_are_a_schema() -> None:
    held = constraint(body("required", ADD, TIME), MODEL, "llama")
    schemas = json.loads(held.json_schema)["anyOf"]
    for schema, name in zip(schemas, ("add", TIME["name"]), strict=True):
        assert (schema["required"], schema["additionalProperties"]) == (["name", "parameters"], False)
        said = json.dumps({"name": schema["properties"]["name"]["const"], "parameters": {"a": 1}})
        assert parsed("llama", said) == [(name, '{"a": 1}')]


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_what_is_left_to_the_model_is_held_to_nothing(choice: str | None) -> None:
    assert constraint(body(choice, ADD), MODEL, "hermes") == Constraint()


@pytest.mark.parametrize(
    ("form", "kinds", "told"),
    [
        ("none", {"vllm"}, "no engine has a grammar for this model's format of a call.*'auto'"),
        ("hermes", {"embedded"}, "no engine of this gateway.*sglang, vllm"),
        ("llama", {"embedded"}, "no engine of this gateway.*sglang, vllm"),
    ],
)
def test_a_call_that_cannot_be_promised_is_refused_by_name(form: ToolFormat, kinds: set[str], told: str) -> None:
    with pytest.raises(RefusedField, match=told) as refused:
        constraint(body("required", ADD), ModelInfo("policy", 50, 0, kinds=frozenset(kinds)), form)
    assert refused.value.param == "tool_choice"
