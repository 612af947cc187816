"""docs/shared-experience.md as it stands: its command, a finish while the Redis is away, and a trainer of the SDK."""

from __future__ import annotations

import asyncio
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support import processes
from tests.support.pages import blocks, lines
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine
from tests.support.words import tokenizer
from trainer_client import AsyncExperienceReader

pytestmark = pytest.mark.slow

Servers = Callable[..., Daemon]


def documented(**instead: str) -> list[str]:
    """The page's command, with this machine's addresses and directories."""
    (line,) = lines(blocks("docs/shared-experience.md", "sh")[0])
    for shown in ("models/policy", "/var/lib/gateway-1", "redis://redis:6379/0", "http://engine-0:8000"):
        assert shown in line
    for shown, here in instead.items():
        line = line.replace(SHOWN[shown], here)
    return shlex.split(line)


SHOWN = {
    "model": "models/policy",
    "data": "/var/lib/gateway-1",
    "redis": "redis://redis:6379/0",
    "engine": "http://engine-0:8000",
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=180, check=False)


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def post_until_taken(http: aiohttp.ClientSession, path: str, body: Any) -> None:
    """Sends it again as long as something is away: an engine that was not looked at yet, or the Redis."""
    async with asyncio.timeout(120):
        for _ in itertools.count():
            status, answer = await post(http, path, body)
            if status == 200:
                return
            assert status == 503, answer
            await asyncio.sleep(0.05)


async def rolled_out(http: aiohttp.ClientSession, name: str) -> tuple[int, Any]:
    body = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 2}
    await post_until_taken(http, f"/s/{name}/v1/completions", body)
    return await post(http, f"/sessions/{name}/finish", {"reward": 1.0})


async def test_a_finish_is_answered_once_it_landed_and_the_status_shows_what_waits(
    tmp_path: Path, redis_servers: Servers, port: int, request: pytest.FixtureRequest
) -> None:
    redis = redis_servers()
    url = f"http://127.0.0.1:{port}"
    async with ScriptedEngine("e0") as engine, aiohttp.ClientSession(url) as http:
        model = str(tokenizer(tmp_path / "model"))
        command = documented(model=model, data=str(tmp_path / "d"), redis=redis.ready["url"], engine=engine.url)
        gateway = await asyncio.to_thread(
            processes.start, "gateway", [*command, f"--port={port}", "--no-probe"], tmp_path
        )
        request.addfinalizer(gateway.kill)
        assert (await rolled_out(http, "before"))[0] == 200
        redis.kill()
        away = asyncio.create_task(rolled_out(http, "during"))
        async with asyncio.timeout(120):
            for _ in itertools.count():
                async with http.get("/status") as answer:
                    report = (await answer.json())["shared_experience"]
                if report["waiting"] and report["failure"]:
                    break
                await asyncio.sleep(0.05)
        view = await asyncio.to_thread(run, "gateway", "status", "--url", url)
        assert re.search(r"finished trajectories wait for redis://[^:]+:\d+/0:\s+1 do", view.stdout), view.stdout
        async with http.get("/metrics") as answer:
            assert re.search(r"^laminar_gateway_shared_experience_failed\{.*\} 1.0$", await answer.text(), re.MULTILINE)
        await asyncio.to_thread(redis_servers)
        assert (await away)[0] == 200
        async with AsyncExperienceReader(url, reader="t") as reader:
            batch = await reader.sample(trajectories=2, wait_s=60)
            assert sorted(t.session_id for t in batch.trajectories) == ["before", "during"]
            await reader.ack(batch)
            await reader.ack(batch)
        assert gateway.stop() == 0


def test_a_gateway_does_not_start_over_a_redis_that_loses_what_it_acknowledged(
    tmp_path: Path, redis_servers: Servers
) -> None:
    url = redis_servers(settings={"appendonly": "yes", "appendfsync": "everysec"}).ready["url"]
    model = str(tokenizer(tmp_path / "model"))
    command = documented(model=model, data=str(tmp_path / "d"), redis=url, engine="http://127.0.0.1:1")
    for words in (command, ["gateway", "doctor", *command[2:]]):
        done = run(*words, "--port=0")
        assert done.returncode == 1
        text = " ".join((done.stdout + done.stderr).split())
        assert "`appendfsync` is `everysec` and has to be `always`" in text
        assert "`appendfsync always` into its redis.conf" in text
