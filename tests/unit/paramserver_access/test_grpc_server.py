"""A relay's gRPC port: what strangers can hold open, whom they keep out, and which port it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.client import RelayClient
from paramserver.daemon import grpc_server as grpc_server_module
from paramserver.daemon.grpc_server import grpc_server
from protos.access.credentials import Credentials
from protos.errors import Conflict, Unavailable
from tests.support.scripted_engine import MODEL, until
from tests.support.secured_relay import secured

PATIENCE_S = 60.0


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


async def answered(address: str, directory: Path) -> bool:
    """Whether a caller with a certificate gets in; a client's own tries are within a second of each other."""
    async with client(address, directory, timeout_s=2.0) as caller:
        with contextlib.suppress(Unavailable):
            await caller.versions(MODEL)
            return True
    return False


async def test_a_stranger_that_says_nothing_does_not_stay(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server_module, "HANDSHAKE_MS", 100)
    async with secured(Credentials(fleet / "relay")) as (relay, _), strangers(relay.port, 3) as silent:
        for reader in silent:
            assert await ended(reader)


async def test_strangers_that_hold_every_place_keep_nobody_out_for_long(
    fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their places are free again once their handshakes are late; whose connection stands keeps its own."""
    monkeypatch.setattr(grpc_server_module, "HANDSHAKE_MS", 500)
    async with secured(Credentials(fleet / "relay"), connections_max=4) as (relay, address):
        relay.versions = [1]
        async with client(address, fleet / "reader") as known:
            await known.versions(MODEL)
            async with strangers(relay.port, 6), asyncio.timeout(PATIENCE_S):
                assert [one.version for one in await known.versions(MODEL)] == [1]
                while not await answered(address, fleet / "admin"):
                    pass
            assert [one.version for one in await known.versions(MODEL)] == [1]


async def test_beyond_the_bound_the_newest_is_refused(fleet: Path) -> None:
    async with secured(Credentials(fleet / "relay"), connections_max=2) as (_, address):
        async with contextlib.AsyncExitStack() as stack:
            for role in ("reader", "admin"):
                caller = await stack.enter_async_context(client(address, fleet / role))
                await caller.versions(MODEL)
            assert not await answered(address, fleet / "gateway")
            await caller.versions(MODEL)
        async with asyncio.timeout(PATIENCE_S):  # until the relay knows that the others have gone
            while not await answered(address, fleet / "gateway"):
                pass


async def test_hundreds_of_strangers_cost_what_is_given_back(fleet: Path) -> None:
    async with (
        secured(Credentials(fleet / "relay")) as (relay, address),
        client(address, fleet / "reader") as caller,
    ):
        await caller.versions(MODEL)
        before = len(os.listdir("/proc/self/fd"))
        async with strangers(relay.port, 300):
            await until(lambda: len(os.listdir("/proc/self/fd")) >= before + 600, "both ends of all are open")
            await caller.versions(MODEL)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "their files are closed")


# -- the port


class TakenAtOnce(socket.socket):
    """A listener whose port is another's as soon as it is let go."""

    let_go: list[TakenAtOnce]

    def close(self) -> None:
        self.let_go.append(self)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TakenAtOnce]]:
    let_go: list[TakenAtOnce] = []

    def create_server(address: Any) -> TakenAtOnce:
        found = TakenAtOnce(socket.AF_INET, socket.SOCK_STREAM)
        found.let_go = let_go
        found.bind(address)
        found.listen()
        return found

    monkeypatch.setattr(socket, "create_server", create_server)
    yield let_go
    for one in let_go:
        socket.socket.close(one)


async def test_a_free_port_that_another_takes_meanwhile_is_not_the_relays(taken: list[TakenAtOnce]) -> None:
    server, port = grpc_server("127.0.0.1", 0, None)
    assert port not in (0, taken[0].getsockname()[1])
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    await server.stop(None)


async def test_one_that_was_asked_for_is_refused_by_name(taken: list[TakenAtOnce]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Conflict, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
        grpc_server("127.0.0.1", port, None)
    assert taken, "it was free when it was tried"
