"""The agents: sessions of one turn, each rewarded by the task and finished into the experience buffer.

In a barrier a batch begins when every engine has loaded the trainer's newest version, and the next one when the trainer
has published again: as synchronous trainers call for their rollouts. In the other modes as many sessions as the
engines have slots run at any time, and the gateway alone says who waits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.bench.learning import task
from tests.bench.learning.settings import MODEL, Settings

Answer = tuple[float, int, float, float]
"""Of a finished session: its end (unix), tokens, reward, and seconds from its call to its answer."""
RETRY_S = 0.1
PATIENCE_S = 120.0


@dataclass(slots=True)
class Rollouts:
    settings: Settings
    url: str
    http: aiohttp.ClientSession
    answers: list[Answer] = field(default_factory=list)

    async def synchronous(self, loaded: Callable[[int], Awaitable[None]]) -> None:
        """`loaded(version)` returns once every engine serves it."""
        samples = self._samples()
        for version in itertools.count(1):
            await loaded(version)
            async with asyncio.TaskGroup() as tasks:
                for group, sample in itertools.islice(samples, self.settings.batch):
                    tasks.create_task(self._play(group, sample))

    async def asynchronous(self) -> None:
        samples = self._samples()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.settings.engines * self.settings.slots):
                tasks.create_task(self._work(samples))

    def _samples(self) -> Iterator[tuple[int, int]]:
        """(prompt's number, sample's number), without end."""
        return ((group, sample) for group in itertools.count() for sample in range(self.settings.group_size))

    async def _work(self, samples: Iterator[tuple[int, int]]) -> None:
        for group, sample in samples:
            await self._play(group, sample)

    async def _play(self, group: int, sample: int) -> None:
        n = task.number(self.settings.seed, group)
        fields = {"group_id": f"g{group}", "group_size": self.settings.group_size, "sample_index": sample}
        session = await self._post("/sessions", fields)
        name = session["session_id"]
        body = {
            "model": MODEL,
            "prompt": task.prompt(n),
            "max_tokens": task.ANSWER_MAX,
            "temperature": 1.0,
            "seed": (self.settings.seed << 40) + (group << 8) + sample,
            "return_token_ids": True,
        }
        began = time.monotonic()
        answer = await self._post(f"/sessions/{name}/v1/completions", body)
        choice, seconds = answer["choices"][0], time.monotonic() - began
        reward = task.reward(n, choice["token_ids"])
        status = "completed" if choice["finish_reason"] == "stop" else "truncated"
        await self._post(f"/sessions/{name}/finish", {"reward": reward, "status": status})
        self.answers.append((time.time(), len(choice["token_ids"]), reward, seconds))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Waits while the gateway has no room, up to PATIENCE_S. RuntimeError for any other refusal."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            async with self.http.post(self.url + path, json=body) as response:
                answer: dict[str, Any] = await response.json()
            if response.status == 200:
                return answer
            if response.status != 429 or time.monotonic() > deadline:
                raise RuntimeError(f"{path}: {response.status} {answer}")
            await asyncio.sleep(float(response.headers.get("Retry-After", RETRY_S)))
