"""Every error of the vocabulary crosses gRPC as what it is."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from paramserver.client import RelayClient
from protos import grpc_errors
from protos.errors import BY_CODE, LaminarError, NotFound, OutOfCapacity, Unavailable
from protos.laminar.v1 import relay_pb2_grpc as pb_grpc


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


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        (
            "last error: UNKNOWN: ipv6:%5B::1%5D:1: Failed to connect to remote host: Connection refused",
            "Connection refused",
        ),
        ("last error: UNAVAILABLE: ipv4:127.0.0.1:1: connect: Connection refused", "Connection refused"),
        ("last error: INTERNAL: ipv4:127.0.0.1:1: Failed parsing HTTP/2 (Expected SETTINGS)", "no gRPC"),
        (
            "last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
            "SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK",
            "its certificate is of no CA that the caller's credentials trust",
        ),
        (
            "last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
            "SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate verification context: OK",
            "what listens there speaks no TLS, and the caller has credentials",
        ),
        ("last error: UNKNOWN: something new", "last error: UNKNOWN: something new"),
    ],
)
def test_a_connection_that_fails_reads_the_same_whatever_address_was_tried(details: str, cause: str) -> None:
    details = f"failed to connect to all addresses; {details}"
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    message = grpc_errors.from_rpc_error(error, "h:1").message
    assert message.endswith(cause)
    assert message.startswith("no relay answers at h:1: ")
    assert "ipv" not in message


async def test_an_error_of_any_length_arrives_as_what_it_is() -> None:
    """gRPC drops trailers above 8 KiB, and with them what was wrong: an operator would read of metadata sizes."""
    long = NotFound("no model 'x' here, ✓ " * 5000, hint=", ".join(f"model-{n}" for n in range(5000)) + " 50% é" * 999)

    class Answers(pb_grpc.RelayServicer):
        async def Status(self, request: object, context: Any) -> None:  # noqa: N802
            await grpc_errors.abort(context, long)

    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    pb_grpc.add_RelayServicer_to_server(Answers(), server)
    await server.start()
    try:
        async with RelayClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(NotFound, match="no model 'x' here") as met:
                await client.status()
    finally:
        await server.stop(None)
    assert met.value.hint.startswith("model-0, model-1, ")
    assert met.value.message.endswith("...")
    assert met.value.hint.endswith("...")
