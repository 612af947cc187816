"""The gRPC port of a relay without credentials: the one that it names is the one that it has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from paramserver.config import RelayConfig
from paramserver.daemon.process import _plain_server
from protos.errors import Conflict


class TakenAtOnce(socket.socket):
    """A listener whose port is another's as soon as it is let go."""

    @classmethod
    def at(cls, port: int) -> TakenAtOnce:
        listener = cls(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", port))
        return listener

    def close(self) -> None:
        if self.fileno() != -1:
            address = self.getsockname()
            super().close()
            self.other = socket.create_server(address)


@pytest.fixture
def listener() -> Iterator[TakenAtOnce]:
    listener = TakenAtOnce.at(0)
    yield listener
    listener.close()
    listener.other.close()


def config(directory: Path, port: int) -> RelayConfig:
    return RelayConfig("a", "etcd:1", host="127.0.0.1", port=port, pool_dir=directory)


async def test_a_free_port_that_another_takes_meanwhile_is_not_the_relays(
    tmp_path: Path, listener: TakenAtOnce
) -> None:
    taken = listener.getsockname()[1]
    server, port = _plain_server(config(tmp_path, 0), listener)
    assert port not in (0, taken)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    await server.stop(None)


async def test_one_that_was_asked_for_is_refused_by_name(tmp_path: Path, listener: TakenAtOnce) -> None:
    asked = listener.getsockname()[1]
    with pytest.raises(Conflict, match=rf"cannot listen on 127\.0\.0\.1:{asked}"):
        _plain_server(config(tmp_path, asked), listener)
