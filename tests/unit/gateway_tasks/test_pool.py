"""The prompt pool over a real database: order, groups, rounds, leases that end in every way."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gateway.core.tasks import ENDLESS, RESTART_GRACE_S, NewTask, TaskLease, is_ready
from gateway.log import local
from gateway.store import Database
from gateway.tasks import PromptPool
from gateway.tasks import pool as pool_module
from gateway.tasks.rows import QUERIES
from protos.errors import Conflict, NotFound, OutOfCapacity

P = "default"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def unix_s(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (pool_module, local):
        monkeypatch.setattr(module, "unix_s", found)
    return found


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database(tmp_path / "gateway.sqlite") as database:
        yield database


@pytest.fixture
async def pool(database: Database, unix_s: Clock) -> PromptPool:
    return await opened(database)


async def opened(database: Database, **options: Any) -> PromptPool:
    pool = PromptPool(database, **options)
    await pool.open()
    return pool


def task(name: str, **fields: Any) -> NewTask:
    return NewTask(name, json.dumps({"name": name}).encode(), **fields)


async def take(pool: PromptPool, count: int = 1, **options: Any) -> list[TaskLease]:
    return list((await pool.lease(P, "r", count=count, **options)).leases)


def named(leases: list[TaskLease]) -> list[tuple[str, int, int]]:
    return [(lease.task_id, lease.round, lease.sample_index) for lease in leases]


async def test_tasks_are_leased_by_priority_then_in_the_order_of_their_addition(pool: PromptPool) -> None:
    assert await pool.add(P, [task("a"), task("b", priority=2.0), task("c"), task("d", priority=-1.0)]) == 4
    leases = await take(pool, 9)
    assert [lease.task_id for lease in leases] == ["b", "a", "c", "d"]
    assert json.loads(leases[0].data) == {"name": "b"}
    assert len({lease.lease_id for lease in leases} | {lease.group_id for lease in leases}) == 8


async def test_a_task_is_added_once_and_stays_as_it_was(pool: PromptPool) -> None:
    assert await pool.add(P, [task("a"), task("a", priority=9.0)]) == 1
    assert await pool.add(P, [task("a", group_size=4)]) == 0
    assert await pool.add("other", [task("a")]) == 1
    assert [lease.group_size for lease in await take(pool, 9)] == [1]
    assert (await pool.lease("other", "r")).leases


async def test_a_group_becomes_whole_before_the_next_begins(pool: PromptPool) -> None:
    await pool.add(P, [task("a", group_size=2), task("b", group_size=2, priority=-1)])
    first = await take(pool, 3)
    assert named(first) == [("a", 0, 0), ("a", 0, 1), ("b", 0, 0)]
    assert first[0].group_id == first[1].group_id != first[2].group_id
    await pool.add(P, [task("urgent", priority=100)])
    await pool.release([first[1].lease_id])
    second = await take(pool, 3)
    assert named(second) == [("a", 0, 1), ("b", 0, 1), ("urgent", 0, 0)]
    assert [lease.attempt for lease in second] == [2, 1, 1]
    assert second[0].group_id == first[0].group_id


async def test_a_group_ends_with_the_rewards_of_its_samples(pool: PromptPool) -> None:
    await pool.add(P, [task("a", group_size=2), task("b")])
    one, two, other = await take(pool, 3)
    assert not (await pool.finish(two.lease_id, 0.5)).group_ended
    assert await pool.results(P) == []
    assert (await pool.finish(one.lease_id, 1.0)).group_ended
    await pool.finish(other.lease_id, 0.25)
    [a, b] = await pool.results(P)
    assert (a.task_id, a.group_id, a.round, list(a.rewards)) == ("a", one.group_id, 0, [1.0, 0.5])
    assert await pool.results(P, after=a.number) == [b]
    assert await pool.results(P, after=b.number) == []


async def test_rounds_are_as_many_as_asked_for_and_the_pool_is_then_drained(pool: PromptPool) -> None:
    await pool.add(P, [task("a", repeats=2), task("b")])
    first = await take(pool, 9)
    assert named(first) == [("a", 0, 0), ("b", 0, 0), ("a", 1, 0)]
    assert not (await pool.lease(P, "r")).drained
    for lease in first:
        await pool.finish(lease.lease_id, 0.0)
    assert (await pool.lease(P, "r", wait_s=60)).drained
    counts = await pool.counts(P)
    assert (counts.tasks, counts.drained, counts.open_groups) == (2, 2, 0)
    assert await pool.add(P, [task("b")]) == 0
    assert await pool.remove(P, None) == 2
    assert await pool.add(P, [task("b")]) == 1


async def test_an_endless_task_waits_until_each_other_had_as_many_rounds(pool: PromptPool) -> None:
    await pool.add(P, [task(name, repeats=ENDLESS) for name in "abc"])
    assert [lease.task_id for lease in await take(pool, 7)] == ["a", "b", "c", "a", "b", "c", "a"]
    assert is_ready(ENDLESS, 10**9)


async def test_priorities_can_be_changed_by_what_came_of_a_task(pool: PromptPool) -> None:
    await pool.add(P, [task("a", repeats=ENDLESS), task("b", repeats=ENDLESS)])
    assert await pool.prioritize(P, {"b": 1.0, "none": 3.0}) == ["none"]
    assert [lease.task_id for lease in await take(pool, 3)] == ["b", "b", "b"]
    assert await pool.prioritize(P, {"b": -1.0}) == []
    assert [lease.task_id for lease in await take(pool, 2)] == ["a", "a"]


async def test_a_failed_sample_is_leased_again_until_it_is_given_up(pool: PromptPool) -> None:
    await pool.add(P, [task("a", group_size=2, attempts_max=2)])
    bad, good = await take(pool, 2)
    await pool.finish(good.lease_id, 1.0)
    assert (await pool.fail(bad.lease_id, "tool: one")).retried
    assert (await pool.fail(bad.lease_id, "tool: one")).repeated
    [again] = await take(pool, 9)
    assert (again.sample_index, again.attempt, again.group_id) == (0, 2, bad.group_id)
    ending = await pool.fail(again.lease_id, "tool: two")
    assert (ending.retried, ending.group_ended) == (False, True)
    [result] = await pool.results(P)
    assert (list(result.rewards), list(result.errors)) == ([None, 1.0], ["tool: two", ""])
    assert (await pool.lease(P, "r")).drained
    found = pool.statistics()
    assert (found.failed, found.given_up, found.leases, found.finished) == (2, 1, 0, 1)


async def test_a_lease_that_expires_is_another_runners(pool: PromptPool, unix_s: Clock) -> None:
    await pool.add(P, [task("a")])
    [lost] = await take(pool, lease_s=10)
    unix_s.now += 9
    assert await pool.renew([lost.lease_id], 10) == ([lost.lease_id], [])
    unix_s.now += 9
    assert await take(pool) == []
    unix_s.now += 2
    [lease] = await take(pool)
    assert (lease.group_id, lease.sample_index, lease.attempt) == (lost.group_id, 0, 2)
    assert await pool.renew([lost.lease_id], 10) == ([], [lost.lease_id])
    with pytest.raises(NotFound, match="another runner"):
        await pool.finish(lost.lease_id, 1.0)
    await pool.finish(lease.lease_id, 0.5)
    assert [list(r.rewards) for r in await pool.results(P)] == [[0.5]]
    found = pool.statistics()
    assert (found.leases, found.leased, found.expired, found.finished) == (0, 2, 1, 1)


async def test_an_expired_lease_that_nobody_took_counts_when_its_runner_comes_back(
    pool: PromptPool, unix_s: Clock
) -> None:
    await pool.add(P, [task("a"), task("b")])
    a, b = await take(pool, 2, lease_s=10)
    unix_s.now += 11
    assert (await pool.lease("other", "r")).drained  # it ends what has expired
    assert pool.statistics().leases == 0
    assert await pool.renew([a.lease_id], 10) == ([a.lease_id], [])
    assert not (await pool.finish(b.lease_id, 1.0)).retried
    assert pool.statistics().leases == 1
    await pool.finish(a.lease_id, 1.0)
    assert (await pool.lease(P, "r")).drained
    assert pool.statistics().leases == 0


async def test_a_task_that_kills_its_runners_is_given_up(pool: PromptPool, unix_s: Clock) -> None:
    await pool.add(P, [task("a", attempts_max=2)])
    for _ in range(2):
        [lease] = await take(pool, lease_s=1)
        unix_s.now += 2
    assert (await pool.lease(P, "r")).drained
    [result] = await pool.results(P)
    assert (list(result.rewards), list(result.errors)) == ([None], ["runner: its lease expired"])
    with pytest.raises(Conflict, match="expired before"):
        await pool.finish(lease.lease_id, 1.0)


async def test_a_lease_that_is_given_back_costs_no_attempt(pool: PromptPool) -> None:
    await pool.add(P, [task("a", attempts_max=1)])
    for attempt in (1, 2, 3):
        [lease] = await take(pool)
        assert lease.attempt == attempt
        assert await pool.release([lease.lease_id, "unknown"]) == 1
        assert await pool.release([lease.lease_id]) == 0
        with pytest.raises(Conflict, match="released before"):
            await pool.finish(lease.lease_id, 1.0)
    assert pool.statistics().released == 3


async def test_requests_may_be_sent_again(pool: PromptPool) -> None:
    await pool.add(P, [task("a", group_size=4), task("b")])
    first = await take(pool, 2, request="x")
    assert await take(pool, 2, request="x") == first
    assert named(await take(pool, 2, request="y")) == [("a", 0, 2), ("a", 0, 3)]
    await pool.finish(first[0].lease_id, 1.0)
    assert await take(pool, 2, request="x") == first[1:]
    assert (await pool.finish(first[0].lease_id, 1.0)).repeated
    with pytest.raises(Conflict, match="with reward 1 and not 0"):
        await pool.finish(first[0].lease_id, 0.0)
    with pytest.raises(Conflict, match="finished before"):
        await pool.fail(first[0].lease_id, "")
    assert pool.statistics().leased == 4


async def test_a_request_waits_until_a_task_comes(pool: PromptPool) -> None:
    await pool.add(P, [task("a")])
    [held] = await take(pool)
    waiting = [asyncio.create_task(pool.lease(P, "r", wait_s=60)) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.add(P, [task("b"), task("c")])
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await pool.release([held.lease_id])
    found = [(await one).leases[0].task_id for one in waiting]
    assert sorted(found) == ["a", "b", "c"]


async def test_a_waiting_request_gets_what_expires(database: Database) -> None:
    pool = await opened(database)  # by the real clock
    await pool.add(P, [task("a")])
    await take(pool, lease_s=0.05)
    [lease] = await take(pool, wait_s=60)
    assert lease.attempt == 2


async def test_a_request_that_went_away_leaves_no_lease_behind(pool: PromptPool, database: Database) -> None:
    await pool.add(P, [task("a")])
    running = asyncio.create_task(pool.lease(P, "r"))
    await asyncio.sleep(0)  # up to its wait for the database
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await pool.close()
    assert [lease.attempt for lease in await take(pool)] == [2]


@pytest.mark.parametrize("leased_before", [True, False])
async def test_a_request_that_is_sent_again_supersedes_the_one_before(pool: PromptPool, leased_before: bool) -> None:
    """`leased_before`: the first one was cancelled while its lease was written; else it waits for a task."""
    if leased_before:
        await pool.add(P, [task("a")])
        first = asyncio.create_task(pool.lease(P, "r", request="x"))
        await asyncio.sleep(0)
        first.cancel()
    else:
        await pool.add(P, [task("a")])
        [held] = await take(pool)
        first = asyncio.create_task(pool.lease(P, "r", request="x", wait_s=60))
        await asyncio.sleep(0)
    again = await take(pool, request="x", wait_s=0)
    assert [lease.attempt for lease in again] == ([1] if leased_before else [])
    await pool.close()
    if leased_before:
        assert await take(pool) == []  # nothing was given back behind its holder
    else:
        await pool.release([held.lease_id])
        assert (await first).leases == ()
        assert [lease.attempt for lease in await take(pool)] == [2]


@pytest.mark.parametrize("other", [("default", "r2"), ("other", "r")])
async def test_requests_of_one_name_from_other_runners_or_pools_are_others(
    pool: PromptPool, other: tuple[str, str]
) -> None:
    await pool.add(P, [task("a")])
    await pool.add("other", [task("o")])
    [held] = await take(pool)
    waiting = asyncio.create_task(pool.lease(P, "r", request="1", wait_s=60))
    await asyncio.sleep(0)
    await pool.lease(*other, request="1")
    await pool.add("third", [task("c")])  # wakes it
    await pool.release([held.lease_id])
    assert [lease.task_id for lease in (await waiting).leases] == ["a"]


@pytest.mark.parametrize("change", ["add", "finish", "fail", "release", "remove"])
async def test_a_change_whose_caller_went_away_is_counted_and_wakes_others(pool: PromptPool, change: str) -> None:
    await pool.add(P, [task("a", group_size=2), task("b")])
    [lease, *_] = await take(pool, 3)
    waiting = asyncio.create_task(pool.lease(P, "r2", wait_s=60))
    await asyncio.sleep(0)
    await pool.close()  # its look at the database has ended: it waits for a change
    changes: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "add": lambda: pool.add(P, [task("c")]),
        "finish": lambda: pool.finish(lease.lease_id, 1.0),
        "fail": lambda: pool.fail(lease.lease_id, "e"),
        "release": lambda: pool.release([lease.lease_id]),
        "remove": lambda: pool.remove(P, ["a", "b"]),
    }
    caller = asyncio.create_task(changes[change]())
    await asyncio.sleep(0)  # up to its wait for the database
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    if change in ("add", "fail", "release", "remove"):
        assert (await asyncio.wait_for(waiting, 30)).drained == (change == "remove")
    else:
        waiting.cancel()
    await pool.close()
    now, counts = pool.statistics(), await pool.counts(P)
    assert (now.tasks, now.leases) == (counts.tasks, counts.leased)


async def test_removed_tasks_take_their_leases_along(pool: PromptPool) -> None:
    await pool.add(P, [task("a", group_size=2), task("b")])
    [lease] = await take(pool)
    assert await pool.remove(P, ["a", "a", "unknown"]) == 1
    with pytest.raises(NotFound):
        await pool.finish(lease.lease_id, 1.0)
    assert [lease.task_id for lease in await take(pool, 9)] == ["b"]
    assert (pool.statistics().tasks, pool.statistics().leases) == (1, 1)


async def test_no_more_tasks_than_the_bound(database: Database) -> None:
    pool = await opened(database, tasks_max=2)
    await pool.add(P, [task("a"), task("b")])
    with pytest.raises(OutOfCapacity, match="2 of 2 tasks, and 1 more"):
        await pool.add("other", [task("c")])
    assert await pool.add(P, [task("a")]) == 0
    assert pool.statistics().tasks == 2
    assert (await pool.counts("other")).tasks == 0


async def test_everything_is_there_after_a_restart(tmp_path: Path, unix_s: Clock) -> None:
    path = tmp_path / "kept.sqlite"
    async with Database(path) as database:
        pool = await opened(database)
        await pool.add(P, [task("a", group_size=3), task("b")])
        done, held, lost = await take(pool, 3, lease_s=10)
        await pool.finish(done.lease_id, 1.0)
    unix_s.now += 3600  # nobody could renew a lease meanwhile
    async with Database(path) as database:
        pool = await opened(database)
        assert (pool.statistics().tasks, pool.statistics().leases) == (2, 2)
        assert named(await take(pool, 9)) == [("b", 0, 0)]
        assert (await pool.finish(done.lease_id, 1.0)).repeated
        await pool.renew([held.lease_id], 600)
        unix_s.now += RESTART_GRACE_S + 1
        assert named(await take(pool, 9)) == [("a", 0, lost.sample_index)]
        await pool.finish(held.lease_id, 0.5)


async def test_no_query_scans_or_sorts(pool: PromptPool, database: Database) -> None:
    def plans(connection: Any) -> dict[str, list[str]]:
        return {
            query: [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", values)]
            for query, values in QUERIES.items()
        }

    for query, plan in (await database.run(plans)).items():
        assert all(step.startswith("SEARCH") for step in plan), (query, plan)


@pytest.mark.slow
async def test_a_lease_costs_less_than_a_millisecond_with_300_000_tasks(database: Database) -> None:
    pool = await opened(database)
    for start in range(0, 300_000, 10_000):
        await pool.add(P, [task(str(n), priority=float(n % 7), repeats=2) for n in range(start, start + 10_000)])

    async def cost_s(work: Callable[[], Any]) -> float:
        began = time.process_time()
        for _ in range(200):
            await work()
        return (time.process_time() - began) / 200

    held: list[TaskLease] = []

    async def lease() -> None:
        held.extend(await take(pool))

    async def end() -> None:
        await pool.finish(held.pop().lease_id, 1.0)

    costs = [await cost_s(lease) for _ in range(5)]
    ends = [await cost_s(end) for _ in range(5)]
    assert not held
    assert statistics.median(costs) < 0.001, costs
    assert statistics.median(ends) < 0.001, ends
    print(f"a lease costs {1e6 * statistics.median(costs):.0f} us, its end {1e6 * statistics.median(ends):.0f} us")
