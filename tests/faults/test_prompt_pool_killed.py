"""kill -9 of gateways, and of the store that they share, while runners lease and finish: each sample ends once, and
none is lost."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support import processes
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.shared_stores import Server
from tests.support.words import tokenizer
from trainer_client import AsyncPromptPool

pytestmark = pytest.mark.slow

TASKS, GROUP, RUNNERS, KILLS = 150, 4, 8, 3


def serve(directory: Path, port: int, *more: str, name: str = "gateway") -> Daemon:
    command = ["gateway", "serve", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}"]
    where = [f"--data={directory / name}", f"--port={port}", *more]
    return processes.start(name, [*command, *where], directory)


class Runners:
    """Each sends every request again until it is answered. `finished`: samples by group, as often as they ended."""

    def __init__(self, http: aiohttp.ClientSession, *urls: str) -> None:
        """`urls`: of gateways that share a pool; each request goes to the next one."""
        self._http, self._urls = http, itertools.cycle(urls)
        self.finished: list[tuple[str, int]] = []
        self.progress = asyncio.Condition()

    async def reach(self, kill: int, kills: int) -> int:
        """Until it is time for this one of so many kills; how many samples are finished."""
        samples = kill * TASKS * GROUP // (kills + 2)
        async with asyncio.timeout(120), self.progress:
            await self.progress.wait_for(lambda: len(self.finished) > samples)
            return len(self.finished)

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

    async def _post(self, path: str, body: object) -> dict[str, Any]:
        while True:
            try:
                async with self._http.post(next(self._urls) + path, json=body) as answer:
                    assert answer.status in (200, 503), await answer.text()
                    if answer.status == 200:
                        found: dict[str, Any] = await answer.json()
                        return found
            except (aiohttp.ClientError, ConnectionError):
                pass  # it is being killed
            await asyncio.sleep(0.05)


async def test_each_sample_ends_once_though_the_gateway_is_killed(
    tmp_path: Path, request: pytest.FixtureRequest, port: int
) -> None:
    gateway = await asyncio.to_thread(serve, tmp_path, port)
    request.addfinalizer(gateway.kill)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as http, AsyncPromptPool(url) as pool:
        await pool.add(({"n": n} for n in range(TASKS)), group_size=GROUP, id_column="n")
        runners = Runners(http, url)
        running = [asyncio.create_task(runners.run(f"r{n}")) for n in range(RUNNERS)]
        for kill in range(1, KILLS + 1):
            await runners.reach(kill, KILLS)
            gateway.kill()
            gateway = await asyncio.to_thread(serve, tmp_path, port)
            request.addfinalizer(gateway.kill)
        async with asyncio.timeout(120):
            await asyncio.gather(*running)
        await check(pool, runners)


async def test_each_sample_ends_once_though_gateways_and_their_store_are_killed(
    tmp_path: Path, request: pytest.FixtureRequest, killable_store: Server
) -> None:
    with KeptPorts() as ports:
        killable_store.start()
        shared = f"--experience-store={killable_store.url}"
        names = ("one", "other")

        async def start(name: str) -> Daemon:
            found = await asyncio.to_thread(partial(serve, tmp_path, ports.of(name), shared, name=name))
            request.addfinalizer(found.kill)
            return found

        gateways = {name: await start(name) for name in names}
        urls = [f"http://127.0.0.1:{ports.of(name)}" for name in names]
        async with aiohttp.ClientSession() as http, AsyncPromptPool(urls[0]) as pool:
            await pool.add(({"n": n} for n in range(TASKS)), group_size=GROUP, id_column="n")
            runners = Runners(http, *urls)
            running = [asyncio.create_task(runners.run(f"r{n}")) for n in range(RUNNERS)]
            kills = ["one", "store", "other", "store"]
            for number, killed in enumerate(kills, 1):
                before = await runners.reach(number, len(kills))
                print(f"| {killed} | {before} |")
                if killed == "store":
                    killable_store.kill()
                    await asyncio.to_thread(killable_store.start)
                else:
                    gateways[killed].kill()
                    gateways[killed] = await start(killed)
            async with asyncio.timeout(120):
                await asyncio.gather(*running)
            await check(pool, runners)


async def check(pool: AsyncPromptPool, runners: Runners) -> None:
    """Every sample ended, each once, with its own reward."""
    status = await pool.status()
    assert (status.tasks, status.drained, status.leased, status.open_groups) == (TASKS, TASKS, 0, 0)
    results = await pool.results(limit=TASKS + 1)
    assert sorted(int(result.task_id) for result in results) == list(range(TASKS))
    assert all(result.rewards == list(range(GROUP)) for result in results)
    assert len(runners.finished) == len(set(runners.finished)) == TASKS * GROUP
