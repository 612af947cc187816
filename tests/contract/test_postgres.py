"""The PostgreSQL that gateways share, against real servers: what it refuses, and what it does while one is away."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from gateway.core.addresses import PostgresAddress
from gateway.log.base import BEGIN, Batch
from gateway.log.postgres import PostgresStore
from protos.errors import Conflict, InvalidRequest, Unavailable
from tests.support.postgres_servers import PostgresServer, Servers


async def connect(url: str, **options: Any) -> PostgresStore:
    return await PostgresStore.connect(PostgresAddress.parse(url), **options)


@asynccontextmanager
async def operator(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def append(store: PostgresStore, number: int, wait_s: float = 0.0) -> None:
    await store.log("room").exchange(BEGIN, Batch("life", number, [b"command"]), wait_s=wait_s)


async def commands(store: PostgresStore) -> int:
    return len((await store.log("room").exchange(BEGIN, Batch("life", 0), wait_s=60)).logged)


@pytest.fixture
def server(postgres_servers: Servers) -> PostgresServer:
    found = postgres_servers("primary")
    found.make()
    return found


async def test_one_that_may_lose_what_it_acknowledged_is_refused(server: PostgresServer) -> None:
    await asyncio.to_thread(lambda: server.start(fsync="off"))
    with pytest.raises(InvalidRequest, match="`fsync` is `off` and has to be `on`"):
        await connect(server.url)
    with pytest.raises(InvalidRequest, match="`fsync`"):
        await PostgresStore.examine(PostgresAddress.parse(server.url), accept_unchecked=True)


async def test_one_that_is_not_there_or_has_no_such_database_is_named(
    shared_postgres: str, server: PostgresServer
) -> None:
    with pytest.raises(Unavailable, match=str(server.port)):
        await connect(server.url)
    with pytest.raises(Unavailable, match='database "never" does not exist'):
        await connect(shared_postgres.replace("/postgres", "/never"))


async def test_a_namespace_belongs_to_a_model_a_vocabulary_and_a_layout(shared_postgres: str, namespace: str) -> None:
    store = await connect(shared_postgres, namespace=namespace, model="policy", vocabulary="v")
    for other, words in (({"model": "critic", "vocabulary": "v"}, "critic"), ({"model": "policy"}, "vocabulary")):
        with pytest.raises(Conflict, match=words):
            await connect(shared_postgres, namespace=namespace, **other)
    async with operator(shared_postgres) as connection:
        await connection.execute("UPDATE laminar_namespaces SET layout='3' WHERE namespace=$1", namespace)
    with pytest.raises(Conflict, match="has layout 3, and this gateway knows 2"):
        await connect(shared_postgres, namespace=namespace, model="policy", vocabulary="v")
    await store.close()


async def test_one_that_takes_no_writes_is_away(server: PostgresServer) -> None:
    await asyncio.to_thread(server.start)
    store = await connect(server.url)
    async with operator(server.url) as connection:
        await connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await connection.execute("SELECT pg_reload_conf()")
    async with asyncio.timeout(60):
        for number in range(1, 1000):  # a connection reads the setting when it is idle
            try:
                await append(store, number)
            except Unavailable:
                break
    assert store.failure
    async with operator(server.url) as connection:
        await connection.execute("SET default_transaction_read_only = off")
        await connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await connection.execute("SELECT pg_reload_conf()")
    await append(store, 5000, wait_s=60)
    assert (store.failure, store.connected > 1) == ("", True)
    await store.close()


async def test_a_call_whose_connection_an_operator_ends_is_repeated(server: PostgresServer) -> None:
    await asyncio.to_thread(server.start)
    store = await connect(server.url)
    await append(store, 1)
    for number in range(2, 6):
        async with operator(server.url) as connection:
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name='laminar-gateway'"
            await connection.execute(ended)
        await append(store, number, wait_s=60)
    assert await commands(store) == 5
    await store.close()


async def test_after_kill_9_what_was_acknowledged_is_there_and_calls_wait_for_it(server: PostgresServer) -> None:
    await asyncio.to_thread(server.start)
    store = await connect(server.url)
    for number in range(1, 21):
        await append(store, number)
    server.kill()
    with pytest.raises(Unavailable, match="try again"):
        await append(store, 21)
    with pytest.raises(Unavailable):
        store.check()
    waiting = asyncio.create_task(append(store, 21, wait_s=180))
    await asyncio.to_thread(server.start)
    await waiting
    assert (await commands(store), store.statistics().failure) == (21, "")
    assert store.statistics().failed > 0
    await store.close()


async def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "asyncpg":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match=r"-m pip install '.*\[postgres\]'"):
        await connect("postgresql://127.0.0.1:1")
