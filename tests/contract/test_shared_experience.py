"""Several gateways over one Redis: what one does, the others have; nothing is leased twice, lost, or there twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.experience import BufferState
from gateway.core.selection import STRATEGIES, Strategy
from gateway.experience import ExperienceBuffer, shared
from gateway.experience.shared import shared_store
from gateway.experience.stores import Undelivered
from gateway.log import replicated
from gateway.log.base import Batch, Body, Exchanged, Place, parts_in
from gateway.store import Database
from protos.errors import Conflict, InvalidRequest, NotFound, OutOfCapacity, Unavailable
from protos.trajectories import Trajectory
from tests.support.processes import Daemon
from tests.support.shared_stores import connect_to
from tests.unit.gateway_store.disk import until
from tests.unit.gateway_store.test_experience import names, sample, trajectory

Opener = Callable[..., Awaitable[ExperienceBuffer]]


@pytest.fixture
async def opened(tmp_path: Path, namespace: str) -> AsyncIterator[Opener]:
    """Opens a gateway's buffer: `await opened(url, "a", capacity=8)`; the same name again is the same gateway."""
    async with contextlib.AsyncExitStack() as stack:

        async def opener(url: str, name: str, **bounds: int) -> ExperienceBuffer:
            database = await stack.enter_async_context(Database(tmp_path / name))
            store = shared_store(database, await connect_to(stack, url, namespace))
            buffer = ExperienceBuffer(database, store=store, **bounds)
            await buffer.open()
            stack.push_async_callback(buffer.close)
            return buffer

        yield opener


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "DELIVERY_WAIT_S", 0.1)
    monkeypatch.setattr(shared, "CLOSE_WAIT_S", 0.0)


async def test_readers_of_two_gateways_get_disjoint_batches(shared_url: str, opened: Opener) -> None:
    gateways = [await opened(shared_url, name) for name in "ab"]
    expected = {f"{number}-{n}" for number in range(2) for n in range(40)}
    got: Counter[str] = Counter()

    async def fill(number: int) -> None:
        for n in range(40):
            await gateways[number].add(trajectory(f"{number}-{n}"))

    async def read(number: int) -> None:
        buffer = gateways[number % 2]
        while set(got) != expected:
            lease, found = await sample(buffer, f"r{number}", trajectories=7, trainer_version=1, wait_s=0.05)
            got.update(t.session_id for t in found)
            if lease:
                assert await gateways[(number + 1) % 2].ack(lease) == len(found), "any gateway takes it"

    await asyncio.wait_for(asyncio.gather(fill(0), fill(1), *(read(number) for number in range(6))), 180)
    assert set(got.values()) == {1}
    assert sum(buffer.statistics().acked for buffer in gateways) == 80


async def test_an_acknowledgement_is_repeated_and_one_that_came_too_late_is_refused(
    shared_url: str, opened: Opener
) -> None:
    a, b = [await opened(shared_url, name) for name in "ab"]
    for name in "xy":
        await a.add(trajectory(name))
    lease, _ = await sample(b, "t", trajectories=1, trainer_version=1)
    assert [await buffer.ack(lease) for buffer in (a, b, a)] == [1, 1, 1]
    late, found = await sample(a, "dies", trajectories=1, trainer_version=1, lease_s=0.01)
    again = await sample(b, "lives", trajectories=1, trainer_version=1, wait_s=60)
    assert names(again) == names((late, found)) == ["y"]
    with pytest.raises(NotFound, match="expired"):
        await a.ack(late)
    assert await b.ack(again[0]) == 1
    assert sum(buffer.statistics().lapsed_leases for buffer in (a, b)) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_strategy_chooses_as_over_the_gateways_own_database(
    strategy: Strategy, shared_url: str, opened: Opener, tmp_path: Path
) -> None:
    a, b = [await opened(shared_url, name) for name in "ab"]
    async with Database(tmp_path / "own") as database:
        own = ExperienceBuffer(database)
        await own.open()
        chooser = random.Random(7)
        for n in range(24):
            leaf = msgspec.structs.replace(
                trajectory(f"s{n}", version=chooser.randrange(1, 6), group=f"g{n // 4}"),
                metrics={"priority": float(chooser.randrange(5))},
            )
            await own.add(leaf)
            await (a, b)[n % 2].add(leaf)
        counted = {"groups": 2, "group_size": 4} if strategy == "complete_groups" else {"trajectories": 5}
        wanted = {**counted, "trainer_version": 6, "staleness_max": 3, "strategy": strategy, "uses_max": 2}
        for n in range(6):
            expected, found = await sample(own, "t", **wanted), await sample((a, b)[n % 2], "t", **wanted)
            assert names(found) == names(expected)
            for buffer, (lease, _) in ((own, expected), ((b, a)[n % 2], found)):
                if lease and n % 3:
                    await buffer.ack(lease)
        await own.close()


async def test_the_bounds_are_those_of_all_gateways_together(shared_url: str, opened: Opener) -> None:
    a, b = [await opened(shared_url, name, capacity=8) for name in "ab"]
    await asyncio.gather(*((a, b)[n % 2].add(trajectory(f"s{n}")) for n in range(40)))
    for buffer in (a, b):
        await sample(buffer, "none", session_ids=["no"], trainer_version=1)
        assert buffer.statistics().trajectories == 8
    assert sum(buffer.statistics().evicted_for_room for buffer in (a, b)) == 32
    lease, found = await sample(a, "t", trajectories=8, trainer_version=1)
    assert len(found) == 8
    await sample(b, "none", session_ids=["no"], trainer_version=1)
    with pytest.raises(OutOfCapacity, match="8 places"):
        await b.add(trajectory("late"))
    await b.ack(lease)
    await b.add(trajectory("late"))


async def test_groups_are_made_of_members_of_both_and_closed_and_dropped_for_both(
    shared_url: str, opened: Opener
) -> None:
    a, b = [await opened(shared_url, name) for name in "ab"]
    await a.add(trajectory("one", group="g"))
    waiting = asyncio.create_task(sample(a, "t", groups=1, group_size=2, trainer_version=1, wait_s=60))
    await b.add(trajectory("two", group="g"))
    assert names(await waiting) == ["one", "two"]
    await b.add(trajectory("alone", group="h"))
    await a.close_group("h", 1)
    assert names(await sample(b, "t", groups=1, group_size=2, trainer_version=1)) == ["alone"]
    await a.add(trajectory("given-up", group="i"))
    assert await b.drop_group("i") == 1
    with pytest.raises(NotFound):
        await a.look("given-up")


async def test_a_reward_given_at_another_gateway_is_there_for_all_and_none_after_a_lease(
    shared_url: str, opened: Opener
) -> None:
    a, b = [await opened(shared_url, name) for name in "ab"]
    await a.add(trajectory("x"))
    better = lambda leaves: [msgspec.structs.replace(leaf, reward=leaf.reward + 1) for leaf in leaves]  # noqa: E731
    await asyncio.gather(*((a, b)[n % 2].revise("x", better) for n in range(10)))
    assert [t.reward for t in await a.look("x")] == [10.5]
    _, [found] = await sample(a, "t", trajectories=1, trainer_version=1)
    assert found.reward == 10.5
    with pytest.raises(Conflict, match="a reader has session x"):
        await b.revise("x", better)


async def test_a_session_of_one_name_at_two_gateways_is_taken_once(shared_url: str, opened: Opener) -> None:
    a, b = [await opened(shared_url, name) for name in "ab"]
    results = await asyncio.gather(a.add(trajectory("x")), b.add(trajectory("x")), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "NoneType"]
    assert names(await sample(b, "t", trajectories=9, trainer_version=1)) == ["x"]


def contents(state: BufferState) -> Any:
    leased = {name: (lease.reader, lease.uses_max, dict(lease.entries)) for name, lease in state.leases.items()}
    free = dict(sorted(state.free.items()))
    return free, leased, state.closed_groups, state.sessions, state.num_bytes, state.num_used, state.groups


@pytest.mark.parametrize("seed", range(4))
async def test_every_replica_becomes_what_the_redis_has(
    seed: int, shared_url: str, opened: Opener, impatient: None
) -> None:
    gateways = [await opened(shared_url, name, capacity=12) for name in "abc"]
    chooser = random.Random(seed)
    leases: list[str] = []

    async def step(number: int) -> None:
        buffer = chooser.choice(gateways)
        kind = chooser.choice(("add", "add", "add", "sample", "sample", "ack", "release", "revise", "close", "drop"))
        with contextlib.suppress(NotFound, Conflict, OutOfCapacity, Undelivered):
            if kind == "add":
                await buffer.add(trajectory(f"s{number}", version=number // 10, group=f"g{number % 5}"))
            elif kind == "sample":
                lease_s = chooser.choice((0.001, 1000))
                lease, _ = await sample(
                    buffer, "t", trajectories=3, trainer_version=number // 10, staleness_max=3, uses_max=2,
                    lease_s=lease_s,
                )  # fmt: skip
                leases.extend([lease] if lease else [])
            elif kind in ("ack", "release") and leases:
                lease = leases.pop(chooser.randrange(len(leases)))
                await (buffer.ack(lease) if kind == "ack" else buffer.release(lease))
            elif kind == "revise":
                await buffer.revise(f"s{number - 1}", lambda leaves: [*leaves, leaves[0]])
            elif kind == "close":
                await buffer.close_group(f"g{number % 5}", 1)
            elif kind == "drop":
                await buffer.drop_group(f"g{number % 5}")

    for start in range(0, 120, 6):
        await asyncio.gather(*(step(number) for number in range(start, start + 6)))
    for buffer in gateways:
        await buffer._store._deliveries.close()  # what has no room is not sent again
    fresh = await opened(shared_url, "fresh", capacity=12)
    for _ in range(2):  # the first round may find leases that ended
        for buffer in (*gateways, fresh):
            await buffer._store.look()
    for buffer in gateways:
        assert contents(buffer._state) == contents(fresh._state)


async def test_one_that_is_far_behind_reads_everything_anew(
    shared_url: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "SNAPSHOT_COMMANDS", 2)
    a, b = [await opened(shared_url, name) for name in "ab"]
    await b._store._commands._loops.close()  # it follows nothing meanwhile
    for n in range(5):
        await a.add(trajectory(f"s{n}"))
    b._store._commands._loops.keep_running(b._store._commands._follow, "experience")
    assert len(names(await sample(b, "t", trajectories=9, trainer_version=1))) == 5


async def test_while_the_redis_is_away_a_finish_is_kept_and_lands_once_it_is_back(
    redis_servers: Callable[..., Daemon], opened: Opener, impatient: None
) -> None:
    daemon = redis_servers()
    a = await opened(daemon.ready["url"], "a")
    await a.add(trajectory("before"))
    daemon.kill()
    with pytest.raises(Undelivered, match="waits for redis://"):
        await a.add(trajectory("during"))
    with pytest.raises(Undelivered):
        await a.delivered("during")
    with pytest.raises(Conflict, match="on its way"):
        await a.add(trajectory("during"))
    await a.close_group("g", 2)
    with pytest.raises(Unavailable):
        await sample(a, "t", trajectories=1, trainer_version=1)
    found = a.delivery()
    assert (found.waiting, bool(found.failure)) == (2, True)
    redis_servers()
    await until(lambda: not a.delivery().waiting, "what waited has landed")
    await a.delivered("during")
    lease, got = await sample(a, "t", groups=1, group_size=4, trainer_version=1)
    assert names((lease, got)) == ["before", "during"]
    assert await a.ack(lease) == 2
    assert a.delivery().failure == ""


async def test_what_waits_at_a_gateway_is_bounded_and_beyond_nothing_happens(
    redis_servers: Callable[..., Daemon], opened: Opener, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SENDING_MAX", 1)
    daemon = redis_servers()
    a = await opened(daemon.ready["url"], "a")
    daemon.kill()
    with pytest.raises(Undelivered):
        await a.add(trajectory("first"))
    called: list[object] = []
    with pytest.raises(Unavailable, match="1 finishes wait") as refused:
        await a.add(trajectory("second"), along=called.append)
    assert not isinstance(refused.value, Undelivered)
    assert not called
    redis_servers()
    await until(lambda: not a.delivery().waiting, "what waited has landed")
    await a.add(trajectory("second"))
    assert names(await sample(a, "t", trajectories=9, trainer_version=1)) == ["first", "second"]


async def test_what_waited_at_the_end_of_a_gateway_is_sent_by_its_next_life(
    redis_servers: Callable[..., Daemon], tmp_path: Path, namespace: str, impatient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(shared, "CLOSE_WAIT_S", 0.0)
    daemon = redis_servers()
    url = daemon.ready["url"]
    async with contextlib.AsyncExitStack() as stack, Database(tmp_path / "a") as database:
        store = shared_store(database, await connect_to(stack, url, namespace))
        first = ExperienceBuffer(database, store=store)
        await first.open()
        daemon.kill()
        for name in "xyz":
            with pytest.raises(Undelivered):
                await first.add(trajectory(name))
        await first.close()
    redis_servers()
    async with contextlib.AsyncExitStack() as stack, Database(tmp_path / "a") as database:
        store = shared_store(database, await connect_to(stack, url, namespace))
        again = ExperienceBuffer(database, store=store)
        await again.open()
        got = await sample(again, "t", trajectories=3, trainer_version=1, wait_s=60, whole=True)
        assert sorted(names(got)) == ["x", "y", "z"]
        await again.close()


async def test_a_lease_whose_reply_was_lost_is_given_back(
    shared_url: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await opened(shared_url, "a")
    await a.add(trajectory("x"))
    log = a._store._commands._log
    real, lost = log.exchange, [False]

    async def losing(place: Place, batch: Batch, **named: Any) -> Exchanged:
        found = await real(place, batch, **named)
        if not lost[0] and any(b"LeaseEntries" in command for command in batch.commands):
            lost[0] = True
            raise Unavailable("the reply was lost")
        return found

    monkeypatch.setattr(log, "exchange", losing)
    with pytest.raises(Unavailable, match="lost"):
        await sample(a, "t", trajectories=1, trainer_version=1)
    assert names(await sample(a, "t", trajectories=1, trainer_version=1, wait_s=60)) == ["x"]


@pytest.mark.slow  # ten seconds, in which the Redis might answer again
async def test_a_lease_that_cannot_be_given_back_now_is_given_back_later(
    redis_servers: Callable[..., Daemon], opened: Opener
) -> None:
    daemon = redis_servers()
    a = await opened(daemon.ready["url"], "a")
    await a.add(trajectory("x"))
    lease, _ = await sample(a, "t", trajectories=1, trainer_version=1)
    daemon.kill()
    with pytest.raises(Unavailable):
        await a.release(lease)
    redis_servers()
    await until(lambda: not a.delivery().failure, "it answers again")
    assert names(await sample(a, "t", trajectories=1, trainer_version=1, wait_s=60)) == ["x"]


async def test_two_gateways_never_lease_under_one_name(shared_url: str, opened: Opener) -> None:
    a, b = [await opened(shared_url, name) for name in "ab"]
    for name in "xy":
        await a.add(trajectory(name))
    results = await asyncio.gather(
        *(sample(at, "t", trajectories=1, trainer_version=1, lease_id="mine") for at in (a, b)), return_exceptions=True
    )
    refused = [found for found in results if isinstance(found, Conflict)]
    assert len(refused) == 1
    assert await a.release("mine") == 1
    assert names(await sample(b, "t", trajectories=2, trainer_version=1)) == ["x", "y"]


async def damage(buffer: ExperienceBuffer, session_id: str) -> None:
    entry = next(entry for entry in buffer._state.free.values() if entry.session_id == session_id)
    body = Body(entry.body, parts_in(entry.facts.num_bytes))
    await buffer._store._commands._log.put(body, b"no trajectory", wait_s=60)


async def test_a_body_that_does_not_decode_is_left_out_and_costs_itself_alone(
    shared_url: str, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = [await opened(shared_url, name) for name in "ab"]
    for name in "xy":
        await a.add(trajectory(name))
    await damage(a, "x")
    lease, got = await sample(b, "t", trajectories=2, trainer_version=1)
    assert names((lease, got)) == ["y"]
    assert await a.ack(lease) == 1
    assert "is damaged" in caplog.text


async def test_a_sample_whose_only_body_does_not_decode_waits_for_others(
    shared_url: str, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    a = await opened(shared_url, "a")
    await a.add(trajectory("x"))
    await damage(a, "x")
    waiting = asyncio.create_task(sample(a, "t", trajectories=1, trainer_version=1, wait_s=60.0, lease_id="mine"))
    await until(lambda: "is damaged" in caplog.text, "it was found")
    await a.add(trajectory("y"))
    got = await asyncio.wait_for(waiting, 60)
    assert (got[0], names(got)) == ("mine", ["y"])


def evaluation() -> Trajectory:
    return trajectory("e", split="eval")


async def test_what_every_buffer_refuses_is_refused_here(shared_url: str, opened: Opener) -> None:
    a = await opened(shared_url, "a")
    with pytest.raises(ValueError, match="evaluation"):
        await a.add(evaluation())
    with pytest.raises(InvalidRequest, match="one of"):
        await sample(a, "t", trainer_version=1)
