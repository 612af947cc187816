"""Runners over a gateway's own prompt pool: groups become whole, dead runners lose nothing, Ctrl-C gives all back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents_env.environment import Chat, Outcome
from agents_env.environments.tool_chain import ToolChain
from agents_env.failures import RunFailed
from agents_env.runner import Runner, Statistics
from agents_env.runner.journal import Journal
from agents_env.runner.sources import PoolOptions, PoolTasks
from agents_env.server import Sampling, Server
from gateway.api.tasks import add_task_routes
from gateway.core.tasks import Ending, Leased, NewTask
from gateway.store import Database
from gateway.tasks import PromptPool
from tests.unit.agents_env.scripted_server import Refusal, ScriptedServer, perfect, serving
from tests.unit.agents_env.test_runner import Echo, Number, plan, repeat


class PooledEcho(Echo):
    def task_of(self, task_id: str, data: Mapping[str, Any]) -> Number:
        return Number(int(data["value"]))

    def data_of(self, task: Number) -> Mapping[str, Any]:
        return {"value": task.value}


class Watched(PromptPool):
    """`asked` and `finished`: one release for each request."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.asked, self.finished = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def lease(self, *names: Any, **options: Any) -> Leased:
        self.asked.release()
        return await super().lease(*names, **options)

    async def finish(self, lease_id: str, reward: float) -> Ending:
        ending = await super().finish(lease_id, reward)
        self.finished.release()
        return ending


@dataclass
class Place:
    server: ScriptedServer
    pool: Watched

    async def add(self, count: int, **fields: Any) -> None:
        rows = [{"value": n} for n in range(count)]
        await self.pool.add("p", [NewTask(str(r["value"]), json.dumps(r).encode(), **fields) for r in rows])

    async def run(
        self,
        *,
        environment: Any = None,
        stop: asyncio.Event | None = None,
        journal: Journal | None = None,
        follow: bool = False,
        **changes: Any,
    ) -> tuple[Statistics, list[dict[str, Any]]]:
        environment, out = environment or PooledEcho(), io.StringIO()
        async with (
            Server(self.server.url, Sampling("policy"), patience_s=5.0) as client,
            PoolTasks(environment, client, PoolOptions("p", 600.0, follow), journal) as source,
        ):
            runner = Runner(environment, client, plan(**changes), out=out, source=source, journal=journal)
            end = await runner.run(stop or asyncio.Event())
        return end, [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with place_of(repeat) as place:
        yield place


@contextlib.asynccontextmanager
async def place_of(script: Callable[..., str]) -> AsyncIterator[Place]:
    async with Database(None) as database:
        pool = Watched(database)
        await pool.open()
        async with serving(script, extend=lambda app: add_task_routes(app, pool)) as server:
            yield Place(server, pool)
        await pool.close()


async def test_a_pool_without_tasks_is_named(place: Place) -> None:
    """Its name may be misspelt. One whose tasks have ended is drained, also when they are removed meanwhile."""
    with pytest.raises(RunFailed, match="prompt pool 'p' has no tasks; add some"):
        await place.run()
    await place.add(1)
    assert (await place.run())[0].rollouts == 1
    assert (await place.run())[0].rollouts == 0

    class Removes(PooledEcho):
        async def rollout(self, task: Number, client: Chat) -> Outcome:
            outcome = await super().rollout(task, client)
            await place.pool.remove("p", [str(task.value)])
            return outcome

    await place.pool.remove("p", None)
    await place.add(1)
    assert (await place.run(environment=Removes()))[0].failed == 0


async def test_two_runners_share_a_pool_until_it_is_drained(place: Place) -> None:
    await place.add(10, group_size=3)
    (one, lines), (two, others) = await asyncio.gather(place.run(), place.run())
    assert one.rollouts + two.rollouts == 30
    assert min(one.rollouts, two.rollouts) > 0
    results = await place.pool.results("p")
    assert sorted(int(result.task_id) for result in results) == list(range(10))
    assert {tuple(result.rewards) for result in results} == {(1.0, 1.0, 1.0)}
    played = [(line["group_id"], line["sample_index"], line["group_size"]) for line in (*lines, *others)]
    assert len(set(played)) == 30
    assert {size for _, _, size in played} == {3}
    assert place.pool.statistics().leases == 0


async def test_a_failure_goes_to_the_pool_with_its_boundary_and_comes_again(place: Place) -> None:
    await place.add(2, attempts_max=2)
    place.server.refuse["chat"].append(Refusal(500, body="the engine is gone"))
    end, lines = await place.run(environment=PooledEcho(broken=frozenset({1})))
    assert (end.rollouts, end.given_up) == (1, 1)
    assert {line["session_id"].rpartition("-")[2] for line in lines if line["attempt"] == 2} == {"retry1"}
    results = {result.task_id: result for result in await place.pool.results("p")}
    assert results["0"].rewards == [1.0]
    assert results["1"].rewards == [None]
    assert results["1"].errors == ["environment (LookupError): no answer for 1"]


async def test_a_task_that_the_environment_cannot_read_fails_alone(place: Place) -> None:
    await place.add(2)
    await place.pool.add("p", [NewTask("odd", b'{"text": 1}', attempts_max=1)])
    end, lines = await place.run()
    assert (end.rollouts, end.given_up) == (2, 1)
    [odd] = [result for result in await place.pool.results("p") if result.task_id == "odd"]
    assert odd.errors == [
        "environment (KeyError): task odd does not fit: 'value'; `agents-env tasks` prints rows that do"
    ]
    [line] = [line for line in lines if line["task_id"] == "odd"]
    assert (line["status"], line["error"]["boundary"], line["error"]["phase"]) == ("failed", "environment", "reset")


async def test_ctrl_c_abandons_sessions_and_gives_every_lease_back(place: Place) -> None:
    await place.add(9)
    stop, place.server.hold = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(place.run(stop=stop))
    async with asyncio.timeout(60):
        await place.server.chats_reach(4)
    stop.set()
    end, _ = await running
    assert (end.rollouts, end.abandoned) == (0, 4)
    counts = await place.pool.counts("p")
    assert (counts.leased, counts.free) == (0, 4)
    assert set(place.server.abandoned.values()) == {"the run was stopped"}
    place.server.hold = None
    assert (await place.run())[0].rollouts == 9


async def test_a_runner_that_waits_for_tasks_gives_back_what_comes_as_it_stops(place: Place) -> None:
    await place.add(1)
    held = await place.pool.lease("p", "another")
    stop = asyncio.Event()
    running = asyncio.create_task(place.run(stop=stop, concurrency=2))
    async with asyncio.timeout(60):
        for _ in range(3):
            await place.pool.asked.acquire()
    stop.set()
    await place.pool.release([lease.lease_id for lease in held.leases])
    await running
    assert (await place.pool.counts("p")).leased == 0
    assert (await place.run())[0].rollouts == 1


async def test_a_session_that_a_dead_runner_had_finished_is_reported_and_not_played_again(place: Place) -> None:
    await place.add(1, group_size=2)
    [first, second] = (await place.pool.lease("p", "dead", count=2)).leases
    names = [f"{first.group_id}-{lease.sample_index}" for lease in (first, second)]
    place.server.sessions.update({name: {} for name in names})
    place.server.finished[names[0]] = {"reward": 0.5, "status": "truncated"}
    await place.pool.release([first.lease_id, second.lease_id])  # as an expiry does
    end, lines = await place.run()
    assert end.rollouts == 2
    assert [result.rewards for result in await place.pool.results("p")] == [[0.5, 1.0]]
    assert {(line["session_id"], line["recovered"]) for line in lines} == {
        (names[0], True),
        (f"{names[1]}-retry1", False),
    }
    assert place.server.abandoned == {names[1]: "its runner died"}


async def test_a_journal_gives_back_the_leases_of_a_killed_life(place: Place, tmp_path: Path) -> None:
    await place.add(3)
    [lease] = (await place.pool.lease("p", "killed")).leases
    run = {"environment": "echo", "pool": "p"}
    with Journal.open(tmp_path / "journal", "r", run) as journal:
        journal.began((lease.group_id, 0), 1, lease.lease_id)
    with Journal.open(tmp_path / "journal", "r", run) as journal:
        end, _ = await asyncio.wait_for(place.run(journal=journal), 60)
    assert end.rollouts == 3
    assert place.pool.statistics().released == 1
    with Journal.open(tmp_path / "journal", "r", run) as journal:
        assert not journal.past.leases


async def test_a_runner_follows_a_pool_that_is_filled_later(place: Place) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(place.run(stop=stop, follow=True))
    await place.add(2)
    async with asyncio.timeout(60):
        for _ in range(2):
            await place.pool.finished.acquire()
    stop.set()
    assert (await running)[0].rollouts == 2


async def test_an_environment_that_reads_no_pool_is_refused(place: Place) -> None:
    with pytest.raises(RunFailed, match="environment echo cannot read tasks of a prompt pool"):
        await place.run(environment=Echo())


async def test_own_tasks_go_through_a_pool_and_back() -> None:
    environment = ToolChain()
    stream = environment.tasks(3)
    tasks = [next(stream) for _ in range(20)]
    rows = [NewTask(task.task_id, json.dumps(environment.data_of(task)).encode()) for task in tasks]
    assert [environment.task_of(row.task_id, json.loads(row.data)) for row in rows] == tasks
    with pytest.raises(ValueError, match="one or more of Add, Subtract, Multiply by"):
        environment.task_of("x", {"start": 1, "steps": [["Divide", 2]]})
    async with place_of(perfect) as place:
        await place.pool.add("p", rows)
        end, _ = await place.run(environment=environment)
    assert (end.rollouts, end.reward_mean) == (len({row.task_id for row in rows}), 1.0)
