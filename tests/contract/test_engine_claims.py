"""Claims on engines: one suite over etcd, a registry in memory, and a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.fleet.claims import ClaimStore, engine_key
from gateway.redis import SharedGateways
from paramserver.client import EtcdClaims
from paramserver.membership import EtcdRegistry, MemoryRegistry, MemoryStore
from tests.support.redis_servers import connect

TTL_S = 60.0
Gateways = Callable[..., ClaimStore]
"""`gateways(name, ttl_s)`: the claims of one gateway's life."""


@pytest.fixture(params=["memory", "etcd", "redis"])
async def gateways(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Gateways]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "redis":
            server = await connect(stack, request.getfixturevalue("shared_redis"), namespace)
            yield lambda name, ttl_s=TTL_S: SharedGateways(server, name, ttl_s)
        elif request.param == "etcd":
            registry = await EtcdRegistry.connect(request.getfixturevalue("etcd"))
            stack.push_async_callback(registry.close)
            yield lambda name, ttl_s=TTL_S: EtcdClaims(registry, name, ttl_s)
        else:
            store = MemoryStore(time.monotonic)
            yield lambda name, ttl_s=TTL_S: EtcdClaims(MemoryRegistry(store), name, ttl_s)


async def test_an_engine_has_one_gateway_until_that_drops_it(gateways: Gateways) -> None:
    one, other = gateways("one"), gateways("other")
    assert await one.claim(["e0", "e1"]) == {}
    held = await other.claim(["e1", "e2"])
    assert list(held) == ["e1"]
    assert held["e1"].startswith("one")
    assert await one.claim(["e0", "e1"]) == {}, "a renewal"
    await other.drop(["e1"])
    assert list(await other.claim(["e1"])) == ["e1"], "only its gateway drops a claim"
    await one.drop(["e1", "never claimed"])
    assert await other.claim(["e1"]) == {}
    assert list(await one.claim(["e0", "e1", "e2"])) == ["e1", "e2"]


async def test_a_gateway_that_starts_again_goes_on_with_its_claims(gateways: Gateways) -> None:
    assert await gateways("one").claim(["e0"]) == {}
    again = gateways("one")
    assert await again.claim(["e0"]) == {}
    assert list(await gateways("other").claim(["e0"])) == ["e0"]


async def test_a_life_that_ends_late_leaves_its_successors_claims(gateways: Gateways) -> None:
    before, after = gateways("one"), gateways("one")
    assert await before.claim(["e0"]) == {}
    assert await after.claim(["e0"]) == {}
    await before.drop(["e0"])
    assert list(await gateways("other").claim(["e0"])) == ["e0"]
    await after.drop(["e0"])
    assert await gateways("other").claim(["e0"]) == {}


async def test_the_claims_of_a_gateway_that_died_end(gateways: Gateways) -> None:
    assert await gateways("one", 1.0).claim(["e0"]) == {}
    other = gateways("other")
    deadline = time.monotonic() + 120
    while held := await other.claim(["e0"]):
        assert time.monotonic() < deadline, held


async def test_of_two_that_claim_at_once_one_has_it(gateways: Gateways) -> None:
    several = [gateways(f"g{n}") for n in range(4)]
    for engine in map(str, range(10)):
        held = await asyncio.gather(*(found.claim([engine]) for found in several))
        assert sum(not refused for refused in held) == 1


def test_the_key_of_an_engine() -> None:
    assert engine_key("http://engine-0:8000") == engine_key("http://engine-0:8000/") == "engine-0:8000"
    assert engine_key("https://engine-0") == "engine-0:443"
    here = engine_key("http://127.0.0.1:8000")
    assert here == engine_key("http://localhost:8000")
    assert here != "127.0.0.1:8000", "on another host it is another engine"
