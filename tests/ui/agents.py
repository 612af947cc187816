"""Made-up agents, a trainer and a publisher, who use a running gateway as real ones do.

`python -m tests.ui.agents --url URL --relay HOST:PORT --sessions 5000` keeps so many sessions going, until it is ended:
turns with tools of some seconds between them, a finish with a reward, and the next session.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from safetensors.numpy import save_file

from paramserver.client.push import push
from tests.bench.gateway.mock_engine import MODEL

SNAPSHOT_BYTES = 24 << 20
PUBLISH_S = 60.0
BATCH = 2048
TURNS_MAX, TOKENS_MAX = 5, 120
TOOL_S = 12.0  # on the mean
STARTS_PER_S = 80.0
TASKS = ("Mend the failing test of the parser.", "How many ways lead up the stairs?", "Make this loop faster.")
RESULTS = ("3 passed, 1 failed: test_empty_line", "exit status 0, 0.21 s", "Traceback: KeyError: 'id'", "no matches")


class Agents:
    """`http` has the gateway as its base."""

    def __init__(self, http: aiohttp.ClientSession, seed: int = 0) -> None:
        self.http, self.random = http, random.Random(seed)
        self.version = 0
        self.names = secrets.token_hex(2)  # of sessions: each is used once

    async def call(self, path: str, body: Any) -> Any:
        """The answer; a request for which there is no room is sent again, as an SDK would."""
        while True:
            async with self.http.post(path, json=body) as answer:
                if answer.status not in (429, 503):
                    answer.raise_for_status()
                    return await answer.json()
                await asyncio.sleep(float(answer.headers.get("Retry-After", 1)) * self.random.uniform(1, 2))

    async def agent(self, number: int) -> None:
        await asyncio.sleep(number / STARTS_PER_S)
        for episode in itertools.count():
            await self.session(f"task-{self.names}-{number:04}-{episode}")

    async def session(self, name: str) -> None:
        await self.call("/sessions", {"session_id": name, "tags": {"environment": "repair"}})
        messages = [{"role": "user", "content": f"{self.random.choice(TASKS)} Task {name}."}]
        for turn in range(self.random.randint(1, TURNS_MAX)):
            if turn:
                await asyncio.sleep(self.random.expovariate(1 / TOOL_S))
                messages.append({"role": "user", "content": self.random.choice(RESULTS)})
            body = {"model": MODEL, "messages": messages, "max_tokens": TOKENS_MAX}
            answer = await self.call(f"/sessions/{name}/v1/chat/completions", body)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        await self.call(f"/sessions/{name}/finish", {"reward": round(self.random.random(), 2)})

    async def train(self) -> None:
        while True:
            body = {"reader": "trainer-0", "trainer_version": self.version, "trajectories": BATCH, "wait_s": 60.0}
            batch = await self.call("/experience/sample", body)
            await asyncio.sleep(8.0)
            if batch["lease_id"]:
                await self.call("/experience/ack", {"lease_id": batch["lease_id"]})

    async def run_tasks(self) -> None:
        await self.call("/tasks", {"tasks": [{"data": {"n": n}} for n in range(2000)]})
        while True:
            leased = await self.call("/tasks/lease", {"runner": "runner-0", "count": 16, "wait_s": 5.0})
            await asyncio.sleep(5.0)
            for lease in leased["leases"]:
                await self.call("/tasks/finish", {"lease_id": lease["lease_id"], "reward": 0.5})

    async def publish(self, relay: str) -> None:
        with tempfile.TemporaryDirectory(prefix="laminar-weights-") as directory:
            weights = Path(directory) / "model.safetensors"
            for step in itertools.count(1):
                tensor = np.full(SNAPSHOT_BYTES // 4, step, np.float32)
                await asyncio.to_thread(save_file, {"w": tensor}, weights)
                how = {"run": "made-up", "copies": 1, "allow_change": True, "wait_s": 120.0}
                await push(relay, Path(directory), MODEL, step=step, **how)
                self.version = step
                await asyncio.sleep(PUBLISH_S)


async def run(url: str, relay: str, sessions: int) -> None:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http, asyncio.TaskGroup() as group:
        agents = Agents(http)
        group.create_task(agents.publish(relay))
        group.create_task(agents.train())
        group.create_task(agents.run_tasks())
        for number in range(sessions):
            group.create_task(agents.agent(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--relay", required=True)
    parser.add_argument("--sessions", type=int, default=5000)
    given = parser.parse_args()
    uvloop.run(run(given.url, given.relay, given.sessions))


if __name__ == "__main__":
    main()
