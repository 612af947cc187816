"""JSON bodies of every route: a request's becomes a struct, or an error with the path of what does not fit; a struct
becomes a response. The served schema is made from the same structs.

Invariants:
- a body is decoded only if what it takes decoded is bounded (`check_decoded`): the decoder makes all of it in one call,
  which no other thread interrupts;
- what is long is priced, decoded and checked beside the event loop (`within`), so every route reads its body by `read`
  or `within`.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from aiohttp import web
from msgspec import Meta, inspect

from gateway.api.errors import BadField, BodyTooLarge, RefusedField
from gateway.runtime.aside import aside
from gateway.tokens import values
from protos.errors import InvalidRequest

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
EXACT_MAX = 2**53 - 1
"""The largest integer that every JSON reader keeps exact, as the database does."""

Count = Annotated[int, Meta(ge=0, le=EXACT_MAX)]
"""A number of things, or an index from 0."""
AtLeastOne = Annotated[int, Meta(ge=1, le=EXACT_MAX)]

AT_ONCE_BYTES = 32 << 10
"""A longer body is decoded in a thread: of small values, it takes some 5 ms."""
DECODED_BYTES_MAX = 40 << 20
"""What a body may take decoded, unless --body-bytes-max is more: a million token ids. It is time as well: the decoder
takes some 0.6 ns a byte, for text, ids and small objects alike."""
OBJECT_BYTES, LIST_BYTES, STRING_BYTES, NUMBER_BYTES = 180, 68, 60, 4
"""Of CPython 3.11: an object of up to five fields, an empty list, a short string; of a number, each of its digits and
the comma behind it, since short ones are shared."""
KEY_BYTES, SMALL_KEY_BYTES = 200, 80
"""What a key takes besides its text: some 100 bytes in an object of many, and twice their time to find its place; less
in a small object, whose table stays in the processor's cache."""
TEXT_BYTES_MAX = 8 << 20
"""What JSON in one text of a body may take decoded. Python's own parser reads it, in one call, and two to three times
as long as the body's takes."""
ESCAPE_BYTES = 4
"""What decoding an escape takes longer than a byte of text."""
NULLS_BYTES_MAX = 1 << 20
"""Of a body whose unknown fields are looked through for nulls."""
_PIECE_BYTES = 256 << 10
_SMALL_OBJECT = re.compile(rb"\{[^{}\[\]]{0,128}\}")
_WIDE = re.compile(rb"[\xf0-\xf4]|\\u[dD][89abAB]")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")

_AT = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_CHOICE = re.compile(r"Invalid enum value")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def decode(decoder: msgspec.json.Decoder[S], raw: bytes, *, unchecked: frozenset[str] = frozenset()) -> S:
    """The body as its struct. Raises BadField or RefusedField with the path of what does not fit.

    `unchecked`: fields whose numbers the caller checks itself.
    """
    try:
        decoded = decoder.decode(raw)
        values.check(decoded, leave=unchecked)
        return decoded
    except values.OddValue as e:
        raise BadField(e.path, f"`{e.path}`: {e}") from e
    except RecursionError as e:
        raise InvalidRequest(f"the body is nested more than {values.DEPTH_MAX} deep") from e
    except msgspec.ValidationError as e:
        if _UNKNOWN.search(str(e)) and (cleaned := _without_unknown_nulls(raw, decoder.type)) is not None:
            return decode(decoder, cleaned, unchecked=unchecked)
        raise _explain(str(e), decoder.type) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        if _cuts_a_character(e, raw):
            raise InvalidRequest(
                "the body has half of a surrogate pair, which is no character",
                hint="a text was cut within a character such as an emoji: cut between characters, or send U+FFFD",
            ) from e
        raise InvalidRequest(f"the body is not JSON: {e}", hint="send a JSON object") from e


def _without_unknown_nulls(raw: bytes, kind: type[msgspec.Struct]) -> bytes | None:
    """The body without the unknown fields that are null, which is the same as no field. None: it has none of these, or
    is too long to be read in this slow way."""
    if len(raw) > NULLS_BYTES_MAX:
        return None
    try:
        body = json.loads(raw)
        cleaned = _known(body, _fields_of(kind))
        return None if cleaned == body else json.dumps(cleaned).encode()
    except (ValueError, RecursionError):  # no JSON, which the other fields' errors say better
        return None


@functools.cache
def _fields_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _known(value: Any, kind: inspect.Type) -> Any:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for each in kinds:
        if isinstance(each, inspect.StructType) and isinstance(value, dict):
            fields = {field.encode_name: field.type for field in each.fields}
            shown = {name: inner for name, inner in value.items() if inner is not None or name in fields}
            return {name: _known(inner, fields[name]) if name in fields else inner for name, inner in shown.items()}
        if isinstance(each, inspect.ListType) and isinstance(value, list):
            return [_known(inner, each.item_type) for inner in value]
    return value


def _cuts_a_character(error: Exception, raw: bytes) -> bool:
    """Whether the decoder failed on half of a surrogate pair. Near the body's end it takes it for a cut body."""
    if isinstance(error, UnicodeDecodeError):
        return error.object[error.start : error.start + 1] == b"\xed"
    return "surrogate" in str(error) or ("truncated" in str(error) and bool(_LONE_SURROGATE.search(raw[-12:])))


async def read(request: web.Request, decoder: msgspec.json.Decoder[S], *, default: Callable[[], S] | None = None) -> S:
    """The request's body as its struct; `default`: of a request without one. Raises as `decode` and `within`."""
    raw = await request.read()
    return default() if default and not raw else await within(request, raw, lambda: decode(decoder, raw))


async def within(request: web.Request, raw: bytes, work: Callable[[], T]) -> T:
    """What `work` makes of `raw`, the request's body: beside the event loop, if that is long. BodyTooLarge where it
    would take too much decoded."""

    def bounded() -> T:
        check_decoded(raw, max(DECODED_BYTES_MAX, request.client_max_size))
        return work()

    return await aside(bounded, long=len(raw) > AT_ONCE_BYTES)


def check_decoded(raw: bytes, most: int) -> None:
    """Raises BodyTooLarge for JSON that may take more than `most` bytes decoded."""
    if len(raw) * OBJECT_BYTES > most and _decoded_bytes(raw, most) > most:
        raise BodyTooLarge(
            f"the body of {len(raw)} bytes would take more than {most >> 20} MiB decoded, by its texts' length and "
            "its values' number",
            hint="send less at once, or start the gateway with a higher --body-bytes-max",
        )


def check_texts(what: str, texts: Sequence[str]) -> None:
    """Raises BodyTooLarge for texts, named by `what`, of which one may take too much as JSON, or all together."""
    if sum(map(len, texts)) * OBJECT_BYTES <= TEXT_BYTES_MAX:
        return
    taken = 0
    for text in texts:
        own = _decoded_bytes(text.encode(), TEXT_BYTES_MAX, in_text=True)
        taken += own
        if own > TEXT_BYTES_MAX or taken > DECODED_BYTES_MAX:
            most = TEXT_BYTES_MAX if own > TEXT_BYTES_MAX else DECODED_BYTES_MAX
            raise BodyTooLarge(f"{what} would take more than {most >> 20} MiB decoded", hint="send less")


def _decoded_bytes(raw: bytes, most: int, *, in_text: bool = False) -> int:
    """About what JSON takes decoded: its values by their number, text by the widest of its characters, since one of
    them widens its whole string. Beyond `most` only that it is more. It works in pieces.

    `in_text`: what bounds it is the time of Python's parser, for which no text is wide and no object small."""
    taken, num_escapes, width, in_string, begin = 0, 0, 1, False, 0
    while begin < len(raw) and taken <= most:
        piece = raw[begin : begin + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # no escape is cut
            piece = raw[begin : begin + _PIECE_BYTES + 1]
        if not in_text and (not piece.isascii() or b"\\u" in piece):
            width = max(width, 4 if _WIDE.search(raw, begin, begin + len(piece) + 4) else 2)
        begin += len(piece)
        if num := piece.count(b"\\"):
            num_escapes += num
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[in_string::2]).translate(None, b" \t\r\n")
        in_string ^= len(parts) % 2 == 0
        taken += outside.count(b"{") * OBJECT_BYTES + outside.count(b"[") * LIST_BYTES
        keys = outside.count(b":")
        dear = keys if in_text else _SMALL_OBJECT.sub(b"", outside).count(b":")
        taken += dear * KEY_BYTES + (keys - dear) * SMALL_KEY_BYTES
        taken += (len(outside) + outside.count(b",")) * NUMBER_BYTES + len(parts) // 2 * STRING_BYTES
    return taken + len(raw) * width + num_escapes * ESCAPE_BYTES


def answer_json(answer: object, status: int = 200) -> web.Response:
    """The response with `answer`, a struct of the served schema, as its body."""
    body = msgspec.json.encode(answer)
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")


def json_pieces(outer: msgspec.Struct, field: str, items: Iterable[object]) -> Iterator[bytes]:
    """The JSON of `outer`, whose `field` is an empty list, with the items in that list."""
    name = msgspec.json.encode(field) + b":["  # which no text of another field has: quotes are escaped there
    begin, end = msgspec.json.encode(outer).split(name + b"]", 1)
    yield begin + name
    for number, item in enumerate(items):
        yield (b"," if number else b"") + msgspec.json.encode(item)
    yield b"]" + end


def msgpack_pieces(outer: msgspec.Struct, num: int, items: Iterable[object]) -> Iterator[bytes]:
    """As `json_pieces`, of `num` items in the last field."""
    yield msgspec.msgpack.encode(outer)[:-1] + b"\xdd" + num.to_bytes(4, "big")
    for item in items:
        yield msgspec.msgpack.encode(item)


def _some(pieces: Iterator[bytes]) -> bytes:
    """The next ones, together."""
    found: list[bytes] = []
    size = 0
    while size < _PIECE_BYTES and (piece := next(pieces, b"")):
        found.append(piece)
        size += len(piece)
    return b"".join(found)


async def answer_pieces(
    request: web.Request, pieces: Iterator[bytes], *, long: bool, content_type: str = "application/json"
) -> web.StreamResponse:
    """The response with these pieces as its body. A long one is made piece by piece in a thread, as fast as its client
    takes it: a thousand branches of a long history are hundreds of megabytes."""
    charset = "utf-8" if content_type == "application/json" else None
    if not long:
        return web.Response(body=b"".join(pieces), content_type=content_type, charset=charset)
    response = web.StreamResponse()
    response.content_type, response.charset = content_type, charset
    await response.prepare(request)
    while piece := await asyncio.to_thread(_some, pieces):
        await response.write(piece)
    await response.write_eof()
    return response


def _explain(message: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec's message with the field's path, and the nearest name for a misspelt field."""
    at = _AT.search(message)
    path = at["path"] if at else ""
    what = message[: at.start()] if at else message
    if unknown := _UNKNOWN.search(what):
        known = kind.__struct_fields__ if not path else ()
        near = difflib.get_close_matches(unknown["name"], known, n=1)
        param = f"{path}.{unknown['name']}" if path else unknown["name"]
        return RefusedField(
            param, f"unknown field `{param}`", hint=f"did you mean `{near[0]}`?" if near else "leave it out"
        )
    if missing := _MISSING.search(what):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return BadField(param, f"the required field `{param}` is missing")
    wrong = ("one of its names: " if at and at["key"] else "") + what[0].lower() + what[1:]
    if not path:
        return InvalidRequest(f"the body: {wrong}")
    choices = _choices(kind, path) if _CHOICE.match(what) else []
    return BadField(path, f"`{path}`: {wrong}", hint=f"one of {', '.join(choices)}" if choices else "")


def _choices(kind: type[msgspec.Struct], field: str) -> list[str]:
    """The values of a field at the top of the body, where it is an enumeration."""
    return [value for found in msgspec.structs.fields(kind) if found.encode_name == field for value in _of(found.type)]


def _of(hint: Any) -> list[str]:
    """The values of the literals in a type, such as `Annotated[Literal[...] | None, ...]`."""
    within = get_args(hint)
    return list(map(str, within)) if get_origin(hint) is Literal else [value for one in within for value in _of(one)]


Number = TypeVar("Number", int, float)


def in_range(name: str, value: Number | None, low: Number, high: Number | None) -> Number | None:
    """The value, or None if it is absent. Raises BadField, with the range, for any other."""
    if value is not None and (not value >= low or (high is not None and value > high)):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise BadField(name, f"`{name}`={value} is out of range", hint=allowed)
    return value
