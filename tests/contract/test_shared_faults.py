"""Gateways over one Redis that takes no writes, lost its end, is slow, or has readers at one of them alone."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis._parsers.base import BaseParser
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.core.addresses import RedisAddress
from gateway.experience import ExperienceBuffer
from gateway.log import redis_server, replicated
from gateway.log.redis_server import RedisServer, Script
from protos.errors import LaminarError, Unavailable
from tests.contract.test_shared_experience import Opener as Opener
from tests.contract.test_shared_experience import opened as opened
from tests.contract.test_shared_prompt_pool import dump, task
from tests.contract.test_shared_prompt_pool import opened as opened_pool
from tests.support.processes import Daemon
from tests.support.redis_servers import DURABLE
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post, turn
from tests.unit.gateway_store.disk import until
from tests.unit.gateway_store.test_experience import sample, trajectory

Servers = Callable[..., Daemon]
WRITE = Script("return redis.call('SET', KEYS[1] .. ':value', 'x')")


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[Any]:
    """The package's own, as an operator's redis-cli."""
    async with Redis.from_url(url, protocol=2) as found:
        yield found


NOWHERE = ("127.0.0.1", "1")
STATES = {
    "READONLY": [("REPLICAOF", *NOWHERE)],
    "MASTERDOWN": [("CONFIG", "SET", "replica-serve-stale-data", "no"), ("REPLICAOF", *NOWHERE)],
    "OOM": [("CONFIG", "SET", "maxmemory", "1")],
    "NOREPLICAS": [("CONFIG", "SET", "min-replicas-to-write", "1")],
}
MENDED = [("REPLICAOF", "NO", "ONE"), ("CONFIG", "SET", "maxmemory", "0")]


@pytest.mark.parametrize("state", STATES)
async def test_a_redis_that_takes_no_writes_is_away(redis_servers: Servers, state: str) -> None:
    url = redis_servers().ready["url"]
    server = await RedisServer.connect(RedisAddress.parse(url))
    async with client(url) as operator:
        for command in STATES[state]:
            await operator.execute_command(*command)
        try:
            with pytest.raises(Unavailable):
                await server.call(WRITE, "room", wait_s=0.0)
            assert server.failure
        finally:
            await server.close()


async def test_a_redis_that_is_busy_with_a_script_is_away(redis_servers: Servers) -> None:
    url = redis_servers().ready["url"]
    server = await RedisServer.connect(RedisAddress.parse(url))
    async with client(url) as one, client(url) as operator:
        await operator.execute_command("CONFIG", "SET", "busy-reply-threshold", "10")
        endless = asyncio.create_task(one.execute_command("EVAL", "while true do end", 0))
        await until_refused(server)
        await operator.execute_command("SCRIPT", "KILL")
        with pytest.raises(RedisError):
            await endless
    assert await server.call(WRITE, "room", wait_s=60.0)
    await server.close()


async def until_refused(server: RedisServer) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Unavailable):
                await server.call(WRITE, "room", wait_s=0.0)
                continue
            assert "BUSY" in server.failure
            return


async def test_a_node_that_serves_no_slot_may_answer_later(redis_servers: Servers) -> None:
    url = redis_servers(settings={**DURABLE, "cluster-enabled": "yes"}).ready["url"]
    async with client(url) as operator:
        with pytest.raises(RedisError) as refused:
            await operator.execute_command("SET", "x", "y")
    assert redis_server._passes(refused.value)


@pytest.mark.parametrize("reply", ["TRYAGAIN Multiple keys request during rehashing of slot", "CLUSTERDOWN Hash slot"])
def test_a_cluster_that_moves_slots_may_answer_later(reply: str) -> None:
    assert redis_server._passes(BaseParser.parse_error(reply))


async def test_a_sample_that_failed_hides_nothing(redis_servers: Servers, opened: Opener) -> None:
    url = redis_servers().ready["url"]
    buffer = await opened(url, "a")
    await buffer.add(trajectory("s"))
    async with client(url) as operator:
        for command in STATES["OOM"]:
            await operator.execute_command(*command)
        with contextlib.suppress(RedisError, LaminarError):  # how it fails is another test's
            await sample(buffer, "r", trajectories=1, trainer_version=1)
        for command in MENDED:
            await operator.execute_command(*command)
    _, found = await sample(buffer, "r", trajectories=1, trainer_version=1, wait_s=1.0)
    assert [t.session_id for t in found] == ["s"]


async def test_after_a_failover_that_lost_the_newest_commands_the_pools_are_alike(
    redis_servers: Servers, tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has gone on when the gateway looks again."""
    daemon = redis_servers()
    url, files = daemon.ready["url"], tmp_path / "redis"
    async with opened_pool(url, namespace) as one:
        await one.add("default", [task("kept")])
        shutil.copytree(files, tmp_path / "replica")
        await one.add("default", [task("lost")])
        gone_on, exchange = asyncio.Event(), one._commands._log.exchange

        async def later(*arguments: Any, **options: Any) -> Any:
            await gone_on.wait()
            return await exchange(*arguments, **options)

        monkeypatch.setattr(one._commands._log, "exchange", later)
        daemon.kill()
        shutil.rmtree(files)
        shutil.copytree(tmp_path / "replica", files)
        await asyncio.to_thread(redis_servers)
        async with opened_pool(url, namespace) as other:
            await other.add("default", [task("later")])
            gone_on.set()
            for pool in (one, other):
                await pool._commands.look()
            assert await dump(one) == await dump(other)


class SlowLink:
    """Leads to a Redis, and passes what it answers at so many bytes per second, without a pause of a tenth of one."""

    def __init__(self, url: str, bytes_per_s: float) -> None:
        self._address, self._chunk = RedisAddress.parse(url), int(bytes_per_s / 20)
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for way in self._passing:
            way.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection(*self._address.hosts[0])
        both = [asyncio.create_task(self._pass(*way)) for way in ((reader, here, 0.0), (there, writer, 0.05))]
        self._passing.update(both)
        await asyncio.wait(both)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pause_s: float) -> None:
        with contextlib.closing(sink), contextlib.suppress(ConnectionError):
            while data := await source.read(self._chunk):
                sink.write(data)
                await sink.drain()
                await asyncio.sleep(pause_s if len(data) == self._chunk else 0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes more than five seconds of a reply takes more than half a one."""
    monkeypatch.setattr(redis_server, "REPLY_TIMEOUT_S", 0.5)


async def test_a_batch_that_takes_long_to_come_comes(shared_redis: str, opened: Opener, impatient: None) -> None:
    filler: ExperienceBuffer = await opened(shared_redis, "a")
    for number in range(8):
        await filler.add(msgspec.structs.replace(trajectory(f"s{number}"), tags={"text": secrets.token_hex(50_000)}))
    async with SlowLink(shared_redis, 400_000) as url:
        buffer = await opened(url, "b")
        _, found = await sample(buffer, "r", trajectories=8, trainer_version=1, wait_s=1.0)
    assert len(found) == 8


async def test_a_command_log_that_takes_long_to_come_comes(
    shared_redis: str, namespace: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "WAIT_S", 2.0)
    async with opened_pool(shared_redis, namespace) as one:
        for number in range(8):
            await one.add("default", [task(f"{number}-{'x' * 50_000}")])
        async with SlowLink(shared_redis, 400_000) as url, opened_pool(url, namespace) as other:
            assert await dump(other) == await dump(one)


async def test_what_a_reader_says_bounds_every_gateway(tmp_path: Path, shared_redis: str, namespace: str) -> None:
    store = {"experience_store": RedisAddress.parse(shared_redis), "redis_namespace": namespace}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with (
        ScriptedEngine("e0") as e0,
        ScriptedEngine("e1") as e1,
        gateway(tmp_path / "a", e0, **store) as (_, a),
        gateway(tmp_path / "b", e1, **store) as (found, b),
    ):
        await turn(a, "s", [5])
        await post(a, "/sessions/s/finish", {"reward": 1.0})
        await post(a, "/experience/sample", {**SAMPLE, "trainer_version": 5, "staleness_max": 9, "wait_s": 0.01})
        await until(lambda: bool(found.parts.trainer._counting()), "what a reader said is there")
        status = await get(b, "/status")
    assert (status["trainer_version"], status["admission"]["batch"]) == (5, SAMPLE["trajectories"])
