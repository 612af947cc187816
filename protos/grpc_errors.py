"""How a LaminarError crosses gRPC: its code and hint in the trailing metadata, its status in the reply."""

from __future__ import annotations

import urllib.parse
from typing import NoReturn

import grpc
import grpc.aio

from protos.errors import BY_CODE, LaminarError, OutOfCapacity, Unavailable

_CODE, _HINT, _RETRY = "laminar-code", "laminar-hint", "laminar-retry-after-s"


def trailers(error: LaminarError) -> tuple[tuple[str, str], ...]:
    """Metadata values are ASCII: the hint is percent-encoded."""
    found = [(_CODE, error.code), (_HINT, urllib.parse.quote(error.hint))]
    if isinstance(error, OutOfCapacity):
        found.append((_RETRY, f"{error.retry_after_s:g}"))
    return tuple(found)


def status_of(error: LaminarError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_status]


async def abort(context: grpc.aio.ServicerContext[object, object], error: LaminarError) -> NoReturn:
    await context.abort(status_of(error), error.message, trailers(error))


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> LaminarError:
    """The error that the server raised, or Unavailable when no server of ours answered."""
    metadata = {str(key): value for key, value in (error.trailing_metadata() or ())}
    code = metadata.get(_CODE)
    if isinstance(code, str) and code in BY_CODE:
        found = BY_CODE[code](error.details() or "", hint=urllib.parse.unquote(str(metadata.get(_HINT, ""))))
        if isinstance(found, OutOfCapacity) and _RETRY in metadata:
            found.retry_after_s = float(str(metadata[_RETRY]))
        return found
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(
            f"no relay answers at {address}: {error.details()}", hint="check the address, and that the relay runs"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"{address} speaks gRPC but is not a relay", hint="give the relay's gRPC HOST:PORT")
    return LaminarError(f"{address} answered {error.code().name}: {error.details()}")
