"""A gateway's finishes over HTTP while the Redis that it shares is away: 503, never a success that did not land."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from gateway.core.addresses import RedisAddress
from gateway.experience import shared
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post, turn

Servers = Callable[..., Daemon]


async def post_until(http: aiohttp.ClientSession, path: str, body: object, status: int = 200) -> None:
    async with asyncio.timeout(120):
        while True:
            async with http.post(path, json=body) as answer:
                if answer.status == status:
                    return
                assert answer.status == 503, await answer.text()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "DELIVERY_WAIT_S", 0.1)


async def test_a_finish_gets_503_until_it_landed_and_the_session_has_ended_all_the_same(
    tmp_path: Path, redis_servers: Servers
) -> None:
    daemon = redis_servers()
    store = RedisAddress.parse(daemon.ready["url"])
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, experience_store=store) as (_, http):
        await turn(http, "s", [5])
        daemon.kill()
        finish = {"reward": 1.0}
        for _ in range(2):
            refused = await post(http, "/sessions/s/finish", finish, 503)
            assert "kept at this gateway" in refused["error"]["message"]
            assert "send the same request again" in refused["error"]["message"]
        await post(http, "/sessions/s/finish", {"reward": 0.0}, 409)
        await post(http, "/experience/sample", SAMPLE, 503)
        await asyncio.to_thread(redis_servers)
        await post_until(http, "/sessions/s/finish", finish)
        await post(http, "/sessions/s/reward", {"reward": 2.0})
        told = await post(http, "/experience/sample", SAMPLE)
        assert [(t["session_id"], t["reward"]) for t in told["trajectories"]] == [("s", 2.0)]
        for _ in range(2):
            assert await post(http, "/experience/ack", {"lease_id": told["lease_id"]}) == {"acknowledged": 1}


async def test_a_gateway_that_starts_again_sends_what_it_had_finished(tmp_path: Path, redis_servers: Servers) -> None:
    daemon = redis_servers()
    store = RedisAddress.parse(daemon.ready["url"])
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0, experience_store=store) as (_, http):
            await turn(http, "s", [5])
            daemon.kill()
            await post(http, "/sessions/s/finish", {"reward": 1.0}, 503)
        await asyncio.to_thread(redis_servers)
        async with gateway(tmp_path, e0, experience_store=store) as (_, http):
            await post_until(http, "/sessions/s/finish", {"reward": 1.0})
            told = await post(http, "/experience/sample", {**SAMPLE, "wait_s": 60, "trajectories": 1})
            assert [t["session_id"] for t in told["trajectories"]] == ["s"]


async def test_a_group_that_ends_while_the_redis_is_away_is_whole_once_it_is_back(
    tmp_path: Path, redis_servers: Servers
) -> None:
    daemon = redis_servers()
    store = RedisAddress.parse(daemon.ready["url"])
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, experience_store=store) as (_, http):
        made = await post(http, "/groups", {"size": 2, "resample_max": 0})
        first, second = [member["session_id"] for member in made["sessions"]]
        for name in (first, second):
            await turn(http, name, [5])
        await post(http, f"/sessions/{first}/finish", {"reward": 1.0})
        daemon.kill()
        await post(http, f"/sessions/{second}/finish", {"reward": 0.0}, 503)
        await asyncio.to_thread(redis_servers)
        await post_until(http, f"/sessions/{second}/finish", {"reward": 0.0})
        wanted = {"reader": "t", "trainer_version": 0, "groups": 1, "group_size": 2}
        told = await post(http, "/experience/sample", wanted)
        assert {t["session_id"] for t in told["trajectories"]} == {first, second}
