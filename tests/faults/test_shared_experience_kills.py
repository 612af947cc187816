"""kill -9 of gateways, trainers and their shared store in turn, under load: each finished trajectory is used once.

Run with `-s`, it prints the table of docs/shared-experience.md.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.support import processes
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine
from tests.support.shared_stores import Server
from tests.support.words import tokenizer

pytestmark = pytest.mark.slow

CLIENTS, BETWEEN = 8, 60
"""Rollouts at once, and trajectories that are finished, and used, from one kill to the next."""
KILLS = ("gateway-0", "trainer-0", "store", "gateway-1", "trainer-1", "store")

TRAINER = textwrap.dedent(
    '''
    """Samples from one gateway or the other. Its log has each lease before it is used, and again once that landed."""
    import itertools, random, sys, time
    import httpx

    log, name, *urls = sys.argv[1:]
    wanted = {"reader": name, "trainer_version": 1, "trajectories": 8, "wait_s": 0.2, "lease_s": 2.0}
    with open(log, "a") as out, httpx.Client(timeout=60) as http:
        for url in itertools.cycle(urls):
            try:
                got = http.post(f"{url}/experience/sample", json=wanted)
                if got.status_code != 200 or not got.json()["lease_id"]:
                    time.sleep(0.02)
                    continue
                lease = got.json()["lease_id"]
                print("leased", lease, *(t["session_id"] for t in got.json()["trajectories"]), file=out, flush=True)
                time.sleep(random.uniform(0, 0.05))
                if http.post(f"{url}/experience/ack", json={"lease_id": lease}).status_code == 200:
                    print("used", lease, file=out, flush=True)
            except httpx.HTTPError:
                time.sleep(0.02)
    '''
)


@dataclass
class Fleet:
    """Two gateways, two trainers and a shared store, each in a process that can be killed and started again.

    `engines`: each gateway's own, by the gateway's name."""

    directory: Path
    engines: Mapping[str, ScriptedEngine]
    ports: KeptPorts
    store: Server
    running: dict[str, Daemon | Server] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports.of(name)}"

    def start(self, name: str) -> None:
        kind = name.partition("-")[0]
        if kind == "store":
            self.store.start()
            self.running[name] = self.store
        elif kind == "gateway":
            self.running[name] = self._gateway(name)
        else:
            self.running[name] = self._trainer(name)

    def _gateway(self, name: str) -> Daemon:
        command = ["gateway", "serve", "--model=policy", f"--tokenizer={tokenizer(self.directory / 'model')}"]
        where = [f"--data={self.directory / name}", f"--port={self.ports.of(name)}", "--no-probe"]
        store = f"--experience-store={self.store.url}"
        engine = f"--engine={self.engines[name].name}=vllm={self.engines[name].url}"
        return processes.start(name, [*command, *where, store, engine], self.directory)

    def _trainer(self, name: str) -> Daemon:
        urls = [self.url("gateway-0"), self.url("gateway-1")]
        script = self.directory / "trainer.py"
        script.write_text(TRAINER)
        command = [sys.executable, str(script), str(self.log(name)), name, *urls]
        out = self.directory / f"{name}.out"
        with out.open("ab") as to:
            return Daemon(name, processes.subprocess.Popen(command, stdout=to, stderr=to), out)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.leases"

    def leases(self) -> tuple[dict[str, list[str]], set[str]]:
        """The sessions of each lease that a trainer got, and the leases that it used."""
        leased: dict[str, list[str]] = {}
        used: set[str] = set()
        for name in ("trainer-0", "trainer-1"):
            lines = self.log(name).read_text().splitlines() if self.log(name).exists() else []
            for kind, lease, *sessions in map(str.split, lines):
                if kind == "leased":
                    leased[lease] = sessions
                else:
                    used.add(lease)
        return leased, used

    def num_used(self) -> int:
        leased, used = self.leases()
        return sum(len(leased[lease]) for lease in used)


class Clients:
    """Each rolls out sessions at one of the gateways, and sends each request until it is answered."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self.finished: list[str] = []
        self.stopping = False

    async def run(self, number: int) -> None:
        url = self._urls[number % len(self._urls)]
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(60)) as http:
            for n in itertools.count():
                if self.stopping:
                    return
                name = f"s{number}-{n}"
                body = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 2}
                await self._post(http, f"/s/{name}/v1/completions", body)
                await self._post(http, f"/sessions/{name}/finish", {"reward": 1.0})
                self.finished.append(name)

    async def _post(self, http: aiohttp.ClientSession, path: str, body: object) -> None:
        while True:
            try:
                async with http.post(path, json=body) as answer:
                    if answer.status == 200:
                        return
                    assert answer.status in (429, 503), await answer.text()
            except (aiohttp.ClientError, ConnectionError):
                pass
            await asyncio.sleep(0.05)


async def progress(fleet: Fleet, clients: Clients, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until `BETWEEN` more trajectories are finished, and as many used."""
    finished, used = len(clients.finished) + BETWEEN, fleet.num_used() + BETWEEN
    async with asyncio.timeout(180):
        while len(clients.finished) < finished or fleet.num_used() < used:
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)


async def settle_leases(fleet: Fleet) -> None:
    """A trainer that was killed between `ack` and its log does not know whether its batch is used: the same `ack` again
    says so. One that came too late gets 404, and the batch is sampled again."""
    leased, used = fleet.leases()
    async with aiohttp.ClientSession(fleet.url("gateway-0")) as http:
        for lease in sorted(set(leased) - used):
            async with http.post("/experience/ack", json={"lease_id": lease}) as answer:
                assert answer.status in (200, 404), await answer.text()
                if answer.status == 200:
                    with fleet.log("trainer-0").open("a") as out:
                        print("used", lease, file=out)


async def test_each_finished_trajectory_is_used_once_whoever_is_killed(tmp_path: Path, killable_store: Server) -> None:
    rows: list[tuple[str, list[str]]] = []
    with KeptPorts() as ports:
        async with ScriptedEngine("e0") as first, ScriptedEngine("e1") as second:
            fleet = Fleet(tmp_path, {"gateway-0": first, "gateway-1": second}, ports, killable_store)
            names = ["store", "gateway-0", "gateway-1", "trainer-0", "trainer-1"]
            try:
                await asyncio.to_thread(fleet.start, "store")
                await asyncio.gather(*(asyncio.to_thread(fleet.start, name) for name in names[1:3]))
                for name in names[3:]:
                    fleet.start(name)
                clients = Clients([fleet.url("gateway-0"), fleet.url("gateway-1")])
                tasks = [asyncio.create_task(clients.run(number)) for number in range(CLIENTS)]
                await progress(fleet, clients, tasks)
                for name in KILLS:
                    rows.append((name, list(clients.finished)))
                    fleet.running[name].kill()
                    await asyncio.to_thread(fleet.start, name)
                    await progress(fleet, clients, tasks)
                clients.stopping = True
                await asyncio.wait_for(asyncio.gather(*tasks), 180)
                await all_used(fleet, clients)
            finally:
                for daemon in fleet.running.values():
                    daemon.kill()
    leased, used = fleet.leases()
    counted = Counter(session for lease in used for session in leased[lease])
    print("\n| killed with -9 | finished before | lost | doubled |\n|---|---|---|---|")
    for name, finished in [*rows, ("(end)", clients.finished)]:
        lost = sum(counted[session] == 0 for session in finished)
        doubled = sum(counted[session] > 1 for session in finished)
        print(f"| {name} | {len(finished)} | {lost} | {doubled} |")
    assert set(clients.finished) == set(counted)
    assert set(counted.values()) == {1}


async def all_used(fleet: Fleet, clients: Clients) -> None:
    async with asyncio.timeout(180):
        while True:
            leased, used = fleet.leases()
            if {session for lease in used for session in leased[lease]} >= set(clients.finished):
                return
            await settle_leases(fleet)
            await asyncio.sleep(0.2)
