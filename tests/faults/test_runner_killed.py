"""kill -9 of a runner that leases from the prompt pool, and of the gateway: nothing finished is lost or doubled."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support import processes
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine, until
from tests.support.words import tokenizer
from trainer_client import AsyncExperienceReader, AsyncPromptPool

pytestmark = pytest.mark.slow

TASKS, GROUP, CONCURRENCY = 8, 3, 3
LEASE_S = 10.0
"""Until the next runner gets what a killed one had."""
PROGRAM = """
import http.client, json, os, time, urllib.request
body = {"model": os.environ["AGENTS_ENV_MODEL"], "prompt": [5, 6, 7], "max_tokens": 3}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/completions"
while True:  # as the official clients do when the gateway is killed under them
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
        break
    except (OSError, http.client.HTTPException):
        time.sleep(0.1)
"""


def serve(directory: Path, engine: ScriptedEngine, port: int) -> Daemon:
    command = ["gateway", "serve", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}"]
    where = [f"--data={directory / 'data'}", f"--port={port}", f"--engine=e0=vllm={engine.url}"]
    return processes.start("gateway", [*command, *where], directory)


def roll_out(name: str, directory: Path, url: str, *more: str) -> Daemon:
    (directory / "program.py").write_text(PROGRAM)
    options = [f"--gateway={url}", "--pool", f"--lease-s={LEASE_S}", f"--concurrency={CONCURRENCY}", "--patience-s=120"]
    command = ["agents_env", "exec", *options, *more, "--", sys.executable, "-S", str(directory / "program.py")]
    return processes.start(name, command, directory, wait_ready=False)


async def finished(http: aiohttp.ClientSession, samples: int) -> None:
    """Until so many leases have ended with a reward."""
    async with asyncio.timeout(180):
        while True:
            async with http.get("/tasks/results") as answer:
                results: list[dict[str, Any]] = (await answer.json())["results"]
            if GROUP * len(results) >= samples:
                return
            await asyncio.sleep(0.05)


def hold_after(engine: ScriptedEngine, requests: int) -> None:
    """So many more requests are answered; those that come then wait in the engine until `go_on`."""
    passing = len(engine.requests) + requests
    engine.go.clear()

    def draw() -> None:
        if len(engine.requests) > passing:
            engine.hold_at = 0

    engine.draw = draw


def go_on(engine: ScriptedEngine) -> None:
    engine.draw = engine.hold_at = None
    engine.go.set()


async def all_held(engine: ScriptedEngine) -> None:
    """Until each of the runner's programs waits for the engine, so that a kill comes in the middle of them all."""

    def held() -> bool:
        return sum(not (request.written or request.left) for request in engine.requests) >= CONCURRENCY

    await until(held, "programs that wait for the engine", 180.0)


class Table:
    """What was killed, and trajectories: before the last kill, in all, lost, doubled. Printed as lines of a table."""

    def __init__(self) -> None:
        self.lines = ["| killed | store | before | in all | lost | doubled |", "|---|---|---|---|---|---|"]

    def add(self, killed: str, before: int, wanted: int, kept: Counter[tuple[str, int]], store: str = "sqlite") -> None:
        lost, doubled = wanted - len(kept), sum(count - 1 for count in kept.values())
        self.lines.append(f"| {killed} | {store} | {before} | {sum(kept.values())} | {lost} | {doubled} |")


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    found = Table()
    yield found
    print("\n" + "\n".join(found.lines))


async def test_nothing_is_lost_or_doubled(
    tmp_path: Path, request: pytest.FixtureRequest, port: int, table: Table
) -> None:
    url = f"http://127.0.0.1:{port}"
    async with ScriptedEngine("e0") as engine, aiohttp.ClientSession(url) as http, AsyncPromptPool(url) as pool:
        gateway = await asyncio.to_thread(serve, tmp_path, engine, port)
        request.addfinalizer(gateway.kill)
        await pool.add(({"n": n} for n in range(TASKS)), group_size=GROUP, attempts_max=10)
        hold_after(engine, 3 * GROUP)  # the three that are held are of three groups at most: one of four is finished
        first = await asyncio.to_thread(roll_out, "first", tmp_path, url)
        request.addfinalizer(first.kill)
        await all_held(engine)
        await finished(http, GROUP)
        gateway.kill()  # before the runner: the next life of a gateway gives every lease a minute
        gateway = await asyncio.to_thread(serve, tmp_path, engine, port)
        request.addfinalizer(gateway.kill)
        go_on(engine)
        hold_after(engine, 2 * GROUP)
        await all_held(engine)
        before = GROUP * len(await pool.results())
        first.kill()
        go_on(engine)
        second = await asyncio.to_thread(roll_out, "second", tmp_path, url)
        request.addfinalizer(second.kill)
        status = await asyncio.to_thread(second.process.wait, 180)
        assert status == 0, second.log()
        counts = await pool.status()
        assert (counts.drained, counts.open_groups, counts.leased) == (TASKS, 0, 0), second.log()
        results = await pool.results()
        assert [result.rewards for result in results] == [[1.0] * GROUP] * TASKS
        async with AsyncExperienceReader(url) as reader:
            batch = await reader.sample(trajectories=10 * TASKS * GROUP, wait_s=0)
        kept = Counter((one.group_id, one.sample_index) for one in batch.trajectories)
        table.add("gateway, then runner: kill -9, `--pool`", before, TASKS * GROUP, kept)
        assert kept == {(result.group_id, index): 1 for result in results for index in range(GROUP)}


async def test_a_journal_goes_on_where_both_were_killed(
    tmp_path: Path, request: pytest.FixtureRequest, port: int, table: Table
) -> None:
    """The same with a journal: the next life of the runner is the same command, and has no lease to wait for."""
    url, journal = f"http://127.0.0.1:{port}", ("--journal", str(tmp_path / "journal"))
    async with ScriptedEngine("e0") as engine, aiohttp.ClientSession(url) as http, AsyncPromptPool(url) as pool:
        gateway = await asyncio.to_thread(serve, tmp_path, engine, port)
        request.addfinalizer(gateway.kill)
        await pool.add(({"n": n} for n in range(TASKS)), group_size=GROUP, attempts_max=10)
        hold_after(engine, 3 * GROUP)
        first = await asyncio.to_thread(roll_out, "first", tmp_path, url, *journal)
        request.addfinalizer(first.kill)
        await all_held(engine)
        await finished(http, GROUP)
        before = GROUP * len(await pool.results())
        first.kill()
        gateway.kill()
        go_on(engine)
        gateway = await asyncio.to_thread(serve, tmp_path, engine, port)
        request.addfinalizer(gateway.kill)
        second = await asyncio.to_thread(roll_out, "second", tmp_path, url, *journal)
        request.addfinalizer(second.kill)
        status = await asyncio.to_thread(second.process.wait, 180)
        assert status == 0, second.log()
        results = await pool.results()
        async with AsyncExperienceReader(url) as reader:
            batch = await reader.sample(trajectories=10 * TASKS * GROUP, wait_s=0)
        kept = Counter((one.group_id, one.sample_index) for one in batch.trajectories)
        table.add("runner and gateway: kill -9, `--pool --journal`", before, TASKS * GROUP, kept)
        assert kept == {(result.group_id, index): 1 for result in results for index in range(GROUP)}
        assert len(kept) == TASKS * GROUP, second.log()
