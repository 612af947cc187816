"""A primary and its standby of each store that gateways share: killed, stopped, promoted, left behind."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Mapping
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
    settings: Mapping[str, str] = DURABLE

    def __init__(self, servers: Callable[..., Daemon]) -> None:
        self._servers = servers

    async def start(self) -> None:
        await self.restart()
        settings = {**self.settings, "replicaof": " ".join(_place(self._primary)), "repl-diskless-sync-delay": "0"}
        self._standby = await asyncio.to_thread(self._servers, "standby", settings=settings)
        self.url = f"{self._primary.ready['url'].removesuffix('/0')},{self._standby.ready['url'].partition('://')[2]}"
        async with asyncio.timeout(WAIT_S):
            while not await self._is_online():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.02)

    async def _is_online(self) -> bool:
        told = await self._told(self._primary, "INFO", "replication")
        return bool(told.get("slave0", {}).get("state") == "online")

    async def restart(self) -> None:
        self._primary = await asyncio.to_thread(self._servers, "primary", settings=self.settings)

    def kill_primary(self) -> None:
        self._primary.kill()

    def stop_standby(self) -> None:
        self._standby.process.send_signal(signal.SIGSTOP)

    def go_standby(self) -> None:
        self._standby.process.send_signal(signal.SIGCONT)

    async def promote(self) -> None:
        await self._told(self._standby, "REPLICAOF", "NO", "ONE")

    async def leave_behind(self) -> None:
        await self._told(self._primary, "REPLICAOF", *_place(self._standby))

    async def _told(self, server: Daemon, *words: str) -> Any:
        async with Redis.from_url(server.ready["url"]) as client, asyncio.timeout(WAIT_S):
            while True:
                with suppress(RedisError):
                    return await client.execute_command(*words)
                await asyncio.sleep(0.02)

    async def _await_role(self, server: Daemon, role: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self._told(server, "INFO", "replication"))["role"] != role:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def _place(server: Daemon) -> list[str]:
    """Host and port."""
    return str(server.ready["url"]).removesuffix("/0").rpartition("/")[2].split(":")


class SentinelPair(RedisPair):
    """A sentinel promotes the replica, and makes one of the old primary. A primary without one takes no writes."""

    settings: Mapping[str, str] = {**DURABLE, "min-replicas-to-write": "1"}

    async def start(self) -> None:
        await super().start()
        watch = f"monitor p {' '.join(_place(self._primary))} 1"
        rules = (watch, "down-after-milliseconds p 1000", "failover-timeout p 3000")
        settings = {"sentinel": "\nsentinel ".join(rules)}
        start = functools.partial(self._servers, "sentinel", settings=settings, arguments=("--sentinel",))
        self._sentinel = await asyncio.to_thread(start)
        async with asyncio.timeout(WAIT_S):
            while not await self._told(self._sentinel, "SENTINEL", "REPLICAS", "p"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def promote(self) -> None:
        lives = self._primary.process.poll() is None
        if lives:
            await self._told(self._sentinel, "SENTINEL", "FAILOVER", "p")
        await self._await_role(self._standby, "master")
        if not lives:
            await self.restart()
        await self.leave_behind()

    async def leave_behind(self) -> None:
        await self._await_role(self._primary, "slave")


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
        async with asyncio.timeout(WAIT_S):
            while not await self._is_confirming():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)

    async def _is_confirming(self) -> bool:
        import asyncpg

        connection = await asyncpg.connect(self._primary.url)
        found = await connection.fetchval("SELECT count(*) FROM pg_stat_replication WHERE sync_state='sync'")
        await connection.close()
        return bool(found)

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


@pytest.fixture(params=["redis", "sentinel", "postgresql"])
async def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair
    if request.param in ("redis", "sentinel"):
        kind = RedisPair if request.param == "redis" else SentinelPair
        found = kind(request.getfixturevalue("redis_servers"))
    else:
        found = PostgresPair(request.getfixturevalue("postgres_servers"))
    await found.start()
    return found
