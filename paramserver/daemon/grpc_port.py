"""The gRPC port of a relay with credentials, as others reach it: it bounds the connections, and passes their bytes on.

gRPC bounds no connections by itself, and nothing of it says which of them have proven who they are. So it listens on a
unix socket that is for this process, and this port, in a thread of its own, connects to it once for each connection
that it takes.

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
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
from protos.errors import Unavailable

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 4096
"""Relays, trainers' ranks, engines and gateways have a few each."""
PER_ADDRESS_MAX = 1024
"""Of one address: a host with eight ranks, their engines and a gateway has some forty, and a proxy has all hosts'."""
STRANGER_S = 0.5
"""A flood that fills all places in less turns some callers away, who try again; a longer time would turn away more of
them, a shorter one would end their handshakes on a busy host."""
FILES_EACH = 3
"""The connection, and both ends of the one to gRPC."""
CLOSING_S = 10.0
"""For the last bytes to a caller that may not read them."""
STUCK_S = 20.0
"""Without one byte taken, after which a caller that has bytes to read loses its connection; gRPC's pings give one up
after 15."""
HANDSHAKE_MS = 10_000
"""Of TLS; gRPC's own bound is two minutes. An honest caller takes milliseconds, and seconds on a starved host;
strangers make way in any case."""
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
    """Owner of the connections to one relay's gRPC, in a thread and an event loop of its own: whatever holds up the
    relay's loop, pings pass, which gRPC's own threads answer."""

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
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._server: asyncio.Server
        self._refused, self._failed, self._left = (RareLines(log, 1) for _ in range(3))

    # -- called by the relay's thread

    def start(self) -> None:
        """Once gRPC listens. Raises Unavailable where no connection to it can be made."""
        try:
            self._connect()[0].close()
        except OSError as error:
            raise Unavailable(f"no connection to {self._socket_path}, where gRPC listens: {error.strerror}") from error
        started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="grpc-port")
        self._thread.start()
        started.result()

    def stop_accepting(self) -> None:
        """Connections that stand go on, until gRPC ends them."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._server.close)

    def close(self) -> None:
        """Ends what gRPC has not ended; sockets are closed when this returns."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None
        self._listener.close()

    def let_through(self, peer: str) -> None:
        """A call of `peer`, which is gRPC's name for it, has passed access control."""
        caller = self._by_name.get(peer.removeprefix("unix-abstract:"))
        if caller is not None and not caller.is_known:
            caller.is_known = True
            self._loop.call_soon_threadsafe(self._connections.known, caller)

    def statistics(self) -> ConnectionCounts:
        return self._connections.counts()

    # -- in the thread of its own

    async def _serve(self, started: Future[None]) -> None:
        try:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._server = await self._loop.create_server(lambda: _Caller(self), sock=self._listener, backlog=BACKLOG)
        except BaseException as error:
            started.set_exception(error)
            raise
        started.set_result(None)
        await self._stop.wait()
        self._server.close()
        while self._callers:
            for caller in list(self._callers):
                caller.abort()
            await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next round

    def opened(self, caller: _Caller) -> None:
        self._callers.add(caller)
        found = self._connections.opened(caller, caller.address, time.monotonic())
        if found.leaves is not None:
            found.leaves.abort()
        if found.refused is not None:
            self._refused.say(
                logging.WARNING,
                f"a connection of {caller.address} to the gRPC port is refused: {_BOUNDS[found.refused]}",
            )
            caller.abort()
            return
        try:
            sock, caller.name = self._connect()
        except OSError as error:
            self._failed.say(logging.WARNING, f"a connection to the gRPC port cannot be passed on: {error}")
            caller.abort()
            return
        self._by_name[caller.name] = caller
        caller.begin(sock)

    def _connect(self) -> tuple[socket.socket, str]:
        """A connection to gRPC, and its name, which is in `peer()` of each call: nobody else ever has it."""
        name = f"laminar-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)  # a queue that is full fails at once
            sock.bind(b"\0" + name.encode())
            sock.connect(os.fspath(self._socket_path))
        except BaseException:
            sock.close()
            raise
        return sock, name

    def closed(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        if self._connections.is_stranger(caller):
            self._left.say(
                logging.INFO,
                f"a connection of {caller.address} to the gRPC port has ended before a call was let through: its "
                "caller has no valid certificate of the fleet, or has called nothing",
            )
        self._connections.closed(caller)
        self._by_name.pop(caller.name, None)


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
        assert self.other.transport is not None
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
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Task[None] | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._first: bytes | None = b""  # the caller's bytes; None once gRPC's end takes them
        self.other = _End()
        self.other.other = self
        self.address = ""
        self.name = ""
        self.is_known = False  # written by the relay's thread: a call was let through

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        keep_alive(transport.get_extra_info("socket"))
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._port.opened(self)

    def data_received(self, data: bytes) -> None:
        """The first bytes may be here before gRPC's end is. They wait, and no more are read meanwhile. To pause before
        the first byte would not do: Python 3.11.2, which is Debian's, reads on where `connection_made` has paused."""
        if self._first is None:
            super().data_received(data)
            return
        assert self.transport is not None
        self._first += data
        self.transport.pause_reading()

    def begin(self, sock: socket.socket) -> None:
        """`sock` is connected to gRPC."""
        self._connecting = self._loop.create_task(self._begin(sock))

    async def _begin(self, sock: socket.socket) -> None:
        try:
            await self._loop.create_connection(lambda: self.other, sock=sock)
        except BaseException as error:
            sock.close()
            self.abort()
            if isinstance(error, OSError):
                log.warning("a connection of %s to the gRPC port is not passed on: %s", self.address, error)
                return
            raise
        assert self.transport is not None
        assert self.other.transport is not None
        if self.transport.is_closing():
            self.other.abort()
            return
        assert self._first is not None
        self.other.transport.write(self._first)
        self._first = None
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        """The caller does not read. While gRPC's end is held back for it, nobody notices that gRPC has given it up."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_look()

    def _look_again(self) -> None:
        assert self.transport is not None
        self._stuck = self._loop.call_later(STUCK_S, self._look, self.transport.get_write_buffer_size())

    def _look(self, waited: int) -> None:
        assert self.transport is not None
        if self.transport.get_write_buffer_size() >= waited:
            self.abort()
        else:
            self._look_again()

    def _cancel_look(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def abort(self) -> None:
        """Both ends, at once."""
        super().abort()
        self.other.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_look()
        super().connection_lost(exc)
        self._port.closed(self)
