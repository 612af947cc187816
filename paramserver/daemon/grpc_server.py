"""The gRPC server of a relay, and what whoever reaches its port can hold open.

gRPC's own options are the bounds with credentials: `CONNECTIONS_MAX` connections, the handshake of each within
`HANDSHAKE_MS`. Beyond the bound a connection is closed at once, and clients try again within a second. Where strangers
hold every place, a caller finds one in about every third try: docs/decisions/25 has the figures.
"""

from __future__ import annotations

import socket

import grpc
import grpc.aio

from paramserver.daemon.access import AccessInterceptor, server_credentials
from paramserver.data.engine_ports import open_files_max
from protos.access.credentials import Credentials
from protos.errors import Conflict
from protos.process import cannot_listen

CONNECTIONS_MAX = 4096
"""Relays, trainers' ranks, engines and gateways have a few each."""
HANDSHAKE_MS = 3_000
"""Of TLS and of HTTP/2; gRPC's own bound is two minutes. An honest caller takes milliseconds."""
OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port that is taken must be refused, not shared
    ("grpc.max_receive_message_length", 64 << 20),  # an announcement names every tensor
    ("grpc.keepalive_time_ms", 10_000),  # a publisher whose host vanished must not hold its run for ever
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute by default, and it rules over the one before
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # the clients' keepalive on idle watches is welcome
    ("grpc.http2.max_ping_strikes", 0),
]


def grpc_server(
    host: str, port: int, credentials: Credentials | None, *, connections_max: int | None = None
) -> tuple[grpc.aio.Server, int]:
    """A server that is not started yet, and its port. With `credentials` it takes holders of the fleet's certificates
    alone, and as many connections as this process's open files allow, unless `connections_max` is given. Raises
    Conflict where it cannot listen."""
    _check_free(host, port)
    address = f"{host}:{port}"
    try:
        if credentials is None:
            server = grpc.aio.server(options=OPTIONS)
            return server, server.add_insecure_port(address)
        most = min(CONNECTIONS_MAX, open_files_max() // 4) if connections_max is None else connections_max
        server = grpc.aio.server(
            interceptors=[AccessInterceptor(credentials)],
            options=[
                *OPTIONS,
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_allowed_incoming_connections", most),
            ],
        )
        return server, server.add_secure_port(address, server_credentials(credentials))
    except RuntimeError as error:
        raise Conflict(f"cannot listen on {address}", hint="choose another --port, or 0 for any free one") from error


def _check_free(host: str, port: int) -> None:
    """gRPC's own error has no reason. A port that is free it finds by itself: one that was tried here may be another's
    as soon as it is let go."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise cannot_listen(host, port, error) from error
