"""A connection to a Redis that breaks before its first command is written is a fault of the Redis."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest
import redis.asyncio
import uvloop

from gateway.core.addresses import RedisAddress
from gateway.log.redis_server import RedisServer
from protos.errors import Unavailable

RESET = struct.pack("ii", 1, 0)


def reset_everybody(listener: socket.socket) -> None:
    """Accepts and resets, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()


def test_a_redis_that_resets_before_the_first_command_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop raises RuntimeError for what is written to a connection that it has closed already."""
    begin = redis.asyncio.Connection.on_connect_check_health

    async def begin_once_it_broke(self: redis.asyncio.Connection, check_health: bool = True) -> None:
        async with asyncio.timeout(60):
            while self._reader.exception() is None and not self._reader.at_eof():  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(0.001)
        await begin(self, check_health=check_health)

    monkeypatch.setattr(redis.asyncio.Connection, "on_connect_check_health", begin_once_it_broke)

    async def connect(port: int) -> None:
        with pytest.raises(Unavailable, match="try again once this Redis answers"):
            await RedisServer.connect(RedisAddress.parse(f"redis://127.0.0.1:{port}/0"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        resetting = threading.Thread(target=reset_everybody, args=(listener,))
        resetting.start()
        try:
            uvloop.run(connect(listener.getsockname()[1]))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            resetting.join(60)
