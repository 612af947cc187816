"""One connection of an engine port: TLS with the caller, the clear with the engine, and bytes both ways in between.

Nothing is parsed. asyncio's own TLS cannot end one direction alone, so the ssl module works on buffers here.

Invariants:
- no byte goes to the engine, and no connection is made to it, before the caller is who may call it;
- whichever end does not read holds back the other: beside the transports' buffers nothing is kept;
- an end that has said its last word may still listen: each direction ends by itself, and in TLS by close_notify. A
  caller that breaks off without it breaks off at the engine, which aborts the request; what an engine broke off is not
  given out as ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Protocol, cast

READ_BYTES = 1 << 16
"""Decrypted at once: some records of TLS."""
HANDSHAKE_S = 5.0
CONNECT_S = 5.0
"""For the engine, on this host."""
HALF_OPEN_S = 60.0
"""Silence after which a connection is closed of which one direction has ended."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""In seconds, and probes: a caller whose host has vanished keeps nothing open. No TCP_USER_TIMEOUT: it would end those,
too, that hold a stream back for long."""


def keep_alive(sock: socket.socket) -> None:
    """What a connection needs whose bytes are passed on at once, by a peer that may vanish."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves it off for sockets of `create_server`
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Owner(Protocol):
    """The port, as far as one connection needs it."""

    def opened(self, splice: Splice) -> None:
        """Somebody has connected."""

    def proven(self, splice: Splice) -> bool:
        """The caller may call the engine. False: there are too many of them."""

    def refused(self, splice: Splice, error: Exception) -> None:
        """The handshake has failed, or was too slow."""

    async def connect(self, engine: _Engine) -> None:
        """Connects to the engine. OSError, TimeoutError."""

    def away(self, error: Exception) -> None:
        """The engine takes no connection."""

    def closed(self, splice: Splice) -> None:
        """Once, when the caller's connection is gone."""


class Splice(asyncio.Protocol):
    """The caller's end, and the owner of both."""

    def __init__(self, owner: Owner, context: ssl.SSLContext) -> None:
        self._owner = owner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._engine = _Engine(self)
        self._greeted = False
        self._ended = self._engine_ended = False  # no more comes from the caller, from the engine
        self._moved_at = 0.0

    @property
    def peer(self) -> str:
        """The caller's address, for logs."""
        return str((self._transport.get_extra_info("peername") or ("?",))[0])

    # -- the handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = self._transport.get_extra_info("socket")
        keep_alive(sock)
        self._timer = self._loop.call_later(HANDSHAKE_S, self._is_late)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._greeted:
            self._pass_on()
        else:
            self._greet()

    def _greet(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._flush()  # an alert, which says why
            self.refuse(error)
            return
        self._flush()
        if not self._owner.proven(self):
            self._transport.close()
            return
        self._greeted = True
        self._cancel_timer()
        self._transport.pause_reading()
        self._connecting = self._loop.create_task(self._connect())

    def _is_late(self) -> None:
        self.refuse(TimeoutError(f"no TLS within {HANDSHAKE_S:g} s"))

    def refuse(self, error: Exception) -> None:
        """Ends a connection that is in its handshake."""
        self._owner.refused(self, error)
        self._transport.close()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._owner.connect(self._engine)
        except (OSError, TimeoutError) as error:
            self._owner.away(error)
            self._transport.close()
            return
        if self._transport.is_closing():  # the caller has left meanwhile
            self._engine.transport.abort()
            return
        self._transport.resume_reading()
        self._pass_on()  # what came with the handshake's end

    # -- from the caller to the engine

    def _pass_on(self) -> None:
        """Decrypts whatever has come."""
        self._moved_at = self._loop.time()
        try:
            while not self._ended:
                data = self._tls.read(READ_BYTES)
                if data:
                    self._engine.transport.write(data)
                else:
                    self._caller_ended()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # as no data, once this end has said its last word
            self._caller_ended()
        except ssl.SSLError:
            self.abort()
            return
        self._flush()

    def _caller_ended(self) -> None:
        self._ended = True
        self._engine.transport.write_eof()
        self._one_has_ended()

    def eof_received(self) -> bool:
        """Without close_notify before it the caller has broken off, and the engine shall notice."""
        if not self._ended:
            self.abort()
        return True  # what the engine still says goes out

    # -- from the engine to the caller

    def engine_said(self, data: bytes) -> None:
        self._moved_at = self._loop.time()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError:
            self.abort()
            return
        self._flush()

    def engine_ended(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # mostly that the caller has not said its last word yet
            self._tls.unwrap()
        self._flush()
        self._engine_ended = True
        self._transport.write_eof()
        self._one_has_ended()

    def engine_lost(self) -> None:
        """Its connection is gone. Where it did not end by itself, the caller's ends without close_notify."""
        self._transport.close()

    # -- both

    def hold_back(self, held: bool) -> None:
        """The engine reads no more for now: the caller waits."""
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._engine.hold_back(True)

    def resume_writing(self) -> None:
        self._engine.hold_back(False)

    def _one_has_ended(self) -> None:
        if self._ended and self._engine_ended:
            self._engine.transport.close()
            self._transport.close()
        elif self._timer is None:
            self._timer = self._loop.call_later(HALF_OPEN_S, self._look)

    def _look(self) -> None:
        left_s = self._moved_at + HALF_OPEN_S - self._loop.time()
        waiting = self._transport.get_write_buffer_size() or self._engine.transport.get_write_buffer_size()
        if left_s > 0 or waiting:  # for whoever does not read yet
            self._timer = self._loop.call_later(left_s if left_s > 0 else HALF_OPEN_S, self._look)
        else:
            self.abort()

    def _flush(self) -> None:
        if self._outgoing.pending and not (self._engine_ended or self._transport.is_closing()):
            self._transport.write(self._outgoing.read())

    def abort(self) -> None:
        """Both connections, at once."""
        self._engine.abort()
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._connecting is not None:
            self._connecting.cancel()
        self._engine.abort()
        self._owner.closed(self)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Engine(asyncio.Protocol):
    """The engine's end."""

    transport: asyncio.Transport

    def __init__(self, splice: Splice) -> None:
        self._splice = splice
        self._connected = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._connected = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._splice.engine_said(data)

    def eof_received(self) -> bool:
        self._splice.engine_ended()
        return True  # it may still listen

    def connection_lost(self, exc: Exception | None) -> None:
        self._splice.engine_lost()

    def hold_back(self, held: bool) -> None:
        """The caller reads no more for now: the engine waits."""
        if self._connected:
            if held:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def abort(self) -> None:
        if self._connected:
            self.transport.abort()

    def pause_writing(self) -> None:
        self._splice.hold_back(True)

    def resume_writing(self) -> None:
        self._splice.hold_back(False)
