"""An engine port in the test's own event loop, an engine behind it that is a script, and callers that speak TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from paramserver.data import engine_ports
from paramserver.data.engine_ports import EnginePort
from protos.access.credentials import Credentials
from protos.access.tls import with_true_ends
from tests.support.scripted_engine import until
from tests.support.tls_endings import ending

T = TypeVar("T")

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def engine_port(holder: Path | Credentials, target: str) -> AsyncIterator[EnginePort]:
    """In front of the engine at `target`, with those credentials."""
    credentials = holder if isinstance(holder, Credentials) else Credentials(holder)
    listener = engine_ports.listen("127.0.0.1", 0)
    port = EnginePort("r:8000", target, listener, "127.0.0.1", engine_ports.tls_of(credentials))
    await port.serve()
    try:
        yield port
    finally:
        await port.close()


class RawEngine:
    """Takes connections, and plays `script` on each."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections = self.open = 0
        self.url = ""

    async def __aenter__(self) -> RawEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError):
                await self._script(reader, writer)
        finally:
            self.open -= 1
            writer.close()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await until(lambda: self.open == 0, "the engine's connections to end")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.partition("//")[2].partition("/")[0].rpartition(":")
    return host, int(port)


def context_of(holder: Path | None, trusts: Path, most: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = with_true_ends(ssl.create_default_context(cafile=str(trusts / "ca.pem")))
    if holder is not None:
        context.load_cert_chain(holder / "cert.pem", holder / "key.pem")
    if most is not None:
        context.maximum_version = most
    return context


@contextlib.contextmanager
def called(url: str, holder: Path | None, trusts: Path, most: ssl.TLSVersion | None = None) -> Iterator[ssl.SSLSocket]:
    """A blocking connection by TLS: for threads. A ragged end raises, so that it is told from close_notify."""
    host, port = address_of(url)
    with (
        socket.create_connection((host, port), timeout=PATIENCE_S) as plain,
        context_of(holder, trusts, most).wrap_socket(plain, server_hostname=host, suppress_ragged_eofs=False) as found,
    ):
        yield found


def asked(url: str, holder: Path | None, trusts: Path, most: ssl.TLSVersion | None = None) -> str:
    """What becomes of a few bytes to an engine that echoes: "served", or how the connection ended."""
    try:
        with called(url, holder, trusts, most) as sock:
            sock.sendall(b"hello")
            return "served" if sock.recv(16) == b"hello" else "closed"
    except (ssl.SSLError, ConnectionError) as error:
        return ending(error)


class HalfCloser:
    """A caller that ends one direction alone, which asyncio's TLS cannot: the ssl module on buffers."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self._address = address_of(url)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=self._address[0])

    async def __aenter__(self) -> HalfCloser:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        await self._until_done(self._tls.do_handshake)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def end(self) -> None:
        """The last word: what the other end says afterwards can still be read."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        self._flush()
        self._writer.write_eof()

    async def read(self) -> bytes:
        """All up to the other end's last word. Raises SSLError where it broke off."""
        found = b""
        with contextlib.suppress(ssl.SSLZeroReturnError):
            while data := await self._until_done(lambda: self._tls.read(1 << 16)):
                found += data
        return found

    async def _until_done(self, step: Callable[[], T]) -> T:
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._flush()
                data = await asyncio.wait_for(self._reader.read(1 << 16), PATIENCE_S)
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            else:
                self._flush()
                return done

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._writer.write(self._outgoing.read())
