"""Constraints of an answer: a JSON schema, a pattern, or a tool call in the model's own format.

They come from a request's `response_format`, `structured_outputs` or `tool_choice`. The engine's grammar guarantees a
tool call that the request forces, in the format that `gateway.tokens.toolcalls` parses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.api.bodies import check_texts
from gateway.api.errors import BadField, RefusedField
from gateway.api.openai.bodies import ChatRequest, CompletionRequest
from gateway.api.openai.forced import JSON_OBJECTS, CallForm, can_force, structural_tag
from gateway.core.sampling import kinds_for
from gateway.ports import ModelInfo
from protos.decoding import decode_json

_PLAIN = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Constraint:
    """At most one of them; all empty for an unconstrained answer. JSON text but for the pattern."""

    json_schema: str = ""
    regex: str = ""
    structural_tag: str = ""

    @property
    def any(self) -> bool:
        return bool(self.json_schema or self.regex or self.structural_tag)


def constraint(body: ChatRequest | CompletionRequest, model: ModelInfo, form: CallForm) -> Constraint:
    """The request's constraint. `form`: how the model writes a call that a grammar forces."""
    found = {field: held for field, held in _by_field(body, form).items() if held.any}
    if len(found) > 1:
        raise BadField(next(iter(found)), f"{' and '.join(found)} each constrain the answer", hint="send one of them")
    for field, held in found.items():
        able = kinds_for(constrained=held.any)
        if able is not None and not able & model.kinds:
            raise RefusedField(
                field,
                "no engine of this gateway can constrain an answer in this way",
                hint=f"add one of these kinds: {', '.join(sorted(able))}",
            )
        return held
    return Constraint()


def _by_field(body: ChatRequest | CompletionRequest, form: CallForm) -> dict[str, Constraint]:
    found = {"structured_outputs": _structured(body)}
    found["response_format"] = Constraint(response_schema(body))
    if isinstance(body, ChatRequest):
        found["tool_choice"] = forced_call(body, form)
    return found


def _structured(body: ChatRequest | CompletionRequest) -> Constraint:
    wanted = body.structured_outputs
    if wanted is None:
        return Constraint()
    if (wanted.json is None) == (not wanted.regex):
        raise BadField("structured_outputs", "an answer has one constraint", hint="send `json` or `regex`")
    return Constraint("" if wanted.json is None else _schema_text(wanted.json), wanted.regex or "")


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, dict):
        return _json(schema)
    check_texts("`structured_outputs.json`", [schema])
    try:
        decode_json(schema, dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as e:
        raise BadField("structured_outputs.json", f"a JSON schema is an object: {e}") from e
    return schema


def response_schema(body: ChatRequest | CompletionRequest) -> str:
    """The JSON schema that constrains the answer, as text; empty for none."""
    wanted = body.response_format
    if wanted is None or wanted == {"type": "text"}:
        return ""
    if wanted == {"type": "json_object"}:
        return '{"type":"object"}'
    described = wanted.get("json_schema")
    if wanted.get("type") != "json_schema" or not isinstance(described, dict):
        raise RefusedField(
            "response_format",
            f"`response_format` of type {wanted.get('type')!r} is not supported",
            hint="'text', 'json_object', or 'json_schema' with its `json_schema`",
        )
    if not isinstance(schema := described.get("schema"), dict):
        raise BadField("response_format.json_schema.schema", "a JSON schema is an object")
    return _json(schema)


def forced_call(body: ChatRequest, form: CallForm) -> Constraint:
    """`tool_choice` "required", or the function that it names."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return Constraint()
    functions = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    if choice != "required":
        name = _named(choice)
        if name not in functions:
            raise BadField(
                "tool_choice", f"`tools` has no function {name!r}", hint=f"there are: {', '.join(functions) or 'none'}"
            )
        functions = {name: functions[name]}
    if not functions:
        raise BadField("tool_choice", "`tool_choice` 'required' needs `tools`")
    if not can_force(form.tools):
        raise RefusedField(
            "tool_choice",
            f"`tool_choice`={choice!r} is not supported: no engine has a grammar for this model's format of a call",
            hint="use 'auto', or request the arguments as the answer, with their JSON schema as `response_format`",
        )
    if form.tools in JSON_OBJECTS and form.thinks == "no":
        return Constraint(json_schema=_json({"anyOf": [_call_schema(*one) for one in functions.items()]}))
    if form.tools not in ("hermes", *JSON_OBJECTS) and (
        odd := [name for name in functions if not _PLAIN.fullmatch(name)]
    ):
        raise BadField(
            "tools",
            f"a call of {odd[0]!r} cannot be forced: this model writes names as they are, between marks",
            hint="name functions with letters, digits, '_', '-' and '.'",
        )
    return Constraint(structural_tag=structural_tag(form, functions))


def _named(choice: str | dict[str, Any] | None) -> str:
    described = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = described.get("name") if isinstance(described, dict) else None
    if not isinstance(name, str):
        raise BadField(
            "tool_choice",
            f"unknown `tool_choice` {choice!r}",
            hint='\'auto\', \'none\', \'required\', or {"type": "function", "function": {"name": ...}}',
        )
    return name


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters or {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
