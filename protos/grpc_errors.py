"""LaminarErrors over gRPC: the code and hint travel in the trailing metadata, the status in the reply."""

from __future__ import annotations

import re
import urllib.parse
from typing import NoReturn

import grpc
import grpc.aio

from protos.errors import BY_CODE, LaminarError, OutOfCapacity, Unavailable, WrongServer

ENCODED_MAX = 3000  # bytes of a message, and of a hint: gRPC drops the trailers of more than 8 KiB
_LAST_ERROR = re.compile(r"last error: \w+: ipv[46]:\S+: (?:.*: )?([^:]+)$")
_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of no CA that the caller's credentials trust",
    "WRONG_VERSION_NUMBER": "what listens there speaks no TLS, and the caller has credentials",
}
"""What a handshake that failed means, by OpenSSL's name for it."""
_CODE, _HINT, _RETRY = "laminar-code", "laminar-hint", "laminar-retry-after-s"


def trailers(error: LaminarError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of an error. Values are ASCII, so the hint is percent-encoded."""
    found = [(_CODE, error.code), (_HINT, urllib.parse.quote(_cut(error.hint)))]
    if isinstance(error, OutOfCapacity):
        found.append((_RETRY, f"{error.retry_after_s:g}"))
    return tuple(found)


def status_of(error: LaminarError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_status]


async def abort(context: grpc.aio.ServicerContext[object, object], error: LaminarError) -> NoReturn:
    await context.abort(status_of(error), _cut(error.message), trailers(error))


def _cut(text: str) -> str:
    """The longest beginning of `text` whose percent-encoded form fits in trailers."""
    if len(urllib.parse.quote(text[:ENCODED_MAX])) <= ENCODED_MAX and len(text) <= ENCODED_MAX:
        return text
    size = 0
    for length, character in enumerate(text):
        size += len(urllib.parse.quote(character, errors="replace"))
        if size > ENCODED_MAX - 3:
            return text[:length] + "..."
    return text


def _cause(details: str) -> tuple[type[Unavailable], str]:
    """Why no connection was made, without the address that was tried last: it differs between tries."""
    for mark, meaning in _TLS.items():
        if mark in details:
            return WrongServer, meaning
    last = _LAST_ERROR.search(details)
    if last is None:
        return Unavailable, details
    return (WrongServer, "what listens there speaks no gRPC") if "HTTP/2" in last[1] else (Unavailable, last[1])


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> LaminarError:
    """The error that the server raised, or Unavailable when none of ours answered: WrongServer if another one did."""
    metadata = {str(key): value for key, value in (error.trailing_metadata() or ())}
    code = metadata.get(_CODE)
    if isinstance(code, str) and code in BY_CODE:
        found = BY_CODE[code](error.details() or "", hint=urllib.parse.unquote(str(metadata.get(_HINT, ""))))
        if isinstance(found, OutOfCapacity) and _RETRY in metadata:
            found.retry_after_s = float(str(metadata[_RETRY]))
        return found
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        kind, cause = _cause(error.details() or "")
        return kind(
            f"no relay answers at {address}: {cause}",
            hint="check the address, and the relay's log; it may want credentials of its fleet (LAMINAR_CREDENTIALS)",
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return WrongServer(f"{address} speaks gRPC but is not a relay", hint="give the relay's gRPC HOST:PORT")
    return LaminarError(f"{address} answered {error.code().name}: {error.details()}")
