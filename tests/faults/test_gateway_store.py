"""A disk that takes nothing more, under a real gateway: it says so, loses nothing, and goes on by itself."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import aiohttp
import pytest

from tests.faults.test_gateway_killed import serve
from tests.support.scripted_engine import MODEL, ScriptedEngine, scripted

pytestmark = pytest.mark.slow

BODY = {"model": MODEL, "prompt": [5], "max_tokens": 4, "session_id": "s", "return_token_ids": True}


async def status_of(http: aiohttp.ClientSession, path: str, body: object = None) -> tuple[int, str]:
    async with http.request("GET" if body is None else "POST", path, json=body) as answer:
        return answer.status, await answer.text()


async def until_health(http: aiohttp.ClientSession, wanted: int) -> str:
    async with asyncio.timeout(180):
        while (told := await status_of(http, "/healthz"))[0] != wanted:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
    return told[1]


async def test_a_disk_that_takes_nothing_more_for_a_while(
    tmp_path: Path, request: pytest.FixtureRequest, port: int
) -> None:
    async with ScriptedEngine("e0") as e0, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        gateway = await asyncio.to_thread(serve, tmp_path, [e0], port)
        request.addfinalizer(gateway.kill)
        await until_health(http, 200)
        assert (await status_of(http, "/v1/completions", BODY))[0] == 200
        _, unlimited = resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (4096, unlimited))
        status, told = await status_of(http, "/sessions/s/finish", {"reward": 1.0})
        assert status == 503, told
        assert "cannot be written" in await until_health(http, 503)
        assert (await status_of(http, "/v1/completions", BODY))[0] == 503
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        await until_health(http, 200)
        status, told = await status_of(http, "/v1/completions", {**BODY, "prompt": [6]})
        assert status == 200, told
        assert str(scripted([6], 4)[0])[1:-1].replace(" ", "") in told.replace(" ", "")
        assert (await status_of(http, "/sessions/s/finish", {"reward": 1.0}))[0] == 200
        gateway.kill()
        gateway = await asyncio.to_thread(serve, tmp_path, [e0], port)
        request.addfinalizer(gateway.kill)
        assert (await status_of(http, "/sessions/s/finish", {"reward": 1.0}))[0] == 200, "it is told again"
