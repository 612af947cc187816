"""kill -9 of the gateway while runners lease and finish: each sample ends once, and none is lost."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.support import processes
from tests.support.processes import Daemon
from tests.support.words import tokenizer
from trainer_client import AsyncPromptPool

pytestmark = pytest.mark.slow

TASKS, GROUP, RUNNERS, KILLS = 150, 4, 8, 3


def serve(directory: Path, port: int) -> Daemon:
    command = ["gateway", "serve", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}"]
    return processes.start("gateway", [*command, f"--data={directory / 'data'}", f"--port={port}"], directory)


class Runners:
    """Each sends every request again until it is answered. `finished`: samples by group, as often as they ended."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.finished: list[tuple[str, int]] = []
        self.progress = asyncio.Condition()

    def has(self, samples: int) -> bool:
        return len(self.finished) > samples

    async def run(self, name: str) -> None:
        number = 0
        while True:
            number += 1
            wanted = {"runner": name, "count": 2, "request": f"{name}-{number}", "wait_s": 5}
            answer = await self._post("/tasks/lease", wanted)
            if answer["drained"]:
                return
            for lease in answer["leases"]:
                await self._post("/tasks/finish", {"lease_id": lease["lease_id"], "reward": lease["sample_index"]})
                async with self.progress:
                    self.finished.append((lease["group_id"], lease["sample_index"]))
                    self.progress.notify_all()

    async def _post(self, path: str, body: object) -> dict:  # type: ignore[type-arg]
        while True:
            try:
                async with self._http.post(path, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    return await answer.json()
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(0.05)


async def test_each_sample_ends_once_though_the_gateway_is_killed(
    tmp_path: Path, request: pytest.FixtureRequest, port: int
) -> None:
    gateway = await asyncio.to_thread(serve, tmp_path, port)
    request.addfinalizer(gateway.kill)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(url) as http, AsyncPromptPool(url) as pool:
        await pool.add(({"n": n} for n in range(TASKS)), group_size=GROUP, id_column="n")
        runners = Runners(http)
        running = [asyncio.create_task(runners.run(f"r{n}")) for n in range(RUNNERS)]
        for kill in range(1, KILLS + 1):
            async with asyncio.timeout(120), runners.progress:
                await runners.progress.wait_for(partial(runners.has, kill * TASKS * GROUP // (KILLS + 2)))
            gateway.kill()
            gateway = await asyncio.to_thread(serve, tmp_path, port)
            request.addfinalizer(gateway.kill)
        async with asyncio.timeout(120):
            await asyncio.gather(*running)
        status = await pool.status()
        assert (status.tasks, status.drained, status.leased, status.open_groups) == (TASKS, TASKS, 0, 0)
        results = await pool.results(limit=TASKS + 1)
        assert sorted(int(result.task_id) for result in results) == list(range(TASKS))
        assert all(result.rewards == list(range(GROUP)) for result in results)
        assert len(runners.finished) == len(set(runners.finished)) == TASKS * GROUP
