"""A relay's gRPC port with access control, in the test's own event loop; and peers that speak TLS by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paramserver.daemon.grpc_server import grpc_server
from protos.access.credentials import Credentials
from protos.laminar.v1 import relay_pb2_grpc as pb_grpc
from tests.support.fake_relay import FakeRelay
from tests.support.tls_endings import ending


@contextlib.asynccontextmanager
async def secured(
    credentials: Credentials, port: int = 0, *, connections_max: int | None = None
) -> AsyncIterator[tuple[FakeRelay, str]]:
    """A fake relay behind the daemon's own access control and bounds, with its health and reflection; its address."""
    found = FakeRelay()  # type: ignore[abstract]  # what no test calls is left out
    server, found.port = grpc_server("127.0.0.1", port, credentials, connections_max=connections_max)
    pb_grpc.add_RelayServicer_to_server(found, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection((health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    await server.start()
    try:
        yield found, f"127.0.0.1:{found.port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def tls_server(holder: Path) -> AsyncIterator[str]:
    """The address of something that serves with that certificate, whosever it is, and takes every client."""
    server, found = grpc.aio.server(), FakeRelay()  # type: ignore[abstract]
    pb_grpc.add_RelayServicer_to_server(found, server)
    pair = ((holder / "key.pem").read_bytes(), (holder / "cert.pem").read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def handshake(address: str, context: ssl.SSLContext) -> str:
    """What a TLS client met: "served" if the server sent it HTTP/2, else how it ended."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=60.0) as sock,
            context.wrap_socket(sock, server_hostname=host) as tls,
        ):
            # With TLS 1.3 a client is done before the server has seen its certificate: only reading shows the outcome.
            return "served" if tls.recv(1) else "closed"
    except (ssl.SSLError, ConnectionError) as error:
        return ending(error)


def client_context(
    trusts: Path, holder: Path | None = None, *, most: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED
) -> ssl.SSLContext:
    """A TLS client's, with the certificate of `holder`; `most`: the newest TLS that it speaks."""
    context = ssl.create_default_context(cafile=str(trusts / "ca.pem"))
    context.set_alpn_protocols(["h2"])
    if holder is not None:
        context.load_cert_chain(holder / "cert.pem", holder / "key.pem")
    with warnings.catch_warnings():  # of old versions, which are what is tried
        warnings.simplefilter("ignore", DeprecationWarning)
        if most <= ssl.TLSVersion.TLSv1_1:
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = most
    return context


async def in_thread(address: str, context: ssl.SSLContext) -> str:
    return await asyncio.to_thread(handshake, address, context)
