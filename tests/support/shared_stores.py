"""The stores that gateways share, by the name of the fixture that has a real server of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Protocol

import pytest

from gateway.log.base import CommandLog, SharedStore
from gateway.log.postgres import PostgresLog
from gateway.log.redis import RedisLog
from tests.support import postgres_servers, redis_servers
from tests.support.processes import Daemon


@pytest.fixture(params=["redis", "postgresql"])
def shared_url(request: pytest.FixtureRequest) -> str:
    """The address of the module's server of each kind."""
    return str(request.getfixturevalue(SHARED[request.param][0]))


Connect = Callable[[AsyncExitStack, str, str], Awaitable[SharedStore]]

SHARED: Mapping[str, tuple[str, Connect]] = {
    "redis": ("shared_redis", redis_servers.connect),
    "postgresql": ("shared_postgres", postgres_servers.connect),
}
"""By scheme: the fixture with a server's address, and how to connect to it."""


async def connect(stack: AsyncExitStack, request: pytest.FixtureRequest, scheme: str, namespace: str) -> SharedStore:
    """To the module's server of that kind; `stack` closes it."""
    fixture, opener = SHARED[scheme]
    return await opener(stack, request.getfixturevalue(fixture), namespace)


async def connect_to(stack: AsyncExitStack, url: str, namespace: str) -> SharedStore:
    """To the server at that address."""
    _, opener = SHARED[url.partition(":")[0]]
    return await opener(stack, url, namespace)


class Server(Protocol):
    """One server of a test, which has what it had when it is started again."""

    url: str

    def start(self) -> None:
        """It takes connections when this returns."""
        ...

    def kill(self) -> None:
        """kill -9."""
        ...


class _Redis:
    def __init__(self, servers: Callable[..., Daemon]) -> None:
        self._servers = servers
        self.url = ""

    def start(self) -> None:
        self._daemon = self._servers("redis")
        self.url = self._daemon.ready["url"]

    def kill(self) -> None:
        self._daemon.kill()


@pytest.fixture(params=["redis", "postgresql"])
def killable_store(request: pytest.FixtureRequest) -> Server:
    """Not started."""
    if request.param == "redis":
        return _Redis(request.getfixturevalue("redis_servers"))
    server: postgres_servers.PostgresServer = request.getfixturevalue("postgres_servers")("primary")
    server.make()
    return server


async def length(log: CommandLog) -> int:
    """How many entries it has."""
    if isinstance(log, RedisLog):
        [found] = await log._server.send(("XLEN", f"{log._prefix}:log"))
    else:
        assert isinstance(log, PostgresLog)
        [(found,)] = await log._fetch("SELECT count(*) FROM laminar_log WHERE namespace=$1 AND room=$2")
    return int(found)
