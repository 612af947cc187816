"""A turn that no engine takes in time is told as 429 with Retry-After, however long that is beside a keep-alive."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from pathlib import Path

import aiohttp
import pytest

from gateway.api.calls import events
from gateway.app import start
from gateway.core.fleet.config import FleetConfig
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import config

KEEP_ALIVE_S, QUEUE_S = 0.02, 0.5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_full_queue_is_a_status_and_a_slow_engine_is_kept_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", KEEP_ALIVE_S)
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "stream": stream}
    async with ScriptedEngine("e0", hold_at=0) as e0:
        few = dataclasses.replace(config(tmp_path, e0), queue_timeout_s=QUEUE_S, fleet=FleetConfig(max_running=1))
        found = await start(few)
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        async with aiohttp.ClientSession(found.url) as http, http.post("/v1/completions", json=body) as first:
            assert first.status == 200, "headers, for it was kept alive"
            async with http.post("/v1/completions", json=body) as second:
                assert second.status == 429, await second.text()
                assert int(second.headers["Retry-After"]) >= 1
                assert second.headers["x-should-retry"] == "true"
                assert (await second.json())["error"]["type"] == "rate_limit_error"
            e0.go.set()
            assert len(await asyncio.wait_for(first.read(), 60)) > 100
        await found.close(1.0)


async def test_a_queue_that_is_longer_than_proxies_wait_is_kept_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", KEEP_ALIVE_S)
    monkeypatch.setattr(events, "QUIET_S_MAX", 2 * KEEP_ALIVE_S)
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4}
    async with ScriptedEngine("e0", hold_at=0) as e0:
        found = await start(dataclasses.replace(config(tmp_path, e0), fleet=FleetConfig(max_running=1)))
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        async with aiohttp.ClientSession(found.url) as http:
            asked = [asyncio.create_task(http.post("/v1/completions", json=body).__aenter__()) for _ in range(2)]
            answers = await asyncio.wait_for(asyncio.gather(*asked), 60)  # both have their headers
            assert len(e0.requests) == 1, "and one still waits for an engine"
            e0.go.set()
            assert [len((await answer.json())["choices"]) for answer in answers] == [1, 1]
        await found.close(1.0)


async def test_an_agent_is_told_to_come_back_when_the_trainer_has_enough(tmp_path: Path) -> None:
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4}
    wanted = {"reader": "trainer", "trainer_version": 0, "trajectories": 1, "wait_s": 0.01}
    async with ScriptedEngine("e0") as e0:
        bound = FleetConfig(staleness_max=1)
        found = await start(dataclasses.replace(config(tmp_path, e0), queue_timeout_s=0.1, fleet=bound))
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        async with aiohttp.ClientSession(found.url) as http:
            async with http.post("/experience/sample", json=wanted) as nothing_yet:
                assert (await nothing_yet.json())["trajectories"] == []
            for number in range(2):  # (bound + 1) batches of one trajectory
                async with http.post("/v1/completions", json=body | {"session_id": f"s{number}"}) as taken:
                    assert taken.status == 200
            async with http.post("/v1/completions", json=body | {"session_id": "s2"}) as refused:
                assert refused.status == 429
                assert int(refused.headers["Retry-After"]) >= 1
                assert "reach the bound" in (await refused.json())["error"]["message"]
            async with http.post("/v1/completions", json=body | {"session_id": "s1", "prompt": [7]}) as going_on:
                assert going_on.status == 200, "who was admitted goes on"
            async with http.post("/sessions/s0/finish", json={"reward": 1.0}):
                pass
            async with http.post("/experience/sample", json=wanted) as used:
                lease = (await used.json())["lease_id"]
            async with http.post("/experience/ack", json={"lease_id": lease}):
                pass
            async with http.post("/v1/completions", json=body | {"session_id": "s3"}) as taken:
                assert taken.status == 200, "a place came free"
        await found.close(1.0)


async def test_the_bound_outlives_the_gateway_though_its_trainer_is_not_back(tmp_path: Path) -> None:
    """Else agents would fill the buffer of a gateway that was started again with what nobody can use."""
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4}
    wanted = {"reader": "trainer", "trainer_version": 0, "trajectories": 1, "wait_s": 0.01}
    async with ScriptedEngine("e0") as e0:
        settings = dataclasses.replace(
            config(tmp_path, e0), queue_timeout_s=0.1, fleet=FleetConfig(staleness_max=0), session_idle_s=3600.0
        )
        for life in range(2):
            found = await start(settings)
            await until(lambda found=found: found.fleet.state.sorted_engines()[0].status == "serving", "an engine")
            async with aiohttp.ClientSession(found.url) as http:
                if life == 0:
                    async with http.post("/experience/sample", json=wanted) as nothing_yet:
                        assert nothing_yet.status == 200
                    async with http.post("/sessions/s0/v1/completions", json=body) as taken:
                        assert taken.status == 200, await taken.text()
                    async with http.post("/sessions/s0/finish", json={"reward": 1.0}) as finished:
                        assert finished.status == 200
                async with http.post(f"/sessions/new{life}/v1/completions", json=body) as refused:
                    assert refused.status == 429, (life, await refused.text())
                    assert "reach the bound" in (await refused.json())["error"]["message"]
            await found.close(1.0)


@pytest.mark.slow
async def test_tool_results_of_megabytes_are_taken(tmp_path: Path) -> None:
    """Whatever the context then says of them: a size alone is refused only beyond the limit that is named."""
    async with ScriptedEngine("e0") as e0:
        found = await start(config(tmp_path, e0))
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        async with aiohttp.ClientSession(found.url) as http:
            body = {"model": "policy", "prompt": [5] * (1 << 20), "max_tokens": 4}
            async with http.post("/v1/completions", data=large(body)) as answer:
                assert answer.status == 400
                assert "1048576" in (await answer.json())["error"]["message"], "it was read to its end"
            body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "metadata": {"note": "x" * (8 << 20)}}
            async with http.post("/v1/completions", data=large(body)) as answer:
                assert answer.status == 200, await answer.text()
        await found.close(1.0)


def large(body: dict[str, object]) -> io.BytesIO:
    return io.BytesIO(json.dumps(body).encode())
