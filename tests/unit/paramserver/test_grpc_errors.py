"""Every error of the vocabulary crosses gRPC as what it is."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from protos import grpc_errors
from protos.errors import BY_CODE, LaminarError, OutOfCapacity, Unavailable


def over_the_wire(error: LaminarError) -> LaminarError:
    trailing = grpc.aio.Metadata(*grpc_errors.trailers(error))
    rpc_error = grpc.aio.AioRpcError(grpc_errors.status_of(error), grpc.aio.Metadata(), trailing, error.message)
    return grpc_errors.from_rpc_error(rpc_error, "h:1")


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_code_message_and_hint_survive(code: str) -> None:
    found = over_the_wire(BY_CODE[code]("wrong: é", hint="right: 50% ✓"))
    assert (type(found), found.message, found.hint) == (BY_CODE[code], "wrong: é", "right: 50% ✓")


def test_when_to_retry_survives() -> None:
    found = over_the_wire(OutOfCapacity("full", retry_after_s=2.5))
    assert isinstance(found, OutOfCapacity)
    assert found.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, "no relay answers at h:1"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "no relay answers at h:1"),
        (grpc.StatusCode.UNIMPLEMENTED, "not a relay"),
    ],
)
def test_what_is_not_ours_is_unavailable(status: grpc.StatusCode, words: str) -> None:
    error = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), "detail")
    found = grpc_errors.from_rpc_error(error, "h:1")
    assert isinstance(found, Unavailable)
    assert words in found.message
