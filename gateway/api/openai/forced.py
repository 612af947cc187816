"""Grammars of a forced tool call, as structural tags of xgrammar, which vLLM and SGLang have: one for each format.

The model chooses the function and its arguments, and where it reasons, what it reasons before; all else is fixed. What
a grammar allows is what `gateway.tokens.toolformats` parses.

A format that was written in several ways (DeepSeek's V3 and V3.1, Mistral's lists and names) has all of them: the model
takes the one that it learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.tokens.reasoning import TAGS, ReasoningFormat
from gateway.tokens.toolformats import (
    ARGS,
    CALL_BEGIN,
    CALL_END,
    CALL_ID,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    CLOSE,
    OPEN,
    TOOL_CALLS,
    ToolFormat,
)

Thinks = Literal["no", "may", "does"]
"""Whether reasoning comes before a call: "does" where the prompt has opened it."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the model writes a call, and what it writes before one; "none" where no call can be forced."""

    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"
    thinks: Thinks = "no"


NO_CALLS = CallForm()
Format = dict[str, Any]
Schema = Mapping[str, Any]


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


_MISTRAL_ID = _regex("[a-zA-Z0-9]{9}")


def _arguments(schema: Schema, style: str = "json") -> Format:
    found: Format = {"type": "json_schema", "json_schema": dict(schema) or {"type": "object"}}
    return found if style == "json" else {**found, "style": style}


def _hermes(name: str, schema: Schema) -> list[Format]:
    return [_tag(f'{OPEN}\n{{"name": {_json(name)}, "arguments": ', _arguments(schema), f"}}\n{CLOSE}")]


def _qwen_xml(name: str, schema: Schema) -> list[Format]:
    begin, end = f"{OPEN}\n<function={name}>\n", f"\n</function>\n{CLOSE}"
    return [_tag(begin, _arguments(schema, "qwen_xml"), end)]


def _glm(name: str, schema: Schema) -> list[Format]:
    return [_tag(f"{OPEN}{name}\n", _arguments(schema, "glm_xml"), f"\n{CLOSE}")]


def _deepseek(name: str, schema: Schema) -> list[Format]:
    begin, end = f"{CALLS_BEGIN}{CALL_BEGIN}", _optional(_const(CALLS_END))  # templates of R1's kin leave it out
    v3 = _tag(f"{begin}function{CALL_SEP}{name}\n```json\n", _arguments(schema), f"\n```{CALL_END}")
    v3_1 = _tag(f"{begin}{name}{CALL_SEP}", _arguments(schema), CALL_END)
    return [_sequence(v3, end), _sequence(v3_1, end)]


def _mistral(name: str, schema: Schema) -> list[Format]:
    list_of_one = f'[{{"name": {_json(name)}, "arguments": '
    in_list = _sequence(_const(', "id": "'), _MISTRAL_ID, _const('"'))
    v3 = (_const(TOOL_CALLS), _regex(" ?"), _const(list_of_one), _arguments(schema), _optional(in_list), _const("}]"))
    v11 = (_const(f"{TOOL_CALLS}{name}{CALL_ID}"), _MISTRAL_ID, _const(ARGS), _arguments(schema))
    v13 = (_const(f"{TOOL_CALLS}{name}{ARGS}"), _arguments(schema))
    return [_sequence(*v3), _sequence(*v11), _sequence(*v13)]


_CALLS: Mapping[ToolFormat, Callable[[str, Schema], list[Format]]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "glm": _glm,
    "deepseek": _deepseek,
    "mistral": _mistral,
}


JSON_OBJECTS: tuple[ToolFormat, ...] = ("llama", "llama4")
"""Formats with calls that are JSON alone; of Llama 4's two, the one that a schema describes."""


def can_force(form: ToolFormat) -> bool:
    return form in JSON_OBJECTS or form in _CALLS


def structural_tag(form: CallForm, functions: Mapping[str, Schema]) -> str:
    """The structural tag, as JSON, of one call of any of `functions`: names, and the schemas of their arguments."""
    calls = [call for name, schema in functions.items() for call in _of(form.tools, name, schema)]
    call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    if form.thinks != "no":
        call = _sequence(*_thought(form), call)
    return _json({"type": "structural_tag", "format": call})


def _of(form: ToolFormat, name: str, schema: Schema) -> Sequence[Format]:
    if form in JSON_OBJECTS:
        return [_tag(f'{{"name": {_json(name)}, "parameters": ', _arguments(schema), "}")]
    return _CALLS[form](name, schema)


def _thought(form: CallForm) -> list[Format]:
    """Reasoning up to its closing tag, and the lines that a template puts behind it."""
    begin, end = TAGS[form.reasoning]
    closed = _tag("" if form.thinks == "does" else begin, {"type": "any_text"}, end)
    found = [closed, _regex("\\n{0,2}")]
    return found if form.thinks == "does" else [_optional(_sequence(*found))]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
