"""The gRPC port of a relay with credentials, as others reach it: it bounds the connections, and passes their bytes on.

gRPC bounds no connections by itself, and nothing of it says which of them have proven who they are. So it listens on a
unix socket that is for this process, and this port connects to it, once for each connection that it takes.

Invariants:
- TLS, certificates and roles are gRPC's: this port cannot read what it passes;
- a connection is a stranger's until a call on it has passed access control, and makes way as
  `protos.access.connections` says;
- an end that does not read holds back the other: beside the transports' buffers nothing is kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import grpc.aio

from paramserver.background import RareLines
from paramserver.daemon.access import AccessInterceptor, server_credentials
from paramserver.data.engine_ports import EnginePort, open_files_max
from paramserver.data.splice import keep_alive
from protos.access.connections import Bound, ConnectionCounts, Connections
from protos.access.credentials import Credentials

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 4096
"""Relays, trainers' ranks, engines and gateways have a few each."""
PER_ADDRESS_MAX = 256
"""Of one address: a host with eight ranks, their engines and a gateway has some forty."""
STRANGER_S = 0.5
"""A flood that fills all places in less turns some callers away, who try again; a longer time would turn away more of
them, a shorter one would end their handshakes on a busy host."""
FILES_EACH = 3
"""The connection, and both ends of the one to gRPC."""
CLOSING_S = 10.0
"""For the last bytes to a caller that may not read them."""
HANDSHAKE_MS = 5_000
"""Of TLS; gRPC's own bound is two minutes. An honest caller takes milliseconds."""
BACKLOG = 512
"""Connections that the kernel holds until they are accepted."""
_BOUNDS: Mapping[Bound, str] = {"total": "too many are open", "per_address": "too many of its address are open"}


def secured_server(
    credentials: Credentials,
    listener: socket.socket,
    socket_path: Path,
    options: Sequence[tuple[str, int]] = (),
    *,
    connections_max: int | None = None,
) -> tuple[grpc.aio.Server, GrpcPort]:
    """A server of gRPC that takes holders of the fleet's certificates alone, and its port on `listener`, which is to
    serve once the server does. Raises RuntimeError where gRPC cannot listen at `socket_path`."""
    port = GrpcPort(listener, socket_path, connections_max=connections_max)
    server = grpc.aio.server(
        interceptors=[AccessInterceptor(credentials, port.let_through)],
        options=[*options, ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS)],
    )
    server.add_secure_port(f"unix:{socket_path}", server_credentials(credentials))
    socket_path.chmod(0o600)  # it is in the pool's directory, which a group may read
    return server, port


class GrpcPort:
    """Owner of the connections to one relay's gRPC; on one event loop."""

    def __init__(self, listener: socket.socket, socket_path: Path, *, connections_max: int | None = None) -> None:
        """`socket_path`: where gRPC listens. `connections_max` is as many as this process's open files allow, unless it
        is given."""
        total = (
            min(CONNECTIONS_MAX, open_files_max() // (4 * FILES_EACH)) if connections_max is None else connections_max
        )
        self._connections: Connections[_Caller] = Connections(
            total, min(PER_ADDRESS_MAX, max(1, total // 2)), STRANGER_S
        )
        self._listener, self._socket_path = listener, socket_path
        self._by_name: dict[str, _Caller] = {}  # by the name of its end at gRPC
        self._callers: set[_Caller] = set()
        self._server: asyncio.Server | None = None
        self._refusals = RareLines(log, 1)

    async def serve(self) -> None:
        """Once gRPC listens."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Caller(self), sock=self._listener, backlog=BACKLOG
        )

    def stop_accepting(self) -> None:
        """Connections that stand go on, until gRPC ends them."""
        if self._server is not None:
            self._server.close()
        self._listener.close()

    async def close(self) -> None:
        """Ends what gRPC has not ended; sockets are closed when this returns."""
        self.stop_accepting()
        for caller in list(self._callers):
            caller.abort()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next round

    def let_through(self, peer: str) -> None:
        """A call of `peer`, which is gRPC's name for it, has passed access control."""
        caller = self._by_name.get(peer.removeprefix("unix-abstract:"))
        if caller is not None:
            self._connections.known(caller)

    def statistics(self) -> ConnectionCounts:
        return self._connections.counts()

    # -- what a connection needs of it

    def opened(self, caller: _Caller) -> None:
        self._callers.add(caller)
        found = self._connections.opened(caller, caller.address, time.monotonic())
        if found.leaves is not None:
            found.leaves.abort()
        if found.refused is not None:
            self._log(f"a connection of {caller.address} to the gRPC port is refused: {_BOUNDS[found.refused]}")
            caller.abort()
            return
        try:
            sock = self._connect()
        except OSError as error:
            self._log(f"a connection of {caller.address} to the gRPC port is refused: {error}")
            caller.abort()
            return
        name = sock.getsockname()[1:].decode("ascii")
        self._by_name[name] = caller
        caller.begin(sock, name)

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)  # a queue that is full fails at once
            sock.bind(b"")  # the kernel finds a name that nobody else has: gRPC has it in `peer()` of each call
            sock.connect(os.fspath(self._socket_path))
        except BaseException:
            sock.close()
            raise
        return sock

    def closed(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        if self._connections.is_stranger(caller):
            self._log(
                f"a connection of {caller.address} to the gRPC port has ended before a call was let through: its "
                "caller has no valid certificate of the fleet, or has called nothing"
            )
        self._connections.closed(caller)
        self._by_name.pop(caller.name, None)

    def _log(self, what: str) -> None:
        self._refusals.say(logging.WARNING, what)


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a relay with credentials that bound their connections; one without has neither."""

    grpc: GrpcPort | None = None
    engines: Sequence[EnginePort] = ()


class _End(asyncio.Protocol):
    """One end of a connection that is passed on."""

    transport: asyncio.Transport | None = None
    other: _End

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.other.close()

    def close(self) -> None:
        """What was written still goes out, if the other side reads it in time."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            if self.transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(CLOSING_S, self.transport.abort)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Caller(_End):
    """The caller's end, and the owner of both. HTTP/2 has no use for a connection of which one direction has ended: the
    end of either is the end of both."""

    def __init__(self, port: GrpcPort) -> None:
        self._port = port
        self._connecting: asyncio.Task[None] | None = None
        self.other = _End()
        self.other.other = self
        self.address = ""
        self.name = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        keep_alive(transport.get_extra_info("socket"))
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._port.opened(self)

    def begin(self, sock: socket.socket, name: str) -> None:
        """`sock` is connected to gRPC. Until it has a transport the caller's bytes wait in the kernel."""
        assert self.transport is not None
        self.name = name
        self.transport.pause_reading()
        self._connecting = asyncio.get_running_loop().create_task(self._begin(sock))

    async def _begin(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self.other, sock=sock)
        assert self.transport is not None
        if self.transport.is_closing():
            self.other.abort()
        else:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._port.closed(self)
