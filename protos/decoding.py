"""Decoding by type with msgspec, from any thread.

msgspec builds its description of a Struct when it first decodes one, and releases the interpreter's lock meanwhile. A
second thread that decodes the same type at that time follows a null pointer, and the process dies (seen with 0.22, in
a relay that received its first manifests on two connections at once). So decoders are made one at a time, and cached.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_making = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


@overload
def decode_json(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T: ...
@overload
def decode_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any: ...
def decode_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any:
    """As `msgspec.json.decode(data, type=kind)`, with its errors."""
    decoder = _json.get(kind)
    if decoder is None:
        with _making:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder.decode(data)


@overload
def decode_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T: ...
@overload
def decode_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any: ...
def decode_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """As `msgspec.msgpack.decode(data, type=kind)`, with its errors."""
    decoder = _msgpack.get(kind)
    if decoder is None:
        with _making:
            decoder = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)
