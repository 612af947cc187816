"""JSON values from outside: strictly parsed, bounded in depth, and with numbers that everything here can store.

Python's parser accepts more than JSON (`NaN`, half a surrogate pair), fails on depth with a RecursionError, and on the
digits of a number with a ValueError of its own; all of these are `NotJson` here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

DEPTH_MAX = 64
"""Lists and objects within each other. Tools' schemas have about ten; templates and grammars recurse over them."""
INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 64) - 1
"""The range of msgpack and of the engines' parsers."""

_PLAIN = frozenset({str, float, bool, type(None)})
"""Types whose every value can be stored: nearly all fields of a body."""

_At = tuple[Any, Any] | None
"""The position of a value: that of its container, and its key there."""


class NotJson(ValueError):
    """Not JSON, or nested too deep."""


class OddValue(ValueError):
    """A value within a body that cannot be stored. `path` as in error messages: `tools[0].function`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def _constant(name: str) -> float:
    raise NotJson(f"{name} is not JSON")


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise NotJson(f"{digits[:40]} is out of range")
    return value


decoder = json.JSONDecoder(parse_constant=_constant, parse_float=_number)
_lenient = json.JSONDecoder(parse_constant=_constant, parse_float=_number, strict=False)


def parse(text: str, *, strict: bool = True) -> Any:
    """The value that all of `text` is. Raises NotJson. Not `strict`: strings may hold line breaks as they are."""
    text = text.strip()
    try:
        value, end = (decoder if strict else _lenient).raw_decode(text)
        if end != len(text):
            raise NotJson("something follows the value")
        if nesting(value) > DEPTH_MAX:
            raise NotJson(f"nested more than {DEPTH_MAX} deep")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be written
    except NotJson:
        raise
    except (ValueError, RecursionError) as e:
        raise NotJson(str(e)) from e
    return value


def nesting(value: Any) -> int:
    """The depth of lists and objects within each other; beyond `DEPTH_MAX` only that it is more."""
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
    """Raises OddValue for a value of a decoded body that cannot be stored. `leave`: fields checked elsewhere."""
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
