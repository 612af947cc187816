"""The room of the shared Redis, against real servers: what it refuses, and what it does while one is away."""

from __future__ import annotations

import asyncio
import builtins
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core.addresses import RedisAddress
from gateway.log.durability import SETTINGS
from gateway.log.redis_server import RedisServer, Script
from protos.errors import Conflict, InvalidRequest, Unavailable
from tests.support.processes import Daemon

SET = Script("redis.call('SET', KEYS[1] .. ':value', ARGV[1]) return redis.call('GET', KEYS[1] .. ':value')")
GET = Script("return redis.call('GET', KEYS[1] .. ':value')")
DURABLE = {setting.name: setting.wanted for setting in SETTINGS}
Servers = Callable[..., Daemon]


async def connect(url: str, **options: Any) -> RedisServer:
    return await RedisServer.connect(RedisAddress.parse(url), **options)


@pytest.mark.parametrize(
    ("setting", "value"), [("appendonly", "no"), ("appendfsync", "everysec"), ("maxmemory-policy", "allkeys-lru")]
)
async def test_one_that_may_lose_what_it_acknowledged_is_refused(
    redis_servers: Servers, setting: str, value: str
) -> None:
    url = redis_servers(settings={**DURABLE, setting: value}).ready["url"]
    with pytest.raises(InvalidRequest, match=f"`{setting}` is `{value}` and has to be `{DURABLE[setting]}`"):
        await connect(url)


async def test_where_config_is_forbidden_what_cannot_be_checked_is_named(redis_servers: Servers) -> None:
    url = redis_servers(rename="CONFIG").ready["url"]
    with pytest.raises(InvalidRequest, match=r"cannot check `appendfsync`.*unknown command.*--redis-unchecked"):
        await connect(url)
    server = await connect(url, accept_unchecked=True)
    assert server.statistics().unchecked == ["appendfsync"]
    await server.close()


async def test_one_that_is_not_there_is_named(redis_servers: Servers) -> None:
    daemon = redis_servers()
    daemon.kill()
    with pytest.raises(Unavailable, match=daemon.ready["url"]):
        await connect(daemon.ready["url"])


async def test_a_namespace_belongs_to_a_model_a_vocabulary_and_a_layout(shared_redis: str, namespace: str) -> None:
    server = await connect(shared_redis, namespace=namespace, model="policy", vocabulary="v")
    for other, words in (({"model": "critic", "vocabulary": "v"}, "critic"), ({"model": "policy"}, "vocabulary")):
        with pytest.raises(Conflict, match=words):
            await connect(shared_redis, namespace=namespace, **other)
    newer = Script("return redis.call('HSET', KEYS[1], 'layout', '3')")
    await server.call(newer, "layout")
    with pytest.raises(Conflict, match="has layout 3, and this gateway knows 2"):
        await connect(shared_redis, namespace=namespace, model="policy", vocabulary="v")
    await server.close()


async def test_namespaces_share_no_key(shared_redis: str, namespace: str) -> None:
    one, other = [await connect(shared_redis, namespace=f"{namespace}-{end}") for end in "ab"]
    assert await one.call(SET, "room", "1") == b"1"
    assert await other.call(GET, "room") is None
    for server in (one, other):
        await server.close()


async def test_after_kill_9_what_was_acknowledged_is_there_and_calls_wait_for_it(redis_servers: Servers) -> None:
    daemon = redis_servers()
    server = await connect(daemon.ready["url"])
    for number in range(50):
        await server.call(SET, "room", number)
    daemon.kill()
    with pytest.raises(Unavailable, match="try again"):
        await server.call(GET, "room", wait_s=0)
    assert server.failure
    with pytest.raises(Unavailable):
        server.check()
    waiting = asyncio.create_task(server.call(GET, "room", wait_s=180))
    redis_servers()
    assert await waiting == b"49"
    statistics = server.statistics()
    assert (statistics.failure, statistics.connected) == ("", 2)
    assert statistics.failed > 0
    await server.close()


async def test_what_was_connected_before_a_loss_carries_no_call_after_it(redis_servers: Servers) -> None:
    daemon = redis_servers()
    server = await connect(daemon.ready["url"])
    await together(server, wait_s=10)
    daemon.kill()
    with pytest.raises(Unavailable):
        await server.call(GET, "room", wait_s=0)
    redis_servers()
    await server.call(GET, "room", wait_s=180)
    failed = server.statistics().failed
    await together(server, wait_s=0)
    assert (server.failure, server.statistics().failed, server.connected) == ("", failed, 2)
    await server.close()


async def test_idle_connections_that_the_redis_closed_are_not_used(redis_servers: Servers) -> None:
    url = redis_servers().ready["url"]
    server, other = await connect(url), await connect(url)
    await together(server, wait_s=10)
    await other._command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    async with asyncio.timeout(60):
        for _ in itertools.count():
            if (await other._command("CLIENT", "LIST")).count(b"name=laminar-gateway") == 1:
                break
            await asyncio.sleep(0.01)
    await together(server, wait_s=0)
    assert (server.statistics().failed, server.connected) == (0, 1)
    for opened in (server, other):
        await opened.close()


async def together(server: RedisServer, wait_s: float) -> None:
    """Several calls at once, each with a connection of its own."""
    await asyncio.gather(*(server.call(GET, "room", wait_s=wait_s) for _ in range(4)))


async def test_a_call_of_before_a_loss_that_ends_late_says_nothing_of_the_redis_that_came_back(
    shared_redis: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await connect(shared_redis, namespace=namespace)
    sent, silent = server._command, asyncio.Event()

    async def answered_too_late(*words: str | bytes | int) -> Any:
        await silent.wait()
        raise TimeoutError("no reply")

    monkeypatch.setattr(server, "_command", answered_too_late)
    early, late = [asyncio.create_task(server.call(GET, "room", wait_s=10)) for _ in range(2)]
    await asyncio.sleep(0)  # both are sent
    server._fail(ConnectionResetError("reset"), server.connected)
    monkeypatch.setattr(server, "_command", sent)
    assert await server.call(GET, "room") is None
    assert (server.failure, server.connected) == ("", 2)
    silent.set()
    assert await early is await late is None
    assert (server.failure, server.connected, server.statistics().failed) == ("", 2, 3)
    await server.close()


async def test_one_that_comes_back_less_durable_gets_nothing(redis_servers: Servers) -> None:
    daemon = redis_servers()
    server = await connect(daemon.ready["url"])
    daemon.kill()
    weak = redis_servers(settings={**DURABLE, "appendfsync": "no"})
    with pytest.raises(Unavailable, match="`appendfsync` is `no`"):
        await server.call(SET, "room", "x", wait_s=0.2)
    weak.kill()
    redis_servers()
    assert await server.call(GET, "room", wait_s=180) is None
    await server.close()


async def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("redis"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match=r"-m pip install '.*\[redis\]'"):
        await connect("redis://127.0.0.1:1")


@pytest.mark.parametrize("confirm", [False, True])
async def test_a_loop_of_calls_ends_when_it_is_cancelled_at_whatever_moment(
    shared_redis: str, namespace: str, confirm: bool
) -> None:
    """`asyncio.wait_for` of Python 3.11, which the package writes commands with, forgets one that comes as it ends."""
    server = await connect(shared_redis, namespace=namespace)
    called = asyncio.Event()

    async def loop() -> None:
        while True:
            await server.call(GET, "room", confirm=confirm)
            called.set()

    for steps in range(60):
        called.clear()
        task = asyncio.create_task(loop())
        await called.wait()
        for _ in range(steps % 12):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.cancelled()
    await server.close()
