"""Claims on engines: one suite over etcd, a registry in memory, and a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.fleet import claims
from gateway.fleet.claims import Claimed, ClaimStore, EngineClaims, engine_keys
from gateway.log.gateways import GatewayLog, SharedGateways
from gateway.runtime.life import _began, is_over, this_life
from paramserver.client import EtcdClaims
from paramserver.membership import EtcdRegistry, MemoryRegistry, MemoryStore
from tests.support.shared_stores import SHARED, connect

TTL_S = 60.0
OVER = {"over"}
"""Lives of which it is known that they have ended."""
Gateways = Callable[..., ClaimStore]
"""`gateways(name, ttl_s, life)`: the claims of one gateway's life."""


@pytest.fixture(params=["memory", "etcd", *SHARED])
async def gateways(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Gateways]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param in SHARED:
            server = await connect(stack, request, request.param, namespace)
            logs = [GatewayLog(server) for _ in range(4)]
            for log in logs:
                stack.push_async_callback(log.close)
                await log.open()
            each = itertools.cycle(logs)
            yield lambda name, ttl_s=TTL_S, life="1": SharedGateways(next(each), name, ttl_s, life, OVER.__contains__)
        elif request.param == "etcd":
            registry = await EtcdRegistry.connect(request.getfixturevalue("etcd"))
            stack.push_async_callback(registry.close)
            yield lambda name, ttl_s=TTL_S, life="1": EtcdClaims(registry, name, ttl_s, life, OVER.__contains__)
        else:
            store = MemoryStore(time.monotonic)
            yield lambda name, ttl_s=TTL_S, life="1": EtcdClaims(
                MemoryRegistry(store), name, ttl_s, life, OVER.__contains__
            )


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
    assert await gateways("one", life="over").claim(["e0"]) == {}
    again = gateways("one", life="2")
    assert await again.claim(["e0"]) == {}
    assert list(await gateways("other").claim(["e0"])) == ["e0"]


async def test_two_that_live_under_one_name_do_not_share_an_engine(gateways: Gateways) -> None:
    """As on a copy of the `--data`, or on another host, of which nobody knows whether it is over."""
    assert await gateways("one", life="1").claim(["e0"]) == {}
    held = await gateways("one", life="2").claim(["e0", "e1"])
    assert list(held) == ["e0"]
    assert held["e0"].startswith("one")


async def test_a_life_that_ends_late_leaves_its_successors_claims(gateways: Gateways) -> None:
    before, after = gateways("one", life="over"), gateways("one", life="2")
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


async def test_what_an_engine_is_known_by(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await engine_keys("http://192.0.2.7:8000") == await engine_keys("http://192.0.2.7:8000/")
    assert await engine_keys("https://192.0.2.7") == ({"192.0.2.7:443"}, set())
    assert await engine_keys("http://engine.invalid:8000") == ({"engine.invalid:8000"}, set()), "what nothing resolves"
    here = await engine_keys("http://127.0.0.1:8000")
    assert here == await engine_keys("http://localhost:8000")
    assert here.sure <= (await engine_keys(f"http://{socket.gethostname()}:8000")).sure
    assert "127.0.0.1:8000" not in here.sure | here.possible, "on another host it is another engine"
    for unspecified in ("http://0.0.0.0:8000", "http://[::]:8000"):
        assert (await engine_keys(unspecified)).sure == here.sure, "which is this host, on every host"
    monkeypatch.setattr(claims, "_own_addresses", lambda: {"192.0.2.7"})
    assert (await engine_keys("http://127.0.0.1:8000")).possible == {"192.0.2.7:8000"}, "as other hosts know it"


async def test_a_host_whose_own_name_leads_to_loopback_may_be_known_by_it(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Debian, and as other hosts write it."""
    leads_to, namespace = {"127.0.1.1"}, "host-one"

    async def resolved(host: str, port: int) -> set[str]:
        return leads_to

    async def lost(url: str, holder: str) -> None:
        raise AssertionError(f"{holder} has {url}")

    monkeypatch.setattr(claims, "_addresses", resolved)
    monkeypatch.setattr(claims, "_network_namespace", lambda: namespace)
    monkeypatch.setattr(claims, "_own_addresses", set)
    monkeypatch.setattr(socket, "gethostname", lambda: "node5")
    for name in ("node5", "node5.cluster.example"):
        assert await engine_keys(f"http://{name}:8000") == ({"host-one:8000"}, {f"{name}:8000"})
    assert not (await engine_keys("http://engine:8000")).possible, "on another host it is another engine"
    one, clone, remote = (EngineClaims(gateways(name), lost) for name in ("one", "clone", "remote"))
    await one.take("a", "http://node5:8000")
    namespace = "host-two"
    await clone.take("b", "http://node5:8000")
    assert "engine b at http://node5:8000 may be one of one" in caplog.text, "hosts of one image may have one name"
    leads_to = {"192.0.2.5"}
    with pytest.raises(Claimed):
        await remote.take("c", "http://node5:8000")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    leads_to = {"127.0.0.1"}
    assert not (await engine_keys("http://localhost:8000")).possible


async def test_an_address_that_many_names_lead_to_is_that_of_whoever_wrote_it(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def resolved(host: str, port: int) -> set[str]:
        return {"192.0.2.7"}

    async def lost(url: str, holder: str) -> None:
        raise AssertionError(f"{holder} has {url}")

    monkeypatch.setattr(claims, "_addresses", resolved)
    one, other = (EngineClaims(gateways(name), lost) for name in ("one", "other"))
    await one.take("a", "https://pod-a.proxy.example")
    await other.take("b", "https://pod-b.proxy.example")
    assert "engine b at https://pod-b.proxy.example may be one of one" in caplog.text
    with pytest.raises(Claimed):
        await other.take("a", "https://pod-a.proxy.example")
    with pytest.raises(Claimed):
        await other.take("c", "https://192.0.2.7")
    await one.take("another spelling", "https://192.0.2.7")
    one.give_back("https://192.0.2.7")
    await renewed(one)
    with pytest.raises(Claimed):
        await other.take("a", "https://pod-a.proxy.example")
    with pytest.raises(Claimed):
        await other.take("c", "https://192.0.2.7")
    one.give_back("https://pod-a.proxy.example")
    await renewed(one)
    await other.take("a", "https://pod-a.proxy.example")
    await other.take("c", "https://192.0.2.7")


async def renewed(found: EngineClaims) -> None:
    """What is to be dropped is."""
    assert found._store is not None
    await found._renew(found._store)


def test_whether_a_life_is_over() -> None:
    assert not is_over(this_life())
    place, pid, began = this_life().rsplit(".", 2)
    assert is_over(f"{place}.{pid}.{int(began) - 1}"), "the same process id, of another process"
    with subprocess.Popen(["true"]) as done:
        done.wait()
    assert is_over(f"{place}.{done.pid}.1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        began = _began(child.pid)
        assert not is_over(f"{place}.{child.pid}.{began}")
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_over(f"{place}.{child.pid}.{began}"), "ended, and its parent has not looked yet"
    assert not is_over(f"elsewhere.{pid}.1"), "of another host nothing is known"
    assert not is_over("")
