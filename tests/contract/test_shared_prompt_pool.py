"""The prompt pool of gateways that share a real Redis: one order, disjoint leases, and nothing lost with either."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway.core.tasks import NewTask, TaskLease
from gateway.log import replicated
from gateway.log.redis_server import Script
from gateway.store import Database
from gateway.tasks import PromptPool, rows
from protos.errors import Conflict, NotFound, OutOfCapacity, Unavailable
from tests.support.processes import Daemon
from tests.support.shared_stores import connect_to, length

P = "default"
WAIT_S = 60.0


@asynccontextmanager
async def opened(url: str, namespace: str, **options: int) -> AsyncIterator[PromptPool]:
    """A gateway's pool."""
    async with AsyncExitStack() as stack:
        server = await connect_to(stack, url, namespace)
        replica = await stack.enter_async_context(Database(None))
        pool = PromptPool(replica, order=replicated.shared(server, "tasks"), **options)
        stack.push_async_callback(pool.close)
        await pool.open()
        yield pool


@pytest.fixture
async def pools(shared_url: str, namespace: str) -> AsyncIterator[tuple[PromptPool, PromptPool]]:
    async with opened(shared_url, namespace) as one, opened(shared_url, namespace) as other:
        yield one, other


def task(name: str, **fields: int) -> NewTask:
    return NewTask(name, json.dumps({"name": name}).encode(), **fields)


async def take(pool: PromptPool, runner: str = "r", count: int = 1, lease_s: float = 600.0) -> list[TaskLease]:
    return list((await pool.lease(P, runner, count=count, lease_s=lease_s, wait_s=WAIT_S)).leases)


async def dump(pool: PromptPool) -> list[bytes]:
    return await pool._database.run(rows.dump)


async def alike(*pools: PromptPool) -> None:
    """All have applied what is in the log, and made the same of it."""
    for pool in pools:
        await pool._commands.look()
    first, *others = [await dump(pool) for pool in pools]
    assert all(other == first for other in others)


async def test_what_one_adds_another_leases_and_a_third_finishes(
    pools: tuple[PromptPool, PromptPool],
) -> None:
    one, other = pools
    assert await one.add(P, [task("a", group_size=2)]) == 1
    assert await other.add(P, [task("a")]) == 0, "its id is known"
    first, second = await take(other), await take(one)
    assert [(lease[0].task_id, lease[0].sample_index) for lease in (first, second)] == [("a", 0), ("a", 1)]
    assert not (await one.finish(first[0].lease_id, 1.0)).group_ended
    assert (await other.finish(second[0].lease_id, 0.5)).group_ended
    assert (await one.finish(second[0].lease_id, 0.5)).repeated
    [result] = await one.results(P)
    assert (result.rewards, (await other.lease(P, "r")).drained) == ([1.0, 0.5], True)
    await alike(one, other)
    assert one.statistics() == other.statistics()


async def test_errors_are_the_callers_alone_and_change_nothing(
    pools: tuple[PromptPool, PromptPool], shared_url: str, namespace: str
) -> None:
    one, other = pools
    with pytest.raises(NotFound):
        await one.finish("task-unknown", 1.0)
    await one.add(P, [task("a")])
    [lease] = await take(other)
    await one.finish(lease.lease_id, 1.0)
    with pytest.raises(Conflict):
        await other.fail(lease.lease_id, "later")
    async with opened(shared_url, namespace, tasks_max=2) as small:
        with pytest.raises(OutOfCapacity):
            await small.add(P, [task("b"), task("c")])
        assert (await small.counts(P)).tasks == 1
        await alike(one, other, small)


async def test_who_waits_gets_what_another_gateway_adds_or_what_a_dead_runner_had(
    pools: tuple[PromptPool, PromptPool],
) -> None:
    one, other = pools
    await one.add(P, [task("running")])
    [running] = await take(one)  # or the pool would be drained, of which nobody waits
    waiting = asyncio.create_task(take(other))
    await one.add(P, [task("a")])
    [lease] = await waiting
    assert (lease.task_id, lease.attempt) == ("a", 1)
    await one.finish(running.lease_id, 1.0)
    await one.release([lease.lease_id])
    [dead] = await take(one, "dead", lease_s=0.3)
    [again] = await take(other, "alive")
    assert (again.task_id, again.lease_id != dead.lease_id) == ("a", True)
    with pytest.raises(NotFound):
        await one.finish(dead.lease_id, 1.0)
    assert (await one.renew([again.lease_id, dead.lease_id], 600.0)) == ([again.lease_id], [dead.lease_id])
    assert other.statistics().expired == 1


async def test_runners_at_three_gateways_do_each_sample_once(shared_url: str, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        three = [await stack.enter_async_context(opened(shared_url, namespace)) for _ in range(3)]
        await three[0].add(P, [task(f"t{i}", group_size=2, repeats=2) for i in range(40)])
        done: Counter[tuple[str, int, int]] = Counter()

        async def runner(pool: PromptPool, name: str) -> None:
            while not (found := await pool.lease(P, name, count=3, wait_s=WAIT_S)).drained:
                for lease in found.leases:
                    done[lease.task_id, lease.round, lease.sample_index] += 1
                    await pool.finish(lease.lease_id, 1.0)

        async with asyncio.timeout(300):
            await asyncio.gather(*(runner(pool, f"r{i}{j}") for i, pool in enumerate(three) for j in range(3)))
        assert (len(done), set(done.values())) == (160, {1})
        await alike(*three)


async def test_a_gateway_that_starts_reads_a_snapshot_and_the_commands_behind_it(
    shared_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "SNAPSHOT_COMMANDS", 20)
    async with opened(shared_url, namespace) as one:
        for number in range(70):
            await one.add(P, [task(f"t{number}")])
        [lease] = await take(one)
        assert await length(one._commands._log) < 60, "what older snapshots have is not kept twice"
        async with opened(shared_url, namespace) as late:
            await alike(one, late)
            assert (late.statistics().tasks, late.statistics().leases) == (70, 1)
            await late.finish(lease.lease_id, 1.0)
            await late.add(P, [task("next")])
            await alike(one, late)


async def test_one_that_fell_far_behind_reads_all_anew(
    shared_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "SNAPSHOT_COMMANDS", 5)
    async with opened(shared_url, namespace) as one, opened(shared_url, namespace) as slow:
        await slow._commands._loops.close()  # it stands still
        for number in range(20):
            await one.add(P, [task(f"t{number}")])
        slow._commands._loops.keep_running(slow._commands._follow, "prompt-pool")
        await alike(one, slow)
        assert slow.statistics().tasks == 20


async def test_a_redis_that_is_killed_keeps_what_was_answered_and_serves_again(
    redis_servers: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "WAIT_S", 0.2)
    daemon = redis_servers()
    url = daemon.ready["url"]
    async with opened(url, "n") as one, opened(url, "n") as other:
        await one.add(P, [task(f"t{i}") for i in range(8)])
        held = await take(one, count=3)
        daemon.kill()
        with pytest.raises(Unavailable):
            await other.lease(P, "r")
        with pytest.raises(Unavailable):
            await one.finish(held[0].lease_id, 1.0)
        redis_servers()
        async with asyncio.timeout(120):
            for lease in held:
                await until_served(one, lease)
            rest = [(await take(other))[0].task_id for _ in range(5)]
        assert sorted([*(lease.task_id for lease in held), *rest]) == [f"t{i}" for i in range(8)]
        await alike(one, other)
        assert (one.statistics().finished, one.statistics().leases) == (3, 5)


async def until_served(pool: PromptPool, lease: TaskLease) -> None:
    while True:
        with contextlib.suppress(Unavailable):
            await pool.finish(lease.lease_id, 1.0)
            return


async def test_a_gateway_that_dies_loses_nothing_and_its_samples_come_back(shared_url: str, namespace: str) -> None:
    async with opened(shared_url, namespace) as one:
        async with opened(shared_url, namespace) as dying:
            await dying.add(P, [task("a"), task("b")])
            [held] = await take(dying, lease_s=0.5)
            await dying._commands._loops.close()  # no answer, no farewell: as kill -9 leaves it
        assert {(await take(one))[0].task_id for _ in range(2)} == {"a", "b"}
        assert held.task_id == "a"


async def test_a_redis_that_came_back_empty_begins_anew(redis_servers: Callable[..., Daemon]) -> None:
    url = redis_servers().ready["url"]
    async with opened(url, "n") as one:
        await one.add(P, [task("a")])
        await one._commands._store.call(Script("return redis.call('FLUSHALL')"), "tasks")
        assert await one.add(P, [task("a")]) == 1
        assert [lease.task_id for lease in await take(one)] == ["a"]
        assert one.statistics().tasks == 1
