"""Two gateways over one store: no engine is in the fleets of both, and a session is at one of them alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator, Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest
from aiohttp import web

from agents_env.environment import Outcome
from agents_env.server import Sampling, Server, SessionSpec
from agents_env.verifiers import Ending, Ends, _end
from gateway.app import Gateway, start
from gateway.core.addresses import RedisAddress
from gateway.core.claims import DropClaims
from gateway.fleet import claims, fleet, registrations
from gateway.log.stores import parse
from gateway.runtime.life import this_life
from paramserver.client import RegisteredEngine
from paramserver.core import view as keys
from paramserver.membership import EtcdRegistry
from paramserver.membership.registry import Put
from protos.errors import Conflict
from tests.support.processes import Daemon
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import config, gateway, get
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post, turn
from trainer_client import AsyncSessions, Sessions

Two = tuple[aiohttp.ClientSession, aiohttp.ClientSession]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "START_PATIENCE_S", 0.0)
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    monkeypatch.setattr(registrations, "CLAIM_AGAIN_S", 0.05)


@pytest.fixture(autouse=True)
def _directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()


@pytest.fixture
def store(shared_url: str, namespace: str) -> dict[str, Any]:
    return {"experience_store": parse(shared_url), "redis_namespace": namespace}


@pytest.fixture
async def two(tmp_path: Path, store: dict[str, Any]) -> AsyncIterator[Two]:
    """Each has an engine of its own."""
    async with (
        ScriptedEngine("e0") as e0,
        ScriptedEngine("e1") as e1,
        gateway(tmp_path / "a", e0, **store) as (_, a),
        gateway(tmp_path / "b", e1, **store) as (_, b),
    ):
        yield a, b


async def refused(http: aiohttp.ClientSession, path: str, body: object, right: aiohttp.ClientSession) -> None:
    found = await post(http, path, body, 421)
    assert str(right._base_url).rstrip("/") in found["error"]["message"]


async def test_a_gateway_that_names_an_engine_of_another_does_not_start(tmp_path: Path, store: dict[str, Any]) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path / "a", e0, **store) as (_, http):
            with pytest.raises(Conflict, match=rf"engine e0 at {e0.url} belongs to gateway-.* at {http._base_url}"):
                async with gateway(tmp_path / "b", e0, **store):
                    pass
            async with gateway(tmp_path / "b", **store) as (_, other):
                body = {"name": "mine", "url": e0.url, "relay": None}
                told = await post(other, "/admin/engines", body, 409)
                assert (told["error"]["code"], "engine mine" in told["error"]["message"]) == ("engine_claimed", True)
        async with gateway(tmp_path / "b", e0, **store) as (_, http):
            await turn(http, "s", [5])


async def test_an_engine_that_is_removed_may_join_another_gateway(tmp_path: Path, store: dict[str, Any]) -> None:
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path / "a", e0, **store) as (_, a),
        gateway(tmp_path / "b", **store) as (found, b),
    ):
        async with a.delete("/admin/engines/e0") as answer:
            assert answer.status == 200
        async with asyncio.timeout(60):
            while "e0" not in found.fleet.handles:
                async with b.post("/admin/engines", json={"name": "e0", "url": e0.url}) as answer:
                    assert answer.status in (201, 409)


@contextlib.asynccontextmanager
async def _registered_engine(etcd: str) -> AsyncIterator[ScriptedEngine]:
    """An engine that a relay has registered in etcd."""
    registry = await EtcdRegistry.connect(etcd)
    try:
        async with ScriptedEngine("e0") as e0:
            record = RegisteredEngine("e0", "vllm", e0.url, "127.0.0.1:1")
            await registry.transact([], [Put(keys.engine_key("e0"), msgspec.json.encode(record))])
            yield e0
    finally:
        await registry.close()


async def test_a_registered_engine_joins_one_gateway_and_the_other_when_that_ends(tmp_path: Path, etcd: str) -> None:
    async with _registered_engine(etcd):
        first = await _joined(tmp_path / "a", etcd)
        async with gateway(tmp_path / "b", etcd=etcd) as (other, http):
            await until(lambda: "e0" in other.fleet.elsewhere, "the engine is seen as the other's")
            status = await get(http, "/status")
            assert status["engines"] == []
            assert "belongs to gateway-" in status["engines_elsewhere"]["e0"]
            await first.close(drain_timeout_s=0.0)
            await until(lambda: "e0" in other.fleet.handles, "the engine joins")
            assert (await get(http, "/status"))["engines_elsewhere"] == {}


async def test_a_registered_engine_that_another_claimed_meanwhile_joins_again_when_that_ends(
    tmp_path: Path, etcd: str
) -> None:
    async with _registered_engine(etcd) as e0, contextlib.AsyncExitStack() as stack:
        first = await _joined(tmp_path / "a", etcd)
        stack.push_async_callback(first.close, drain_timeout_s=0.0)
        async with gateway(tmp_path / "b", etcd=etcd) as (other, _):
            mine: Any = first.fleet.claims
            async with asyncio.timeout(60):
                while "e0" not in other.fleet.handles:  # until the other one was quicker than a renewal
                    await mine._store.drop((await claims.engine_keys(e0.url)).sure)
                    await asyncio.sleep(0.01)
            await until(lambda: not first.fleet.handles, "it leaves")
        await until(lambda: "e0" in first.fleet.handles, "it joins again")
        assert first.fleet.elsewhere == {}


async def _joined(directory: Path, etcd: str) -> Gateway:
    found = await start(dataclasses.replace(config(directory), etcd=etcd))
    await until(lambda: "e0" in found.fleet.handles, "the engine joins")
    return found


async def test_an_engine_that_another_claimed_meanwhile_leaves_the_fleet(
    tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "RENEW_S", 3600.0)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path / "a", e0, **store) as (found, http):
        await found.fleet.claims._store.drop((await claims.engine_keys(e0.url)).sure)  # type: ignore[union-attr]
        async with gateway(tmp_path / "b", e0, **store):
            found.fleet.claims._changed.set()
            await until(lambda: not found.fleet.handles, "it leaves")
            assert "belongs to gateway-" in (await get(http, "/status"))["engines_elsewhere"]["e0"]


async def test_a_session_is_at_the_gateway_that_made_it(two: Two) -> None:
    a, b = two
    made = await post(a, "/sessions", {})
    assert made["base_url"].startswith(str(a._base_url))
    for name in (made["session_id"], "chosen"):
        await turn(a, name, [5])
        completion = {"model": MODEL, "prompt": [5], "max_tokens": 2}
        await refused(b, f"/sessions/{name}/v1/completions", completion, a)
        await refused(b, f"/sessions/{name}/finish", {"reward": 1.0}, a)
        await refused(b, f"/sessions/{name}/abandon", {}, a)
        async with b.get(f"/sessions/{name}") as answer:
            assert answer.status == 421
    await refused(b, "/sessions", {"session_id": "chosen"}, a)
    await turn(b, "other", [5])
    await refused(a, "/sessions/other/finish", {"reward": 1.0}, b)
    for name in (made["session_id"], "chosen"):
        await post(a, f"/sessions/{name}/finish", {"reward": 1.0})
    await refused(b, "/sessions/chosen/finish", {"reward": 1.0}, a)
    await post(b, "/sessions/nobody/finish", {}, 404)
    sampled = await post(b, "/experience/sample", {**SAMPLE, "trajectories": 2, "wait_s": 60})
    assert sorted(t["session_id"] for t in sampled["trajectories"]) == sorted(["chosen", made["session_id"]])


async def test_a_group_is_at_the_gateway_that_made_it(two: Two) -> None:
    a, b = two
    for named in ({}, {"group_id": "chosen"}):
        group = (await post(a, "/groups", {"group_size": 1, **named}))["group_id"]
        async with b.get(f"/groups/{group}") as answer:
            assert (answer.status, answer.headers["X-Laminar-Gateway"]) == (421, str(a._base_url).rstrip("/"))
            assert f"group {group!r} is at another gateway" in (await answer.json())["error"]["message"]
        await refused(b, f"/groups/{group}/abandon", {}, a)
        await refused(b, "/groups", {"group_id": group, "group_size": 1}, a)
        await post(a, f"/groups/{group}/abandon", {})
    await post(b, "/groups/nobody/abandon", {}, 404)


async def test_what_is_refused_leaves_its_name_to_others(tmp_path: Path, store: dict[str, Any]) -> None:
    async with (
        ScriptedEngine("e0") as e0,
        ScriptedEngine("e1") as e1,
        gateway(tmp_path / "a", e0, sessions_max=1, **store) as (found, a),
        gateway(tmp_path / "b", e1, **store) as (_, b),
    ):
        await post(a, "/sessions", {"session_id": "first"})
        await post(a, "/sessions", {"session_id": "first"}, 409)
        await refused(b, "/sessions", {"session_id": "first"}, a)
        await post(a, "/sessions", {"session_id": "more"}, 429)
        await post(b, "/sessions", {"session_id": "more"})
        await post(a, "/sessions/called/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 2}, 429)
        await turn(b, "called", [5])
        await post(a, "/groups", {"group_id": "group", "group_size": 2}, 429)
        await post(b, "/groups", {"group_id": "group", "group_size": 2})
        for name in ("y" * 5000, "a b", "group/other"):
            await post(a, "/sessions", {"session_id": name}, 400)
            gateways: Any = found.parts.live._gateways
            await gateways._claims.look()
            assert not gateways._claims.holder("session", name), "what names no session is not claimed"


async def test_of_two_adds_of_one_name_the_one_that_is_refused_keeps_no_claim(
    tmp_path: Path, store: dict[str, Any]
) -> None:
    async with (
        ScriptedEngine("e0") as e0,
        ScriptedEngine("e1") as e1,
        gateway(tmp_path / "a", **store) as (found, a),
        gateway(tmp_path / "b", **store) as (other, b),
    ):
        await asyncio.gather(*(a.post("/admin/engines", json={"name": "e", "url": e.url}) for e in (e0, e1)))
        [taken] = found.fleet.handles.values()
        left = e1 if taken.spec.url == e0.url else e0
        async with asyncio.timeout(60):
            while "left" not in other.fleet.handles:
                async with b.post("/admin/engines", json={"name": "left", "url": left.url}) as answer:
                    assert answer.status in (201, 409)


async def test_a_copy_of_a_gateways_data_does_not_run_beside_it(tmp_path: Path, store: dict[str, Any]) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path / "a", **store) as (found, _):
        shutil.copytree(tmp_path / "a", tmp_path / "b", dirs_exist_ok=True)
        claims: Any = found.fleet.claims._store
        claims._life, name = "another process", f"gateway:{claims.gateway}"
        held: Any = True
        while held:  # again where a renewal of before was under way
            await claims._claims.drop(DropClaims("engine", [name], claims.gateway, this_life()))
            held = await claims.claim([name])
        with pytest.raises(Conflict, match="the name of this gateway"):
            async with gateway(tmp_path / "b", e0, **store):
                pass


async def test_sessions_of_before_a_restart_are_claimed_again(tmp_path: Path, store: dict[str, Any]) -> None:
    async with (
        ScriptedEngine("e0") as e0,
        ScriptedEngine("e1") as e1,
        gateway(tmp_path / "b", e1, **store) as (other, b),
    ):
        async with gateway(tmp_path / "a", e0, **store) as (found, a):
            await turn(a, "mine", [5])
        gateways: Any = other.parts.live._gateways
        await gateways._claims.look()
        held = gateways._claims._machine.state.held["session"]["mine"]
        await gateways._claims.drop(DropClaims("session", ["mine"], held.gateway, held.life))
        async with gateway(tmp_path / "a", e0, **store) as (found, a):
            found_gateways: Any = found.parts.live._gateways
            deadline = asyncio.get_running_loop().time() + 60
            while not found_gateways._claims.holder("session", "mine"):
                await asyncio.sleep(0.01)
                assert asyncio.get_running_loop().time() < deadline
            await refused(b, "/sessions/mine/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 2}, a)


async def test_while_the_redis_is_away_sessions_begin(tmp_path: Path, redis_servers: Callable[..., Daemon]) -> None:
    daemon = redis_servers()
    address = RedisAddress.parse(daemon.ready["url"])
    async with ScriptedEngine("e0") as e0, gateway(tmp_path / "a", e0, experience_store=address) as (_, http):
        daemon.kill()
        await turn(http, "chosen", [5])
        await post(http, "/sessions", {"session_id": "another"})
        await post(http, "/sessions/nobody/finish", {"reward": 1.0}, 404)


@contextlib.asynccontextmanager
async def balancer(two: Two, *, keeps_host: bool, statuses: dict[str, int] | None = None) -> AsyncIterator[str]:
    """Passes each request to the other gateway than the one before. `keeps_host`: a session's `base_url` leads here.
    `statuses`: gets the last answer's to each path."""
    turns = cycle(two)

    async def pass_on(request: web.Request) -> web.Response:
        headers = {"Content-Type": "application/json", **({"Host": request.host} if keeps_host else {})}
        http, body = next(turns), await request.read()
        async with http.request(request.method, request.path_qs, data=body, headers=headers) as answer:
            found = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-")}
            if statuses is not None:
                statuses[request.path] = answer.status
            return web.Response(
                status=answer.status, body=await answer.read(), content_type="application/json", headers=found
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("keeps_host", [False, True])
async def test_sessions_of_the_sdk_end_where_they_are(two: Two, keeps_host: bool) -> None:
    statuses: dict[str, int] = {}
    async with balancer(two, keeps_host=keeps_host, statuses=statuses) as url:

        def play() -> str:
            with Sessions(url, MODEL) as sessions:
                with sessions.open(session_id="s0") as session:
                    session.complete([5], max_tokens=2)
                    session.finish(1.0)
                with sessions.open(session_id="s1"):
                    pass
                return session.base_url

        assert (await asyncio.to_thread(play)).startswith(url) == keeps_host
        async with AsyncSessions(url) as sessions:
            async with sessions.open(session_id="s2") as session:
                for http in two:  # one answers 421
                    await http.post("/sessions/s2/v1/completions", json={"model": MODEL, "prompt": [5]})
                await session.finish(1.0)
            async with sessions.open(session_id="s3"):
                pass
    ends = {path: status for path, status in statuses.items() if path.endswith(("/finish", "/abandon"))}
    assert len(ends) == 4, "all went to the client's URL"
    assert 421 in ends.values()
    states = {}
    for http in two:
        for name in ("s0", "s1", "s2", "s3"):
            async with http.get(f"/sessions/{name}") as answer:
                if answer.status == 200:
                    states[name] = (await answer.json())["state"]
    assert states == {"s0": "finished", "s1": "abandoned", "s2": "finished", "s3": "abandoned"}


async def test_sessions_of_a_runner_end_where_they_are(two: Two) -> None:
    async with balancer(two, keeps_host=False) as url, Server(url, Sampling(MODEL)) as server:
        for name in ("s0", "s1"):
            session = await server.open(SessionSpec(name, "g", 0, 1))
            if name == "s0":
                await session.client.completions.create(model=MODEL, prompt=[5], max_tokens=2)
                await server.finish(session, Outcome(1.0))
            else:
                await server.abandon(name, "no agent")
        for name, state in (("s0", "finished"), ("s1", "abandoned")):
            for _ in two:
                assert (found := await server.look(name)) is not None
                assert found["state"] == state


async def test_sessions_of_verifiers_end_where_they_are(two: Two) -> None:
    a, b = two
    await turn(a, "s0", [5])
    ends = Ends("run")
    async with httpx.AsyncClient(base_url=str(b._base_url), timeout=60.0, trust_env=False) as http:
        await _end(http, Ending("s0", 1.0), ends)
    assert (ends.finished, ends.failed) == (1, 0)
    assert (await get(a, "/sessions/s0"))["state"] == "finished"
