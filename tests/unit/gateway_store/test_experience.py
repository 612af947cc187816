"""The experience buffer: order, leases, groups, staleness and room, in each store and in the pure bookkeeping."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.commands import Effect
from gateway.core.experience import BufferState, Gone, Leased, Put, Used, holder
from gateway.core.experience_commands import (
    Acknowledge,
    AddSession,
    Command,
    Known,
    LeaseEntries,
    SetBound,
    carry_out,
)
from gateway.core.selection import Bound, Entry
from gateway.experience import ExperienceBuffer
from gateway.experience.buffer import Evicted
from gateway.experience.shared import shared_store
from gateway.experience.stores import STORES
from gateway.store import Database
from protos.errors import Conflict, InvalidRequest, NotFound, OutOfCapacity
from protos.packed import Facts
from protos.trajectories import Segment, Trajectory
from tests.support.shared_stores import SHARED, connect
from tests.unit.gateway_store.disk import until


def trajectory(name: str, version: int = 1, group: str = "g", split: str = "train") -> Trajectory:
    return Trajectory(
        session_id=name,
        group_id=group,
        sample_index=0,
        reward=0.5,
        status="completed",
        mixed=False,
        split=split,  # type: ignore[arg-type]
        token_ids=[1, 2, 3],
        logprobs=[0.0, -0.25, -0.5],
        loss_mask=[0, 1, 1],
        versions=[-1, version, version + 1],
        turns=1,
        segments=[
            Segment(
                turn=0,
                engine="e",
                incarnation="i",
                version=version,
                start=1,
                end=3,
                cause="start",
                started_unix_s=0.0,
                ended_unix_s=1.0,
            )
        ],
        started_unix_s=0.0,
        finished_unix_s=1.0,
        tags={"env": "x"},
    )


@pytest.fixture(params=[*sorted(STORES), *SHARED])
async def buffer(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[ExperienceBuffer]:
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(Database(tmp_path / "db"))
        if request.param in SHARED:
            shared = await connect(stack, request, request.param, namespace)
            buffer = ExperienceBuffer(database, store=shared_store(database, shared), capacity=4)
        else:
            buffer = ExperienceBuffer(database, store=request.param, capacity=4)
        await buffer.open()
        stack.push_async_callback(buffer.close)
        yield buffer


async def sample(buffer: ExperienceBuffer, reader: str, **wanted: Any) -> tuple[str, list[Trajectory]]:
    sampled = await buffer.sample(reader, **wanted)
    return sampled.lease_id, sampled.trajectories()


def names(sampled: tuple[str, list[Trajectory]]) -> list[str]:
    return [t.session_id for t in sampled[1]]


async def test_first_in_first_out_and_bodies_are_whole(buffer: ExperienceBuffer) -> None:
    for name in "abc":
        await buffer.add(trajectory(name))
    lease, got = await sample(buffer, "trainer", trajectories=2, trainer_version=1)
    assert got == [trajectory("a"), trajectory("b")]
    assert names(await sample(buffer, "other", trajectories=2, trainer_version=1)) == ["c"]
    assert await buffer.ack(lease) == 2
    statistics = buffer.statistics()
    assert (statistics.trajectories, statistics.leased, statistics.acked) == (0, 1, 2)


async def test_a_session_with_branches_counts_as_one_and_comes_whole(buffer: ExperienceBuffer) -> None:
    leaves = [msgspec.structs.replace(trajectory("a", version=v), leaf=i, leaves=2) for i, v in enumerate((5, 2))]
    await buffer.add(*leaves)
    await buffer.add(trajectory("b"))
    lease, got = await sample(buffer, "trainer", trajectories=1, trainer_version=5)
    assert got == leaves
    assert buffer.statistics().leased == await buffer.ack(lease) == 1
    assert names(await sample(buffer, "trainer", trajectories=2, trainer_version=5)) == ["b"]
    await buffer.add(*leaves)
    await sample(buffer, "trainer", trajectories=1, trainer_version=5, own=Bound(5, 2))
    assert buffer.statistics().evicted_stale == 1, "as stale as its oldest leaf"


async def test_a_lapsed_lease_gives_back_to_the_old_place(buffer: ExperienceBuffer) -> None:
    for name in "abc":
        await buffer.add(trajectory(name))
    lease, _ = await sample(buffer, "dies", trajectories=2, trainer_version=1, lease_s=0.01)
    got = await sample(buffer, "lives", trajectories=3, trainer_version=1, wait_s=5.0)
    assert names(got) == ["a", "b", "c"]
    with pytest.raises(NotFound, match="expired"):
        await buffer.ack(lease)
    assert buffer.statistics().lapsed_leases == 1


async def test_what_is_given_back_is_there_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        buffer = ExperienceBuffer(database)
        await buffer.open()
        for name in "ab":
            await buffer.add(trajectory(name))
        lease, _ = await sample(buffer, "t", trajectories=1, trainer_version=1)
        waiting = asyncio.create_task(sample(buffer, "u", trajectories=2, trainer_version=1, wait_s=60.0))
        await asyncio.sleep(0)
        assert await buffer.release(lease) == 1
        again, got = await waiting
        assert names((again, got)) == ["a", "b"]
        assert await buffer.release(again) == 2
        with pytest.raises(NotFound, match="no lease"):
            await buffer.release(again)
        await buffer.close()
    async with Database(tmp_path / "db") as database:
        buffer = ExperienceBuffer(database)
        await buffer.open()
        assert (buffer.statistics().trajectories, buffer.statistics().leased) == (2, 0)
        await buffer.close()


async def test_a_lease_is_given_back_by_the_name_that_its_sample_gave_it(buffer: ExperienceBuffer) -> None:
    for name in "ab":
        await buffer.add(trajectory(name))
    got = await sample(buffer, "t", trajectories=1, trainer_version=1, lease_id="mine")
    assert (got[0], names(got)) == ("mine", ["a"])
    with pytest.raises(Conflict, match="there is a lease 'mine'"):
        await sample(buffer, "t", trajectories=1, trainer_version=1, lease_id="mine")
    assert await buffer.release("mine") == 1
    assert names(await sample(buffer, "t", trajectories=2, trainer_version=1, lease_id="mine")) == ["a", "b"]


async def test_a_lease_that_is_given_back_before_it_is_there_is_never_made(buffer: ExperienceBuffer) -> None:
    waiting = asyncio.create_task(sample(buffer, "t", trajectories=1, trainer_version=1, wait_s=60.0, lease_id="mine"))
    await until(lambda: "mine" in buffer._sampling, "a sample that waits")
    with pytest.raises(Conflict, match="or a sample that asks for one"):
        await sample(buffer, "t", trajectories=1, trainer_version=1, lease_id="mine")
    assert await buffer.release("mine") == 0
    await buffer.add(trajectory("a"))
    with pytest.raises(Conflict, match="given back before it was there"):
        await asyncio.wait_for(waiting, 60)
    assert names(await sample(buffer, "t", trajectories=1, trainer_version=1, lease_id="mine")) == ["a"]


async def test_sampling_waits_for_enough_and_takes_less_at_the_deadline(buffer: ExperienceBuffer) -> None:
    waiting = asyncio.create_task(sample(buffer, "t", trajectories=2, trainer_version=1, wait_s=10.0))
    await buffer.add(trajectory("a"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await buffer.add(trajectory("b"))
    assert names(await asyncio.wait_for(waiting, 60)) == ["a", "b"]
    await buffer.add(trajectory("c"))
    assert names(await sample(buffer, "t", trajectories=9, trainer_version=1, wait_s=0.01)) == ["c"]
    assert await sample(buffer, "t", trajectories=9, trainer_version=1) == ("", [])


async def test_whole_groups_only(buffer: ExperienceBuffer) -> None:
    for name, group in (("a0", "a"), ("b0", "b"), ("b1", "b"), ("c0", "c")):
        await buffer.add(trajectory(name, group=group))
    assert names(await sample(buffer, "t", groups=2, group_size=2, trainer_version=1)) == ["b0", "b1"]
    assert names(await sample(buffer, "t", groups=1, group_size=2, trainer_version=1)) == []
    assert buffer.statistics().trajectories == 2


async def test_named_sessions_only_and_it_waits_for_all_of_them(buffer: ExperienceBuffer) -> None:
    for name in "abc":
        await buffer.add(trajectory(name))
    waiting = asyncio.create_task(sample(buffer, "t", session_ids=["d", "a", "a"], trainer_version=1, wait_s=60.0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await buffer.add(trajectory("d"))
    assert names(await asyncio.wait_for(waiting, 60)) == ["a", "d"]
    assert names(await sample(buffer, "t", session_ids=["a", "b"], trainer_version=1)) == ["b"], "a is leased"
    assert buffer.statistics().trajectories == 1


async def test_beyond_the_buffers_own_bound_they_are_dropped_and_counted(buffer: ExperienceBuffer) -> None:
    await buffer.add(trajectory("old", version=1))
    await buffer.add(trajectory("new", version=3))
    got = await sample(buffer, "t", trajectories=2, trainer_version=4, own=Bound(4, 1))
    assert names(got) == ["new"]
    assert buffer.statistics().evicted_stale == 1


async def test_a_readers_bound_filters_its_answer_and_leaves_all_to_the_others(buffer: ExperienceBuffer) -> None:
    for name, version in (("old", 1), ("new", 3)):
        await buffer.add(trajectory(name, version=version))
    wanted: dict[str, Any] = {"trajectories": 2, "trainer_version": 9, "own": Bound(3, 4, by_token=True)}
    strict = await buffer.sample("strict", staleness_max=0, **wanted)
    assert (strict.rows, strict.stale) == ((), 2)
    assert strict.why == "2 too stale, the newest is 4 and you say 9"
    assert buffer.num_unused() == 2
    assert buffer.num_unused([Bound(4, 1), Bound(4, 0)]) == 1
    assert names(await sample(buffer, "t", **wanted)) == ["old", "new"]
    nothing = await buffer.sample("late", staleness_max=0, **wanted)
    assert nothing.why == "2 leased"
    assert buffer.statistics().evicted_stale == 0


async def test_an_empty_answer_counts_what_is_there(buffer: ExperienceBuffer) -> None:
    assert (await buffer.sample("t", trajectories=1, trainer_version=1)).why == "no trajectory waits"
    for name, group, version in (("a", "g", 1), ("b", "h", 5), ("c", "i", 5)):
        await buffer.add(trajectory(name, group=group, version=version))
    lease, _ = await sample(buffer, "t", session_ids=["c"], trainer_version=6, uses_max=2)
    await buffer.ack(lease)
    nothing = await buffer.sample("t", groups=1, group_size=2, trainer_version=6, staleness_max=2)
    assert nothing.why == (
        "1 too stale: more than 2 versions behind 6; 1 used before; 1 too few, or in groups that lack members"
    )
    assert (await buffer.peek(Bound(6), session_ids=["nobody"])).why == "no trajectory waits"


async def test_a_peek_leaves_all_as_it_is(buffer: ExperienceBuffer) -> None:
    for name, version in (("old", 1), ("new", 3)):
        await buffer.add(trajectory(name, version=version))
    found = await buffer.peek(Bound(4, 2), trajectories=2, strategy="newest")
    assert (found.lease_id, found.trajectories()) == ("", [trajectory("new", version=3)])
    statistics = buffer.statistics()
    assert (statistics.trajectories, statistics.leased, statistics.sampled) == (2, 0, 0)


async def test_room_is_made_from_the_oldest_and_never_from_what_is_leased(buffer: ExperienceBuffer) -> None:
    for name in "abcd":
        await buffer.add(trajectory(name))
    await sample(buffer, "t", trajectories=1, trainer_version=1)
    await buffer.add(trajectory("e"))
    assert buffer.statistics().evicted_for_room == 1
    assert names(await sample(buffer, "t", trajectories=9, trainer_version=1)) == ["c", "d", "e"]
    with pytest.raises(OutOfCapacity, match="4 places"):
        await buffer.add(trajectory("f"))


async def test_what_is_evicted_is_gone_but_for_what_is_leased(buffer: ExperienceBuffer) -> None:
    for name in "abc":
        await buffer.add(trajectory(name))
    lease_id, _ = await sample(buffer, "t", trainer_version=1, trajectories=1)
    assert await buffer.evict(["a", "b", "nobody"]) == Evicted(1, 1, 1)
    assert await buffer.evict(["b"]) == Evicted(0, 0, 1)
    assert (buffer.statistics().trajectories, buffer.statistics().evicted_by_readers) == (1, 1)
    await buffer.release(lease_id)
    assert names(await sample(buffer, "t", trainer_version=1, trajectories=3)) == ["a", "c"]
    await buffer.add(trajectory("b"))  # its name is free again


async def test_a_reader_that_starts_again_reclaims_what_its_ranks_had(buffer: ExperienceBuffer) -> None:
    for name in "abcd":
        await buffer.add(trajectory(name))
    for rank in range(3):
        await buffer.sample(holder("t", rank), trainer_version=1, trajectories=1)
    other, _ = await sample(buffer, holder("t/1", 0), trainer_version=1, trajectories=1)
    assert await buffer.reclaim("t", rank=0, num_ranks=2) == 2, "of ranks 0 and 2"
    assert names(await sample(buffer, "x", trainer_version=1, trajectories=4)) == ["a", "c"]
    assert await buffer.reclaim("t", rank=1, num_ranks=2) == 1
    assert await buffer.reclaim("t") == 0
    assert await buffer.ack(other) == 1, "another reader's"


async def test_bad_requests_are_named(buffer: ExperienceBuffer) -> None:
    with pytest.raises(InvalidRequest, match="one of"):
        await sample(buffer, "t", trainer_version=1)
    with pytest.raises(InvalidRequest, match="group_size"):
        await sample(buffer, "t", groups=1, trainer_version=1)
    with pytest.raises(ValueError, match="evaluation"):
        await buffer.add(trajectory("a", split="eval"))
    await buffer.add(trajectory("a"))
    with pytest.raises(Conflict, match="session a"):
        await buffer.add(trajectory("a"))


async def test_a_restart_keeps_trajectories_and_leases(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        buffer = ExperienceBuffer(database)
        await buffer.open()
        for name in "abc":
            await buffer.add(trajectory(name))
        lease, _ = await sample(buffer, "t", trajectories=1, trainer_version=1, lease_s=1000)
        await sample(buffer, "gone", trajectories=1, trainer_version=1, lease_s=0.001)
    async with Database(tmp_path / "db") as database:
        buffer = ExperienceBuffer(database)
        await buffer.open()
        assert names(await sample(buffer, "t", trajectories=9, trainer_version=1)) == ["b", "c"]
        assert await buffer.ack(lease) == 1
        await buffer.add(trajectory("d"))
        assert names(await sample(buffer, "t", trajectories=9, trainer_version=1)) == ["d"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3)),
            st.tuples(st.just("lease"), st.integers(1, 4)),
            st.tuples(st.just("groups"), st.integers(1, 2)),
            st.tuples(st.just("ack"), st.integers(0, 9)),
            st.tuples(st.just("lapse"), st.integers(0, 9)),
            st.tuples(st.just("announce"), st.integers(0, 6)),
        ),
        max_size=60,
    )
)
def test_bookkeeping_keeps_its_invariants(events: list[tuple[str, int]]) -> None:
    state, known, now = BufferState(capacity=5), Known(), 0.0
    seq, evicted, used = 0, 0, 0

    def run(command: Command) -> Effect:
        return carry_out(state, known, command, now)

    for kind, value in events:
        now += 1
        if kind == "add" and not state.full():
            seq += 1
            counted = run(AddSession(f"s{seq}", f"g{value}", value, Facts(), 5, None)).counted
            evicted += counted.get("evicted_stale", 0) + counted.get("evicted_for_room", 0)
        elif kind in ("lease", "groups"):
            chosen = state.take(value) if kind == "lease" else state.take_groups(value, 2)
            if kind == "lease":
                assert [e.seq for e in chosen] == sorted(state.free)[:value]
            else:
                assert len(chosen) % 2 == 0
            run(LeaseEntries(f"l{now}", "r", 3.0, 1, [(e.seq, e.uses) for e in chosen]))
        elif kind == "ack" and state.leases:
            with contextlib.suppress(NotFound):  # it is over
                used += run(Acknowledge(sorted(state.leases)[value % len(state.leases)])).answer
        elif kind == "lapse":
            state.lapse(now)
            assert (state.next_lapse() or now + 1) > now
        elif kind == "announce":
            evicted += run(SetBound(value, 2, by_token=False)).counted["evicted_stale"]
            assert not any(state.is_stale(e) for e in state.free.values())
        bounds = [Bound(value, 1), Bound(value, 2, by_token=True)]
        within = [e for e in state.free.values() if not e.uses and any(bound.allows(e) for bound in bounds)]
        assert state.num_unused(bounds) == len(within)
        assert state.groups_within(bounds) == Counter(e.group_id for e in within)
        held = [s for lease in state.leases.values() for s in lease.entries]
        assert len(held) == len(set(held))
        assert not set(held) & set(state.free)
        assert len(state) == len(state.free) + state.num_leased <= 5
        assert seq == len(state) + evicted + used


CHILD = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from protos.trajectories import Trajectory
    from gateway.experience import ExperienceBuffer
    from gateway.store import Database

    def trajectory(name: str) -> Trajectory:
        return Trajectory(
            session_id=name, group_id="g", sample_index=0, reward=1.0, status="completed", mixed=False, split="train",
            token_ids=[1, 2], logprobs=[0.0, -1.0], loss_mask=[0, 1], versions=[-1, 3], turns=1, segments=[],
            started_unix_s=0.0, finished_unix_s=1.0)

    async def main() -> None:
        database = Database(Path(sys.argv[1]))
        await database.open()
        buffer = ExperienceBuffer(database)
        await buffer.open()
        for number in range(10**9):
            await buffer.add(trajectory(f"s{number}"))
            print(number, flush=True)
            if number == 5:
                sampled = await buffer.sample("r", trajectories=3, trainer_version=3, lease_s=1000)
                await buffer.ack(sampled.lease_id)
            if number == 8:
                await buffer.sample("dead reader", trajectories=2, trainer_version=3, lease_s=0.001)

    asyncio.run(main())
    """
)


def test_what_was_added_survives_kill_9_once(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(30):
        child.stdout.readline()
    child.kill()
    promised = 30 + len([line for line in child.stdout.read().splitlines() if line])
    child.stdout.close()
    child.wait()
    asyncio.run(_check_what_is_left(path, promised))


async def _check_what_is_left(path: Path, promised: int) -> None:
    async with Database(path) as database:
        buffer = ExperienceBuffer(database)
        await buffer.open()
        left = names(await sample(buffer, "r", trajectories=10**6, trainer_version=3))
    assert len(left) >= promised - 3  # three were used; all others that `add` returned for are there
    assert left == [f"s{number}" for number in range(3, 3 + len(left))]  # each once, the dead reader's among them


async def test_groups_of_equal_rewards_are_dropped_when_asked_and_the_next_is_given(tmp_path: Path) -> None:
    async with Database(tmp_path / "db") as database:
        buffer, again = ExperienceBuffer(database), ExperienceBuffer(database)
        await buffer.open()
        for group, rewards in (("same", (1.0, 1.0)), ("mixed", (0.0, 1.0)), ("late", (0.5, 0.5))):
            for number, reward in enumerate(rewards):
                await buffer.add(msgspec.structs.replace(trajectory(f"{group}-{number}", group=group), reward=reward))
        await buffer.revise("late-1", lambda leaves: [msgspec.structs.replace(leaf, reward=0.75) for leaf in leaves])
        asked = {"trainer_version": 1, "groups": 2, "group_size": 2}
        sampled = await sample(buffer, "r", **asked, drop_equal_rewards=True)
        assert names(sampled) == ["mixed-0", "mixed-1", "late-0", "late-1"]
        assert (buffer.statistics().evicted_equal, buffer.statistics().trajectories) == (2, 0)
        await buffer.ack(sampled[0])
        await again.open()
        assert again.statistics().trajectories == 0, "dropped on disk, too"


def test_beyond_its_bytes_it_evicts_what_was_used_before_and_then_the_oldest() -> None:
    state = BufferState(capacity=9, bytes_max=100)

    def add(seq: int, num_bytes: int, uses: int = 0) -> list[int]:
        entry = Entry(seq, f"s{seq}", "g", 1, Facts(num_bytes=num_bytes), uses)
        gone = state.room_for(entry)
        for change in (Gone(gone), Put(entry)):
            state.make(change)
        return [old.seq for old in gone]

    for found in ((1, 40), (2, 30, 1), (3, 30)):
        assert add(*found) == []
    assert add(4, 60) == [2, 1]
    assert (state.num_bytes, sorted(state.free)) == (90, [3, 4])
    state.make(Leased("l", "r", 1.0, 2, [state.free[3], state.free[4]]))
    assert add(5, 50) == [], "what is leased is not evicted"
    assert state.num_bytes == 140
    lease = state.leases["l"]
    state.make(Used(lease))
    assert [(entry.seq, entry.uses) for entry in lease.again()] == [(3, 1), (4, 1)]
    assert (state.num_bytes, state.num_used, state.groups) == (140, 2, {"g": 1})
    assert add(6, 40) == [3, 4]


@pytest.mark.slow
async def test_ranks_that_wait_cost_a_finish_nothing(tmp_path: Path) -> None:
    """Against the same finishes while nobody waits: each was a look at all that is free, by every rank."""

    async def cost(num_ranks: int, **wanted: Any) -> float:
        async with Database(None) as database:
            buffer = ExperienceBuffer(database, store="memory")
            await buffer.open()
            for number in range(free):
                await buffer.add(trajectory(f"s{number}", group=f"g{number // 4}"))
            asked = {"trainer_version": 1, "wait_s": 300.0, "whole": True, **wanted}
            ranks = [asyncio.create_task(buffer.sample(holder("r", rank), **asked)) for rank in range(num_ranks)]
            await asyncio.sleep(0)
            before = time.thread_time()
            for number in range(20):
                await buffer.add(trajectory(f"more{number}", group=f"h{number}"))
                await asyncio.sleep(0)
            used = time.thread_time() - before
            assert not any(rank.done() for rank in ranks)
            for rank in ranks:
                rank.cancel()
            await asyncio.gather(*ranks, return_exceptions=True)
            return used

    free = 5000
    for wanted in ({"trajectories": free + 100}, {"groups": free, "group_size": 8}):
        alone, beside = [min([await cost(num, **wanted) for _ in range(2)]) for num in (0, 8)]
        assert beside < 5 * alone + 0.02, f"20 finishes took {beside:.3f} s with 8 waiting ranks, {alone:.3f} s without"


async def test_a_rank_that_waits_gets_its_groups_when_the_last_member_comes(buffer: ExperienceBuffer) -> None:
    wanted: dict[str, Any] = {"groups": 1, "group_size": 2, "trainer_version": 1, "wait_s": 60.0, "whole": True}
    waiting = asyncio.create_task(sample(buffer, "r", **wanted))
    await buffer.add(trajectory("a0", group="a"))
    await buffer.add(trajectory("b0", group="b"))
    assert not waiting.done()
    await buffer.add(trajectory("b1", group="b"))
    assert names(await waiting) == ["b0", "b1"]
    waiting = asyncio.create_task(sample(buffer, "r", **wanted))
    await asyncio.sleep(0)
    await buffer.close_group("a", 1)
    assert names(await waiting) == ["a0"]


async def test_what_comes_too_stale_is_evicted_while_a_rank_waits(buffer: ExperienceBuffer) -> None:
    wanted: dict[str, Any] = {"trajectories": 3, "trainer_version": 9, "own": Bound(9, 2), "wait_s": 60.0}
    waiting = asyncio.create_task(sample(buffer, "r", **wanted))
    await until(lambda: bool(buffer._state.own.version), "a waiting rank")
    await buffer.add(trajectory("old", version=1))
    await until(lambda: buffer.statistics().evicted_stale == 1, "an eviction")
    assert not waiting.done()
    for name in "abc":
        await buffer.add(trajectory(name, version=9))
    assert names(await waiting) == ["a", "b", "c"]
