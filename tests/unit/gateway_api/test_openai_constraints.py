"""A tool call that was asked for: what engines are held to is what the gateway parses."""

from __future__ import annotations

import itertools
import json
from typing import Any, Literal

import pytest

from gateway.api.errors import BadField, RefusedField
from gateway.api.openai.bodies import ChatRequest
from gateway.api.openai.constraints import Constraint, constraint
from gateway.api.openai.forced import CallForm
from gateway.api.openai.requests import decode_chat
from gateway.ports import ModelInfo
from gateway.tokens import ReasoningParser
from gateway.tokens.toolcalls import ToolCallParser
from gateway.tokens.toolformats import ToolFormat

MODEL = ModelInfo("policy", 50, 0)
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TIME = {"name": 'what "time"?'}
NAMED = {"type": "function", "function": {"name": "add"}}


def body(choice: Any, *functions: dict[str, Any]) -> ChatRequest:
    tools = [{"type": "function", "function": one} for one in functions]
    return decode_chat(json.dumps({"model": "policy", "messages": [], "tools": tools, "tool_choice": choice}).encode())


def parsed(form: ToolFormat, text: str, tools: Any = ()) -> list[tuple[str, str]]:
    parser = ToolCallParser(form, tools)
    first, last = parser.feed(text), parser.finish()
    assert first.text + last.text == "", "all of it is calls"
    return [(call.name, call.arguments) for call in (*first.calls, *last.calls)]


def written(tag: dict[str, Any], arguments: dict[str, Any]) -> str:
    """What an engine that is held to the tag writes."""
    assert (tag["type"], tag["content"]["type"]) == ("tag", "json_schema")
    return str(tag["begin"] + json.dumps(arguments) + tag["end"])


def test_a_named_call_in_the_form_of_hermes() -> None:
    held = constraint(body(NAMED, ADD, TIME), MODEL, CallForm("hermes"))
    tag = json.loads(held.structural_tag)["format"]
    assert tag["content"]["json_schema"] == ADD["parameters"]
    assert parsed("hermes", written(tag, {"a": 3})) == [("add", '{"a": 3}')]


def test_any_of_several_calls_in_the_form_of_hermes() -> None:
    tags = json.loads(constraint(body("required", ADD, TIME), MODEL, CallForm("hermes")).structural_tag)["format"]
    assert tags["type"] == "or"
    calls = [call for tag in tags["elements"] for call in parsed("hermes", written(tag, {}))]
    assert calls == [("add", "{}"), (TIME["name"], "{}")], "whatever the name has in it"


@pytest.mark.parametrize("form", ["llama", "llama4"])
def test_calls_in_the_form_of_llama_are_a_schema(form: ToolFormat) -> None:
    held = constraint(body("required", ADD, TIME), MODEL, CallForm(form))
    schemas = json.loads(held.json_schema)["anyOf"]
    for schema, name in zip(schemas, ("add", TIME["name"]), strict=True):
        assert (schema["required"], schema["additionalProperties"]) == (["name", "parameters"], False)
        said = json.dumps({"name": schema["properties"]["name"]["const"], "parameters": {"a": 1}})
        assert parsed(form, said) == [(name, '{"a": 1}')]


XML = {"qwen_xml": "<parameter=a>\n3\n</parameter>", "glm_xml": "<arg_key>a</arg_key>\n<arg_value>3</arg_value>"}


def texts(form: Any) -> list[str]:
    """What an engine that is held to it may write, of thoughts and identifiers one, and {"a": 3} as arguments."""
    match form["type"]:
        case "const_string":
            return [form["value"]]
        case "regex":
            return [{"\\n{0,2}": "\n\n", " ?": " "}.get(form["pattern"], "abcDEF123")]
        case "any_text":
            return ["hm, <tool_call>"]
        case "json_schema":
            return [XML.get(form.get("style", ""), '{"a": 3}')]
        case "tag":
            return [form["begin"] + inside + form["end"] for inside in texts(form["content"])]
        case "optional":
            return ["", *texts(form["content"])]
        case "or":
            return [text for element in form["elements"] for text in texts(element)]
        case "sequence":
            return ["".join(parts) for parts in itertools.product(*map(texts, form["elements"]))]
    raise AssertionError(form)


def allowed(form: CallForm, *functions: dict[str, Any]) -> list[str]:
    held = constraint(body("required", *functions), MODEL, form)
    return texts(json.loads(held.structural_tag)["format"])


@pytest.mark.parametrize(("form", "ways"), [("qwen_xml", 1), ("glm", 1), ("deepseek", 4), ("mistral", 4)])
def test_a_forced_call_in_every_form_is_what_is_parsed(form: ToolFormat, ways: int) -> None:
    tools = [{"type": "function", "function": {**ADD, "name": name}} for name in ("add", "sub")]
    found = [parsed(form, text, tools) for text in allowed(CallForm(form), ADD, {**ADD, "name": "sub"})]
    assert found == [[("add", '{"a": 3}')]] * ways + [[("sub", '{"a": 3}')]] * ways


@pytest.mark.parametrize("form", ["hermes", "qwen_xml", "deepseek", "llama"])
@pytest.mark.parametrize("thinks", ["may", "does"])
def test_a_model_that_reasons_does_so_before_a_forced_call(form: ToolFormat, thinks: Literal["may", "does"]) -> None:
    for text in allowed(CallForm(form, "think", thinks), ADD):
        reasoning = ReasoningParser("think", begun=thinks == "does")
        first, last = reasoning.feed(text), reasoning.finish()
        assert first.reasoning + last.reasoning == ("hm, <tool_call>" if "hm" in text else "")
        assert [name for name, _ in parsed(form, first.text + last.text)] == ["add"]


def test_a_name_that_would_end_its_own_mark_is_refused() -> None:
    with pytest.raises(BadField, match="a call of 'what \"time\"\\?' cannot be forced"):
        constraint(body("required", TIME), MODEL, CallForm("qwen_xml"))


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_what_is_left_to_the_model_is_held_to_nothing(choice: str | None) -> None:
    assert constraint(body(choice, ADD), MODEL, CallForm("hermes")) == Constraint()


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
        constraint(body("required", ADD), ModelInfo("policy", 50, 0, kinds=frozenset(kinds)), CallForm(form))
    assert refused.value.param == "tool_choice"
