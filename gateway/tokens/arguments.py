"""Arguments of calls that a model wrote as text, each as the type that the tool's JSON schema gives it. Pure."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tokens.values import NotJson, parse

Tool = Mapping[str, Any]
"""An OpenAI tool: {"type": "function", "function": {...}}."""

SCHEMAS_MAX = 100
"""Schemas that are looked at for one parameter: a `$ref` may lead back to where it stands."""

_PYTHON = {"True": True, "False": False, "None": None}


def properties_of(tool: Tool) -> tuple[Mapping[str, Any], Any]:
    """The schemas of a tool's parameters by name, and the schema that their references point into."""
    schema = (tool.get("function") or {}).get("parameters")
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return (found if isinstance(found, Mapping) else {}), schema


def typed(pairs: Sequence[tuple[str, str]], tool: Tool) -> dict[str, Any]:
    known, root = properties_of(tool)
    return {key: _value(text, _kinds(known.get(key), root)) for key, text in pairs}


def _value(text: str, kinds: set[str]) -> Any:
    """`kinds`: the types that the schema allows, none where it does not say. What is of no such type stays text."""
    if "string" in kinds:
        return None if "null" in kinds and text in ("null", "None") else text
    if text in _PYTHON and (not kinds or kinds & {"boolean", "null"}):
        return _PYTHON[text]
    try:
        return parse(text, strict=False)
    except NotJson:
        if not kinds & {"array", "object"}:
            return text
    try:
        return literal(expression(text.strip()))
    except NotJson:
        return text


def expression(text: str) -> ast.expr:
    """A Python expression, parsed and not run. Raises NotJson, as `literal` does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know, which stay as they are
            return ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError, RecursionError, MemoryError) as e:
        raise NotJson(str(e)) from e


def literal(written: ast.expr) -> Any:
    """The value of a Python literal, if JSON has it; else raises NotJson."""
    try:
        return parse(json.dumps(ast.literal_eval(written), ensure_ascii=False))
    except (ValueError, TypeError, RecursionError, MemoryError) as e:
        raise NotJson(str(e)) from e


def _kinds(schema: Any, root: Any) -> set[str]:
    found: set[str] = set()
    waiting = [schema]
    for _ in range(SCHEMAS_MAX):
        if not waiting:
            break
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        kind = schema.get("type")
        found |= {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
        if any(isinstance(value, str) for value in (*_listed(schema.get("enum")), schema.get("const"))):
            found.add("string")
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += _listed(schema.get(name))
        if isinstance(schema.get("$ref"), str):
            waiting.append(_referred(schema["$ref"], root))
    return found


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _referred(pointer: str, root: Any) -> Any:
    """What a JSON pointer within the tool's own schema leads to; None for any other reference."""
    if not pointer.startswith("#"):
        return None
    found = root
    for key in pointer[1:].split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key.replace("~1", "/").replace("~0", "~"))
    return found
