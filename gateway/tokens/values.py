"""JSON values from outside: parsed as JSON has it, bounded in depth, and with numbers that everything here can keep.

Python's parser takes more than JSON is (`NaN`, half a surrogate pair), gives up on depth with a RecursionError, and on
the digits of a number with a ValueError of its own; all of these are `NotJson` here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

DEPTH_MAX = 64
"""Lists and objects within each other. Schemas of tools have some ten; templates and grammars recurse over them."""
INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 64) - 1
"""What msgpack and the engines' parsers keep."""

_PLAIN = frozenset({str, float, bool, type(None)})
"""Kinds of which every value can be kept: nearly all fields of a body."""

_At = tuple[Any, Any] | None
"""Where a value stands: where its container stands, and its key there."""


class NotJson(ValueError):
    """Not JSON, or more of it than is taken."""


class OddValue(ValueError):
    """A value within a body that cannot be kept. `path` as error messages name it: `tools[0].function`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def _constant(name: str) -> float:
    raise NotJson(f"{name} is no JSON")


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise NotJson(f"{digits[:40]} is out of range")
    return value


decoder = json.JSONDecoder(parse_constant=_constant, parse_float=_number)


def parse(text: str) -> Any:
    """The value that all of `text` is. Raises NotJson."""
    value, end = parse_first(text.strip())
    if end != len(text.strip()):
        raise NotJson("something follows the value")
    return value


def parse_first(text: str) -> tuple[Any, int]:
    """The value that `text` begins with, and where it ends. Raises NotJson."""
    try:
        value, end = decoder.raw_decode(text)
        if nesting(value) > DEPTH_MAX:
            raise NotJson(f"nested more than {DEPTH_MAX} deep")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be written
    except NotJson:
        raise
    except (ValueError, RecursionError) as e:
        raise NotJson(str(e)) from e
    return value, end


def nesting(value: Any) -> int:
    """How many lists and objects stand within each other; of what is far too deep only that it is."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if isinstance(inner, dict | list):
            deepest = max(deepest, depth)
            if depth > DEPTH_MAX:
                break
            waiting.extend((each, depth + 1) for each in (inner.values() if isinstance(inner, dict) else inner))
    return deepest


def check(body: Any, *, leave: frozenset[str] = frozenset()) -> None:
    """Raises OddValue for what cannot be kept of a decoded body. `leave`: its fields that are checked elsewhere."""
    waiting: list[tuple[Any, _At, int]] = [(body, None, 0)]
    while waiting:
        value, at, depth = waiting.pop()
        for key, inner in _items(value):
            kind = type(inner)
            if kind in _PLAIN or (depth == 0 and key in leave):
                continue
            if kind is int and not INTEGER_MIN <= inner <= INTEGER_MAX:
                raise OddValue(_path((at, key)), "an integer of more than 64 bits")
            if kind in (dict, list) or isinstance(inner, msgspec.Struct):
                if depth >= DEPTH_MAX:
                    raise OddValue(_path((at, key))[:80], f"nested more than {DEPTH_MAX} deep")
                waiting.append((inner, (at, key), depth + 1))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        return iter(value.items())
    if isinstance(value, list):
        return iter(enumerate(value))
    return zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True)


def _path(at: _At) -> str:
    keys: list[str] = []
    while at is not None:
        at, key = at
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(keys)).removeprefix(".")
