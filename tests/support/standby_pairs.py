"""A primary and its standby of each store that gateways share: killed, stopped, promoted, left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.support import postgres_servers
from tests.support.processes import Daemon
from tests.support.redis_servers import DURABLE

WAIT_S = 120.0


class Pair(Protocol):
    """`url` names both."""

    url: str

    async def start(self) -> None:
        """The standby has what the primary has when this returns."""
        ...

    async def restart(self) -> None:
        """The primary, after its death."""
        ...

    def kill_primary(self) -> None:
        """kill -9."""
        ...

    def stop_standby(self) -> None:
        """It confirms nothing, and its connections stay."""
        ...

    def go_standby(self) -> None: ...

    async def promote(self) -> None:
        """The standby takes writes."""
        ...

    async def leave_behind(self) -> None:
        """The old primary lives, and takes no writes any more."""
        ...


class RedisPair:
    def __init__(self, servers: Callable[..., Daemon]) -> None:
        self._servers = servers

    async def start(self) -> None:
        await self.restart()
        host, port = self._primary.ready["url"].removesuffix("/0").rpartition("/")[2].split(":")
        settings = {**DURABLE, "replicaof": f"{host} {port}", "repl-diskless-sync-delay": "0"}
        self._standby = await asyncio.to_thread(self._servers, "standby", settings=settings)
        self.url = f"{self._primary.ready['url'].removesuffix('/0')},{self._standby.ready['url'].partition('://')[2]}"
        async with asyncio.timeout(WAIT_S):
            while not await self._is_online():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.02)

    async def _is_online(self) -> bool:
        told = await self._told(self._primary, "INFO", "replication")
        return bool(told.get("slave0", {}).get("state") == "online")

    async def restart(self) -> None:
        self._primary = await asyncio.to_thread(self._servers, "primary")

    def kill_primary(self) -> None:
        self._primary.kill()

    def stop_standby(self) -> None:
        self._standby.process.send_signal(signal.SIGSTOP)

    def go_standby(self) -> None:
        self._standby.process.send_signal(signal.SIGCONT)

    async def promote(self) -> None:
        await self._told(self._standby, "REPLICAOF", "NO", "ONE")

    async def leave_behind(self) -> None:
        host, port = self._standby.ready["url"].removesuffix("/0").rpartition("/")[2].split(":")
        await self._told(self._primary, "REPLICAOF", host, port)

    async def _told(self, server: Daemon, *words: str) -> Any:
        async with Redis.from_url(server.ready["url"]) as client, asyncio.timeout(WAIT_S):
            while True:
                with suppress(RedisError):
                    return await client.execute_command(*words)
                await asyncio.sleep(0.02)


class PostgresPair:
    """The primary answers once its standby has it (`synchronous_standby_names`)."""

    def __init__(self, servers: postgres_servers.Servers) -> None:
        self._primary, self._standby = servers("primary"), servers("standby")
        self.url = f"postgresql://laminar@127.0.0.1:{self._primary.port},127.0.0.1:{self._standby.port}/postgres"

    async def start(self) -> None:
        await asyncio.to_thread(self._primary.make)
        await self.restart()
        await asyncio.to_thread(self._standby.make_standby_of, self._primary, "standby")
        await asyncio.to_thread(self._standby.start)

    async def restart(self) -> None:
        await asyncio.to_thread(lambda: self._primary.start(synchronous_standby_names="standby"))

    def kill_primary(self) -> None:
        self._primary.kill()

    def stop_standby(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_standby(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """To the server and all of its processes, each of which leads a group of its own."""
        assert self._standby.process is not None
        parent = self._standby.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in (parent, *map(int, children)):
            os.kill(pid, number)

    async def promote(self) -> None:
        await asyncio.to_thread(self._standby.promote)

    async def leave_behind(self) -> None:
        import asyncpg

        connection = await asyncpg.connect(self._primary.url)
        await connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.close()


@pytest.fixture(params=["redis", "postgresql"])
async def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair
    if request.param == "redis":
        found = RedisPair(request.getfixturevalue("redis_servers"))
    else:
        found = PostgresPair(request.getfixturevalue("postgres_servers"))
    await found.start()
    return found
