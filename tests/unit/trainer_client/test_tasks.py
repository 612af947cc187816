"""The SDK's prompt pool over the gateway's own routes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from gateway.api.errors import answer_errors
from gateway.api.tasks import add_task_routes
from gateway.store import Database
from gateway.tasks import PromptPool as Pool
from protos.errors import Conflict, InvalidRequest, Unavailable
from tests.support.turns import serving_app
from trainer_client import Added, AsyncPromptPool, PromptPool, TaskResult, gateway_http, tasks


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with Database(None) as database:
        pool = Pool(database)
        await pool.open()
        app = web.Application(middlewares=[answer_errors])
        add_task_routes(app, pool)
        async with serving_app(app) as url:
            yield url
        await pool.close()


async def roll_out(url: str, rewards: dict[str, float | None], count: int = 0, pool: str = "default") -> list[Any]:
    """A runner that leases `count` samples, and ends each lease with the reward of its task; None: a failure."""
    async with aiohttp.ClientSession(url) as http:
        body = {"runner": "r", "pool": pool, "count": count or len(rewards)}
        async with http.post("/tasks/lease", json=body) as answer:
            leases: list[Any] = (await answer.json())["leases"]
        for lease in leases:
            reward = rewards[lease["task_id"]]
            end = {"error": "tool: broken"} if reward is None else {"reward": reward}
            path = "/tasks/fail" if reward is None else "/tasks/finish"
            async with http.post(path, json={"lease_id": lease["lease_id"], **end}) as answer:
                assert answer.status == 200, await answer.text()
    return leases


async def test_rows_of_any_kind_become_tasks(url: str) -> None:
    async with AsyncPromptPool(url, pool="math") as pool:
        rows = ({"prompt": f"{n} + 1?", "answer": n + 1} for n in range(3))
        assert await pool.add(rows, group_size=2, priority=1.5) == Added(3, 0)
        assert await pool.add([{"answer": 1, "prompt": "0 + 1?"}, {"prompt": "0 + 1?", "answer": 1}]) == Added(1, 1)
        assert (await pool.status()).tasks == 4


async def test_jsonl_with_ids_of_a_column(url: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 7, "prompt": "é"}\n\n{"id": "x", "prompt": "b"}\n')
    async with AsyncPromptPool(url) as pool:
        assert await pool.add_jsonl(path, id_column="id", repeats=2) == Added(2, 0)
        assert await pool.add_jsonl(path, id_column="id") == Added(0, 2)
        leases = await roll_out(url, {"7": 1.0, "x": 0.0})
        assert [(lease["task_id"], lease["data"]["prompt"]) for lease in leases] == [("7", "é"), ("x", "b")]
        path.write_text('{"id": 8}\n{broken\n')
        with pytest.raises(InvalidRequest, match=r"prompts.jsonl, line 2: .*one JSON object"):
            await pool.add_jsonl(path)


async def test_many_rows_go_in_batches(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "BATCH_TASKS", 10)
    monkeypatch.setattr(tasks, "BATCH_BYTES", 5000)
    async with AsyncPromptPool(url) as pool:
        assert await pool.add({"n": n, "text": "x" * (n % 7) * 300} for n in range(101)) == Added(101, 0)
        assert (await pool.status()).ready == 101
        assert await pool.remove(str(n) for n in range(3)) == 0


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"when": object()}, {}, "row 1 is not JSON"),
        (["prompt"], {}, "row 1 is list"),
        ({"a": {"scores": [1.0, float("nan")]}}, {}, "row 1 has nan in a.scores.1 .JSON has no such number"),
        ({"a": float("-inf")}, {}, "row 1 has -inf in a"),
        ({"prompt": "a"}, {"id_column": "id"}, "row 1 has no column 'id' .it has prompt"),
        ({"id": ""}, {"id_column": "id"}, "row 1 has '' in its id column 'id': all such rows would be one task"),
        ({"id": None}, {"id_column": "id"}, "row 1 has None in its id column 'id'.*leave id_column out"),
        ({"id": 2}, {"group_size": 0}, "group_size"),
    ],
)
async def test_a_row_that_is_no_task_is_named(url: str, row: Any, options: Any, message: str) -> None:
    async with AsyncPromptPool(url) as pool:
        with pytest.raises(InvalidRequest, match=message):
            await pool.add([{"id": 1, "when": date(2026, 1, 2)}, row], **options)


async def test_a_curriculum_sets_priorities_by_the_last_rewards(url: str) -> None:
    async with AsyncPromptPool(url) as pool:
        await pool.add([{"id": name} for name in "abc"], id_column="id", repeats=0, attempts_max=1)
        await roll_out(url, {"a": 1.0, "b": 0.5, "c": None})
        seen: list[TaskResult] = []

        def hard_first(result: TaskResult) -> float | None:
            seen.append(result)
            return None if math.isnan(result.mean_reward) else 1 - result.mean_reward

        assert await pool.curriculum(hard_first) == 1
        assert {result.task_id: result.rewards for result in seen} == {"a": [1.0], "b": [0.5], "c": [None]}
        assert next(result.errors for result in seen if result.task_id == "c") == ["tool: broken"]
        assert await pool.curriculum(hard_first) == 0
        assert len(seen) == 3
        assert [lease["task_id"] for lease in await roll_out(url, {"b": 0.0}, count=2)] == ["b", "b"]
        assert await pool.curriculum(hard_first) == 1
        assert [(r.task_id, r.priority) for r in await pool.results()][-1] == ("b", 1.0)
        await roll_out(url, {"b": None})
        with pytest.raises(InvalidRequest, match=r"gave nan as the priority of task b.*nan when no sample"):
            await pool.curriculum(lambda result: result.mean_reward)
        assert await pool.curriculum(lambda result: np.float32(2)) == 1


async def test_a_gateway_that_is_away_is_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_http, "RETRY_FIRST_S", 0.01)
    async with AsyncPromptPool(url) as pool:
        where, pool._url = pool._url, "http://127.0.0.1:1"
        slept = gateway_http.asyncio.sleep

        async def back(seconds: float) -> None:
            pool._url = where
            await slept(seconds)

        monkeypatch.setattr(gateway_http.asyncio, "sleep", back)
        assert await pool.add([{"prompt": "a"}]) == Added(1, 0)
    with pytest.raises(Conflict, match="closed"):
        await pool.status()
    monkeypatch.setattr(gateway_http, "PATIENCE_S", 0.0)
    async with AsyncPromptPool("http://127.0.0.1:1") as pool:
        with pytest.raises(Unavailable, match="no answer from the gateway"):
            await pool.status()


@pytest.fixture
def sync_pool(url: str) -> PromptPool:
    return PromptPool(url, pool="p")


async def test_the_synchronous_client(sync_pool: PromptPool, tmp_path: Path) -> None:
    def use() -> None:
        (tmp_path / "a.jsonl").write_text('{"q": 1}\n')
        with sync_pool as pool:
            assert pool.add([{"q": 2}], group_size=4) == Added(1, 0)
            assert pool.add_jsonl(tmp_path / "a.jsonl") == Added(1, 0)
            assert (pool.status().tasks, pool.results(), pool.curriculum(lambda result: 0.0)) == (2, [], 0)
            assert pool.prioritize({"none": 1.0}) == ["none"]
            assert pool.remove() == 0

    await asyncio.to_thread(use)
