"""The gRPC port of a relay with credentials: whom its bounds close, whom they leave alone, and what passes through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from paramserver.client import RelayClient
from paramserver.daemon import grpc_port
from paramserver.daemon.grpc_port import GrpcPort, secured_server
from protos.access.credentials import Credentials
from protos.errors import Forbidden, Unavailable
from tests.support.scripted_engine import MODEL, until
from tests.support.secured_relay import secured_front

PATIENCE_S = 60.0
MUCH = os.urandom(8 << 20)


def client(address: str, directory: Path, timeout_s: float = PATIENCE_S) -> RelayClient:
    return RelayClient(address, timeout_s=timeout_s, credentials=Credentials(directory))


@contextlib.asynccontextmanager
async def strangers(port: int, num: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections that say nothing."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num)]
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    return True


# -- bounds


async def test_a_stranger_that_says_nothing_does_not_stay(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_port, "HANDSHAKE_MS", 100)
    async with secured_front(Credentials(fleet / "relay")) as (relay, port), strangers(relay.port, 3) as silent:
        for reader in silent:
            assert await ended(reader)
        await until(lambda: port.statistics().open == 0, "they are forgotten")


async def test_strangers_keep_nobody_with_a_certificate_out(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold all places, again and again; whose call was let through keeps its own."""
    monkeypatch.setattr(grpc_port, "STRANGER_S", 0.0)
    async with secured_front(Credentials(fleet / "relay"), connections_max=4) as (relay, port):
        relay.versions = [1]
        async with client(f"127.0.0.1:{relay.port}", fleet / "reader") as known, strangers(relay.port, 6):
            for _ in range(3):
                async with strangers(relay.port, 6):
                    assert [one.version for one in await known.versions(MODEL)] == [1]
            found = port.statistics()
            assert found.open <= 4
            assert found.made_way >= 12
            assert found.refused == 0
            assert found.open - found.strangers == 1


async def test_beyond_the_bound_the_newest_is_refused(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc_port, "STRANGER_S", 0.0)
    async with secured_front(Credentials(fleet / "relay"), connections_max=2) as (relay, port):
        address = f"127.0.0.1:{relay.port}"
        async with contextlib.AsyncExitStack() as stack:
            for role in ("reader", "admin"):
                caller = await stack.enter_async_context(client(address, fleet / role))
                await caller.versions(MODEL)
            async with client(address, fleet / "gateway", timeout_s=0.5) as more:
                with pytest.raises(Unavailable):
                    await more.versions(MODEL)
            await caller.versions(MODEL)
            assert port.statistics().refused >= 1
            assert caplog.text.count("a connection of 127.0.0.1 to the gRPC port is refused: too many are open") == 1
        await until(lambda: port.statistics().open == 0, "they have left")
        async with client(address, fleet / "gateway") as more:
            await more.versions(MODEL)


async def test_a_call_that_is_refused_lets_nobody_in(fleet: Path) -> None:
    """A holder of a certificate whose calls are not allowed stays one who makes way."""
    async with (
        secured_front(Credentials(fleet / "relay")) as (relay, port),
        client(f"127.0.0.1:{relay.port}", fleet / "reader") as caller,
    ):
        with pytest.raises(Forbidden, match="does not allow"):
            await caller.drop(MODEL)
        assert (port.statistics().open, port.statistics().strangers) == (1, 1)
        await caller.versions(MODEL)
        assert (port.statistics().open, port.statistics().strangers) == (1, 0)


async def test_hundreds_of_strangers_cost_what_is_given_back(fleet: Path) -> None:
    async with (
        secured_front(Credentials(fleet / "relay")) as (relay, port),
        client(f"127.0.0.1:{relay.port}", fleet / "reader") as caller,
    ):
        await caller.versions(MODEL)
        before = len(os.listdir("/proc/self/fd"))
        async with strangers(relay.port, 300):
            await until(lambda: port.statistics().open == 301, "all are taken")
            await caller.versions(MODEL)
        await until(lambda: port.statistics().open == 1, "all are gone")
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "their files are closed")


# -- passing on


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def passing(
    directory: Path, script: Script, listener: socket.socket | None = None
) -> AsyncIterator[tuple[GrpcPort, int]]:
    """A port in front of a server that is not gRPC."""
    server = await asyncio.start_unix_server(script, directory / "grpc.sock", limit=1 << 16)
    listener = listener or socket.create_server(("127.0.0.1", 0))
    port = GrpcPort(listener, directory / "grpc.sock")
    number = listener.getsockname()[1]
    port.start()
    try:
        yield port, number
    finally:
        await asyncio.to_thread(port.close)
        server.close()


async def echo_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):  # `GrpcPort.start` connects once, and says nothing
        writer.write(await reader.readexactly(len(MUCH)))
    writer.close()


async def echo_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(5))
    writer.close()


async def test_bytes_pass_as_they_are(tmp_path: Path) -> None:
    async with passing(tmp_path, echo_and_close) as (port, number):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(MUCH)
        assert await asyncio.wait_for(reader.read(-1), PATIENCE_S) == MUCH, "what was written before the end, too"
        writer.close()
        await until(lambda: port.statistics().open == 0, "the end")


def as_python_3_11_2(transport: Any, fd: int, callback: Callable[[], None]) -> None:
    """There a transport begins to read after `connection_made`, also one that was paused in it."""
    if not transport.is_closing():
        transport._loop._add_reader(fd, callback)


async def test_first_bytes_that_are_there_at_once_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.selector_events._SelectorTransport._add_reader", as_python_3_11_2)
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(8)]
        for caller in callers:
            caller.sendall(b"hello")
            caller.setblocking(False)
        async with passing(tmp_path, echo_first, listener):
            received = asyncio.gather(*(asyncio.get_running_loop().sock_recv(one, 5) for one in callers))
            assert await asyncio.wait_for(received, PATIENCE_S) == [b"hello"] * 8


async def test_an_end_that_does_not_read_holds_back_the_other(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with passing(tmp_path, silent) as (_, number):
        with socket.create_connection(("127.0.0.1", number)) as sock:
            sock.setblocking(False)
            sent, before = 0, -1
            while sent != before:
                before = sent
                with contextlib.suppress(BlockingIOError):
                    while sent < 1 << 30:
                        sent += sock.send(MUCH)
                await asyncio.sleep(0.2)
            assert sent < 64 << 20, "the kernel's buffers, and the transports'"
        over.set()


async def test_a_caller_that_reads_nothing_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC gives it up, and says so to an end that is held back."""
    monkeypatch.setattr(grpc_port, "STUCK_S", 0.2)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(MUCH * 4)
            await writer.drain()
        writer.close()

    async with passing(tmp_path, talk) as (port, number):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(sock.connect, ("127.0.0.1", number))
            await until(lambda: port.statistics().open == 1, "it is taken")
            await until(lambda: port.statistics().open == 0, "it is given up")


class Waiting:
    """A transport with so many bytes that its peer has not taken."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.aborted = num_bytes, False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.aborted = True


async def test_one_that_reads_slowly_stays(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = grpc_port._Caller(GrpcPort(listener, tmp_path / "grpc.sock"))
        transport = Waiting(1000)
        caller.transport = cast(asyncio.Transport, transport)
        caller.pause_writing()
        for waited in (1000, 600, 599):  # what it had to take at each look, and one byte less at the next
            transport.num_bytes = waited - 1
            caller._look(waited)
            assert not transport.aborted
        caller._look(transport.num_bytes)
        assert transport.aborted
        caller.resume_writing()


async def test_pings_pass_while_the_relays_loop_stands_still(tmp_path: Path) -> None:
    """The loop of this test is the relay's; who serves, and who asks, are threads."""
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen()
        listener = socket.create_server(("127.0.0.1", 0))
        port = GrpcPort(listener, path)
        port.start()
        server.accept()[0].close()  # of the look at the start
        with socket.create_connection(listener.getsockname()) as caller:
            caller.settimeout(PATIENCE_S)
            behind, _ = server.accept()
            with behind:
                behind.settimeout(PATIENCE_S)
                caller.sendall(b"ping")
                assert behind.recv(4) == b"ping"
                behind.sendall(b"pong")
                assert caller.recv(4) == b"pong"
        port.close()


async def test_a_caller_that_breaks_off_breaks_off_at_grpc(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()
        writer.close()

    async with passing(tmp_path, serve) as (port, number):
        _, writer = await asyncio.open_connection("127.0.0.1", number)
        await until(lambda: port.statistics().open == 1, "it is taken")
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


async def test_without_grpc_behind_it_a_connection_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with passing(tmp_path, echo_and_close) as (port, number):
        (tmp_path / "grpc.sock").unlink()
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        assert await ended(reader)
        writer.close()
        await until(lambda: port.statistics().open == 0, "the end")
    assert "to the gRPC port cannot be passed on: [Errno 2]" in caplog.text


async def test_what_a_killed_relay_left_is_no_obstacle(fleet: Path, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(path))
    listener = socket.create_server(("127.0.0.1", 0))
    server, port = secured_server(Credentials(fleet / "relay"), listener, path)
    await server.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.fspath(path))
    assert path.stat().st_mode & 0o777 == 0o600
    await server.stop(None)
    port.close()
