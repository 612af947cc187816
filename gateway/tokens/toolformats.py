"""The formats of tool calls that models write: the marks around a call, and the parser of what stands between. Pure.

- `hermes` (Hermes, Qwen 2.5 and 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`;
- `qwen_xml` (Qwen3-Coder, Qwen 3.5 and later):
  `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`;
- `glm` (GLM-4.5 and later): `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`;
- `deepseek` (V3, R1, V3.1): a name and JSON arguments between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`;
- `mistral`: `[TOOL_CALLS]` and a JSON list of calls, or `[TOOL_CALLS]NAME[ARGS]{...}` for each;
- `llama` (Llama 3): the whole answer is `{"name": ..., "parameters": {...}}`, or several joined by `;`; or, after
  `<|python_tag|>`, the same or `NAME.call(KEY=VALUE)`.

Invariant: a parser returns calls only for text that is complete; for any other it returns None.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.tokens.values import NotJson, parse, parse_first

ToolFormat = Literal["hermes", "qwen_xml", "glm", "deepseek", "mistral", "llama", "none"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
FUNCTION = "<function="
ARG_KEY = "<arg_key>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, CALL_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKERS = (
    *(OPEN, CLOSE, PYTHON_TAG, TOOL_CALLS, ARGS, CALL_ID, CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, CALL_SEP),
    *(ARG_KEY, "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""Tokens that a parser has to see even where the vocabulary declares them special."""

Call = tuple[str, str]
"""A name and its arguments as JSON text."""
Tool = Mapping[str, Any]
"""An OpenAI tool: {"type": "function", "function": {...}}."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """`close` None: calls are the end of an answer. `before`, `after`: marks around a run of calls.

    `ends_itself`: a complete call is one without its closing mark, too: the model may end its turn instead.
    """

    open: str
    close: str | None
    parse: Callable[[str, Sequence[Tool]], list[Call] | None]
    before: str = ""
    after: str = ""
    ends_itself: bool = True


def _calls(values: list[Any]) -> list[Call] | None:
    calls: list[Call] = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        calls.append((value["name"], arguments if isinstance(arguments, str) else _json(arguments)))
    return calls or None


def _hermes(text: str, tools: Sequence[Tool]) -> list[Call] | None:
    """An object, or a list of them (SmolLM2)."""
    try:
        value = parse(text)
    except NotJson:
        return None
    return _calls(value if isinstance(value, list) else [value])


def _qwen_xml(text: str, tools: Sequence[Tool]) -> list[Call] | None:
    head, found, rest = text.strip().removeprefix(FUNCTION).partition(">")
    body = rest.rstrip()
    if not (text.lstrip().startswith(FUNCTION) and found and head and body.endswith("</function>")):
        return None
    pairs: list[tuple[str, str]] = []
    at, end = 0, len(body) - len("</function>")
    while at < end:
        if body[at].isspace():
            at += 1
            continue
        if not body.startswith("<parameter=", at):
            return None
        key_end = body.find(">", at)
        close = _parameter_end(body, key_end, end)
        if key_end < 0 or close < 0:
            return None
        value = body[key_end + 1 : close].removeprefix("\n").removesuffix("\n")
        pairs.append((body[at + len("<parameter=") : key_end], value))
        at = close + len("</parameter>")
    return [(head, _typed(head, pairs, tools))]


def _parameter_end(body: str, start: int, end: int) -> int:
    """Of the `</parameter>` that another parameter or the function's end follows: a value may hold others."""
    close = body.find("</parameter>", start, end)
    while close >= 0:
        after = body[close + len("</parameter>") :].lstrip()
        if after.startswith(("<parameter=", "</function>")):
            return close
        close = body.find("</parameter>", close + 1, end)
    return -1


def _glm(text: str, tools: Sequence[Tool]) -> list[Call] | None:
    name, found, rest = text.partition(ARG_KEY)
    name = name.strip()
    if not name or any(mark in name for mark in "<>\n"):
        return None
    pairs: list[tuple[str, str]] = []
    while found:
        key, closed, rest = rest.partition("</arg_key>")
        begins, value_found, rest = rest.partition("<arg_value>")
        value, value_closed, rest = rest.partition("</arg_value>")
        if not (closed and value_found and value_closed) or begins.strip():
            return None
        pairs.append((key.strip(), value))
        between, found, rest = rest.partition(ARG_KEY)
        if between.strip():
            return None
    return [(name, _typed(name, pairs, tools))]


def _deepseek(text: str, tools: Sequence[Tool]) -> list[Call] | None:
    """V3 and R1: a type, a name, and the arguments in a fence. V3.1: a name and the arguments."""
    first, found, second = text.partition(CALL_SEP)
    if not found:
        return None
    name, arguments = first.strip(), second.strip()
    if "```" in second:
        name, fence, rest = second.partition("```json")
        if not fence or not rest.rstrip().endswith("```"):
            return None
        name, arguments = name.strip(), rest.rstrip().removesuffix("```").strip()
    return None if not name or "\n" in name else _with_object(name, arguments)


def _mistral(text: str, tools: Sequence[Tool]) -> list[Call] | None:
    calls: list[Call] = []
    for part in text.split(TOOL_CALLS):
        name, found, arguments = part.partition(ARGS)
        if found:
            one = _with_object(name.partition(CALL_ID)[0].strip(), arguments.strip())
        else:
            one = _hermes(part, tools)
        if one is None:
            return None
        calls += one
    return calls


def _with_object(name: str, arguments: str) -> list[Call] | None:
    try:
        value = parse(arguments)
    except NotJson:
        return None
    return [(name, _json(value))] if name and isinstance(value, dict) else None


_BUILT_IN = re.compile(r"[A-Za-z_]\w*\.call\(")


def _llama(text: str, tools: Sequence[Tool]) -> list[Call] | None:
    rest, values = text.strip().removeprefix(PYTHON_TAG).lstrip(), []
    if _BUILT_IN.match(rest):
        return _called(rest)
    while rest:
        try:
            value, end = parse_first(rest)
        except NotJson:
            return None
        values.append(value)
        rest = rest[end:].lstrip().removeprefix(";").lstrip().removeprefix(PYTHON_TAG)
    return _calls(values)


def _called(text: str) -> list[Call] | None:
    """`NAME.call(KEY=VALUE, ...)`, with constants as values: parsed as Python, and never run."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.args:
            return None
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        if not isinstance(call.func.value, ast.Name) or len(arguments) != len(call.keywords):
            return None
        return _with_object(call.func.value.id, _json(arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


SYNTAX: Mapping[ToolFormat, Syntax] = {
    "hermes": Syntax(OPEN, CLOSE, _hermes),
    "qwen_xml": Syntax(OPEN, CLOSE, _qwen_xml),
    "glm": Syntax(OPEN, CLOSE, _glm, ends_itself=False),
    "deepseek": Syntax(CALL_BEGIN, CALL_END, _deepseek, before=CALLS_BEGIN, after=CALLS_END),
    "mistral": Syntax(TOOL_CALLS, None, _mistral),
    "llama": Syntax(PYTHON_TAG, None, _llama),
}


def format_of(source: str) -> ToolFormat:
    """The format that a chat template writes calls in, by its marks; "none" for one that is not known."""
    if FUNCTION in source and "<parameter=" in source:
        return "qwen_xml"
    if ARG_KEY in source:
        return "glm"
    if OPEN in source:
        return "hermes"
    if CALL_BEGIN in source:
        return "deepseek"
    if TOOL_CALLS in source:
        return "mistral"
    return "llama" if PYTHON_TAG in source or '"parameters"' in source else "none"


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> str:
    """Arguments that were written as text, each as the type that the tool's schema gives it."""
    functions = (tool.get("function") or {} for tool in tools)
    described = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    properties = described.get("properties") if isinstance(described, Mapping) else None
    known = properties if isinstance(properties, Mapping) else {}
    return _json({key: _value(text, known.get(key)) for key, text in pairs})


_PYTHON = {"True": True, "False": False, "None": None}


def _value(text: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if "string" in kinds:
        return None if "null" in kinds and text in ("null", "None") else text
    if text in _PYTHON and (not kinds or kinds & {"boolean", "null"}):
        return _PYTHON[text]
    try:
        return parse(text)
    except NotJson:
        return text


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = (
        {kind}
        if isinstance(kind, str)
        else {k for k in kind if isinstance(k, str)}
        if isinstance(kind, list)
        else set()
    )
    if any(isinstance(value, str) for value in schema.get("enum") or ()):
        found.add("string")
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            found |= _kinds(each)
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
