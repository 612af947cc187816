"""A relay's lease, elections and fencing, on the registry in memory with a clock of its own."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import msgspec
import pytest

from paramserver.core import view as keys
from paramserver.core.records import Holding, Member
from paramserver.membership import EtcdRegistry, MemoryRegistry, MemoryStore
from paramserver.membership.registry import Delete, Event, Guard, Outcome, Put, State, Write
from paramserver.relay import member_lease
from paramserver.relay.elections import Elections
from paramserver.relay.member_lease import MemberLease
from protos.errors import Conflict, StaleEpoch, Unavailable

HOLDING = Holding("m", 2e9)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """One registry and the leases in it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock)

    async def lease(self, name: str, *, instance: str = "", ttl_s: float = 0.05) -> MemberLease:
        member = Member(name, instance or f"instance-{name}", "h:1", "h:2")
        lease = MemberLease(MemoryRegistry(self.store), member, ttl_s=ttl_s)
        await lease.take()
        await lease.refresh()
        return lease


@functools.cache
def elections(lease: MemberLease) -> Elections:
    return Elections(lease.registry, lease)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_list_that_the_watch_has_overtaken_is_not_taken(world: World) -> None:
    """Else the view would forget an event of the watch, which is not repeated."""
    lease = await world.lease("a")
    early = await lease._registry.list(keys.ROOT)
    facts = lease.follow()
    await anext(facts)
    other = MemoryRegistry(world.store)
    await other.transact([], [Put(keys.holder_key("m", 1, "b"), b"")])
    assert [fact.relay for fact in await anext(facts)] == ["b"]  # type: ignore[union-attr]

    async def answers_late(_: str) -> State:
        return early

    lease._registry.list = answers_late  # type: ignore[method-assign]
    assert await lease.refresh() == []
    assert lease.view.knows(keys.holder_key("m", 1, "b"))


async def test_what_the_watch_repeats_of_a_list_does_not_take_the_view_back(world: World) -> None:
    lease = await world.lease("a")
    facts = lease.follow()
    await anext(facts)
    other = MemoryRegistry(world.store)
    key = keys.holder_key("m", 1, "b")
    await other.transact([], [Put(key, b"")])
    await other.transact([], [Delete(key)])
    await other.transact([], [Put(key, b"")])
    assert [fact.present for fact in await lease.refresh()] == [True]  # type: ignore[union-attr]
    assert [await anext(facts) for _ in range(3)] == [[], [], []]
    await other.transact([], [Delete(key)])
    assert [fact.present for fact in await anext(facts)] == [False]  # type: ignore[union-attr]


@pytest.mark.slow
async def test_two_live_relays_cannot_have_one_name(world: World) -> None:
    await world.lease("a")
    with pytest.raises(Conflict, match="a relay named 'a' is alive already"):
        await world.lease("a", instance="other")


async def test_a_name_is_free_again_when_its_lease_was_revoked_or_ran_out(world: World) -> None:
    await (await world.lease("a")).leave()
    await world.lease("a", instance="second")
    world.clock.now += 1.0
    await world.lease("a", instance="third")


async def test_only_one_wins_an_election_and_the_next_has_a_higher_epoch(world: World) -> None:
    a, b = await world.lease("a"), await world.lease("b", ttl_s=10.0)
    assert await elections(a).campaign("policy")
    assert not await elections(b).campaign("policy")
    await a.refresh()
    first = elections(a).epoch("policy")
    assert first is not None
    world.clock.now += 1.0
    assert await elections(b).campaign("policy")
    await b.refresh()
    second = elections(b).epoch("policy")
    assert second is not None
    assert (second.store_id, second.revision > first.revision) == (first.store_id, True)


async def test_a_stale_master_cannot_write(world: World) -> None:
    a, b = await world.lease("a"), await world.lease("b", ttl_s=10.0)
    await elections(a).campaign("policy")
    await a.refresh()
    epoch = elections(a).epoch("policy")
    assert epoch is not None
    assert await elections(a).as_master(epoch, "policy", [], [Put("/laminar/x", b"1")])
    world.clock.now += 1.0
    await elections(b).campaign("policy")
    assert not await elections(a).as_master(epoch, "policy", [], [Put("/laminar/x", b"2")]), "the registry refuses it"
    await a.refresh()
    with pytest.raises(StaleEpoch, match="no longer master"):
        await elections(a).as_master(epoch, "policy", [], [Put("/laminar/x", b"3")])
    assert world.store.keys["/laminar/x"].value == b"1"


async def test_the_best_candidate_stands_first_and_the_next_after_a_delay(world: World) -> None:
    a, b = await world.lease("a", ttl_s=10.0), await world.lease("b", ttl_s=10.0)
    await elections(a).want("policy")
    for lease in (a, b):
        await lease.refresh()
    holders = {"policy": {"b"}}
    assert await elections(a).stand(holders, now=0.0) == []
    assert await elections(b).stand(holders, now=0.0) == ["policy"]
    assert await elections(a).stand(holders, now=10.0) == [], "the key is taken"


@pytest.mark.parametrize("heard", [True, False], ids=["heard of it", "has not heard of it"])
async def test_a_model_that_was_dropped_is_not_made_again_by_an_election(world: World, heard: bool) -> None:
    """Between the end of its master's key and the moment in which a relay forgets the model, it looks masterless."""
    a, b = await world.lease("a"), await world.lease("b", ttl_s=10.0)
    await elections(a).campaign("policy")
    world.clock.now += 1.0
    await b.refresh()
    assert "policy" not in b.view.masters, "its master died"
    await MemoryRegistry(world.store).transact([], [Delete(keys.wanted_key("policy"))])
    if heard:
        await b.refresh()
    assert "policy" in b.view.models
    assert [await elections(b).stand({}, now=now) for now in (0.0, 10.0)] == [[], []]
    assert not [key for key in world.store.keys if "policy" in key]
    await elections(b).want("policy")
    await b.refresh()
    assert await elections(b).stand({}, now=20.0) == ["policy"], "somebody wants it anew"


async def test_a_relay_without_a_lease_cannot_be_elected(world: World) -> None:
    a = await world.lease("a")
    world.clock.now += 1.0
    assert not await elections(a).campaign("policy")


async def test_holdings_are_written_and_written_again_after_a_lost_lease(world: World) -> None:
    a = await world.lease("a")
    tasks = [asyncio.create_task(a.holdings.run()), asyncio.create_task(a.keep())]
    key = keys.holder_key("policy", 3, "a")
    a.holdings.hold("policy", 3, HOLDING)
    await _until(lambda: key in world.store.keys)
    world.clock.now += 1.0
    world.store.expire()
    assert key not in world.store.keys
    await _until(lambda: key in world.store.keys)
    a.holdings.unhold("policy", 3)
    await _until(lambda: key not in world.store.keys)
    await _end(tasks)


async def test_more_holdings_than_one_transaction_takes_are_all_written_again(world: World) -> None:
    """Else a relay that hung past its lease would hold versions without a key in the registry."""
    a = await world.lease("a")
    tasks = [asyncio.create_task(a.holdings.run()), asyncio.create_task(a.keep())]
    for version in range(1, 301):
        a.holdings.hold("policy", version, HOLDING)
    wanted = {keys.holder_key("policy", version, "a") for version in range(1, 301)}
    await _until(lambda: wanted <= world.store.keys.keys())
    world.clock.now += 1.0
    world.store.expire()
    assert not wanted & world.store.keys.keys()
    await _until(lambda: wanted <= world.store.keys.keys())
    for version in range(1, 301):
        a.holdings.unhold("policy", version)
    await _until(lambda: not wanted & world.store.keys.keys())
    await _end(tasks)


@pytest.mark.parametrize("in_doubt", ["hold", "unhold"])
async def test_a_write_of_a_holding_without_an_answer_is_made_good(world: World, in_doubt: str) -> None:
    """Else the registry would go on saying what was true when it last answered, for as long as the lease is kept."""
    a = await world.lease("a")
    key, write = keys.holder_key("policy", 3, "a"), a.holdings._registry.transact
    unanswered = []

    async def carries_out_without_an_answer(guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        outcome = await write(guards, writes)
        kind = Put if in_doubt == "hold" else Delete
        if not unanswered and any(one.key == key and isinstance(one, kind) for one in writes):
            unanswered.append(key)
            if in_doubt == "hold":
                a.holdings.unhold("policy", 3)
            else:
                a.holdings.hold("policy", 3, HOLDING)
            raise Unavailable("the registry did not answer")
        return outcome

    a.holdings._registry.transact = carries_out_without_an_answer  # type: ignore[method-assign]
    tasks = [asyncio.create_task(a.holdings.run())]
    a.holdings.hold("policy", 3, HOLDING)
    if in_doubt == "unhold":
        await _until(lambda: key in world.store.keys)
        a.holdings.unhold("policy", 3)
    await _until(lambda: bool(unanswered))
    a.holdings.hold("policy", 4, HOLDING)
    await _until(lambda: keys.holder_key("policy", 4, "a") in world.store.keys)
    await _until(lambda: (key in world.store.keys) == (in_doubt == "unhold"))
    await _end(tasks)


@pytest.mark.parametrize("shown", ["after the answer", "before the answer"])
@pytest.mark.parametrize("late", ["hold", "unhold"])
async def test_a_write_of_a_holding_that_is_carried_out_after_later_ones_is_made_good(
    world: World, late: str, shown: str
) -> None:
    """Calls that were not answered may be carried out in any order: only the watch shows what came of them.

    The watch may show the late write while the call that it overtook is not answered yet.
    """
    a = await world.lease("a", ttl_s=50.0)
    key, write = keys.holder_key("policy", 3, "a"), a.holdings._registry.transact
    kind = Put if late == "hold" else Delete
    held_back: list[tuple[Sequence[Guard], Sequence[Write]]] = []
    carried_out = asyncio.Event()

    async def carry_out_late() -> None:
        await write(*held_back[0])
        revision = world.store.revision
        await _until(lambda: a._seen >= revision)
        carried_out.set()

    async def transact(guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        concerned = [one for one in writes if one.key == key]
        if concerned and not held_back and isinstance(concerned[0], kind):
            held_back.append((guards, writes))
            if late == "hold":
                a.holdings.unhold("policy", 3)
            else:
                a.holdings.hold("policy", 3, HOLDING)
            raise Unavailable("the registry did not answer")
        outcome = await write(guards, writes)
        if concerned and held_back and not carried_out.is_set() and shown == "before the answer":
            await carry_out_late()
        return outcome

    a.holdings._registry.transact = transact  # type: ignore[method-assign]
    tasks = [asyncio.create_task(a.holdings.run()), asyncio.create_task(_consume(a))]
    a.holdings.hold("policy", 3, HOLDING)
    if late == "unhold":
        await _until(lambda: key in world.store.keys)
        a.holdings.unhold("policy", 3)
    await _until(lambda: bool(held_back))
    if shown == "after the answer":
        a.holdings.hold("policy", 4, HOLDING)
        await _until(lambda: keys.holder_key("policy", 4, "a") in world.store.keys)
        await carry_out_late()
    await _until(carried_out.is_set)
    await _until(lambda: (key in world.store.keys) == (late == "unhold"))
    await _end(tasks)


async def test_the_copies_of_another_relay_that_took_the_name_are_left_alone(world: World) -> None:
    """A process that hung past its lease wakes up, retires a version, and sees the other's keys under its own name."""
    a = await world.lease("a")
    tasks = [asyncio.create_task(a.holdings.run()), asyncio.create_task(_consume(a))]
    a.holdings.hold("policy", 3, HOLDING)
    key, fourth = keys.holder_key("policy", 3, "a"), keys.holder_key("policy", 4, "a")
    await _until(lambda: key in world.store.keys)
    world.clock.now += 1.0
    world.store.expire()
    other = await world.lease("a", instance="other", ttl_s=50.0)
    tasks.append(asyncio.create_task(other.holdings.run()))
    other.holdings.hold("policy", 3, HOLDING)
    other.holdings.hold("policy", 4, HOLDING)
    await _until(lambda: {key, fourth} <= world.store.keys.keys())
    a.holdings.unhold("policy", 3)
    a.holdings.hold("policy", 5, HOLDING)
    await _until(lambda: a._seen == world.store.revision)
    await _until(lambda: not a.holdings._changed.is_set())
    assert {key, fourth} <= world.store.keys.keys()
    assert keys.holder_key("policy", 5, "a") not in world.store.keys
    assert {world.store.keys[one].lease for one in (key, fourth)} == {other.lease_id}
    await _end(tasks)


async def _consume(lease: MemberLease) -> None:
    async for _ in lease.follow():
        pass


async def test_a_holding_written_while_the_lease_was_replaced_is_written_again(world: World) -> None:
    """The answer may come after this relay registered anew: what was written then hung on the old lease."""
    a = await world.lease("a", ttl_s=50.0)
    key, write = keys.holder_key("policy", 3, "a"), a.holdings._registry.transact
    old_lease = a.lease_id

    async def answers_late(guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        outcome = await write(guards, writes)
        if any(one.key == key for one in writes) and a.lease_id == old_lease:
            await a._registry.revoke(old_lease)
            assert await a._register()
        return outcome

    a.holdings._registry.transact = answers_late  # type: ignore[method-assign]
    telling = asyncio.create_task(a.holdings.run())
    a.holdings.hold("policy", 3, HOLDING)
    await _until(lambda: a.lease_id != old_lease and key in world.store.keys)
    assert world.store.keys[key].lease == a.lease_id
    await _end([telling])


async def test_a_holding_whose_value_changed_is_written_again(world: World) -> None:
    a = await world.lease("a", ttl_s=50.0)
    telling = asyncio.create_task(a.holdings.run())
    key, other = keys.holder_key("policy", 3, "a"), Holding("other", 1e9)
    a.holdings.hold("policy", 3, HOLDING)
    await _until(lambda: key in world.store.keys)
    a.holdings.hold("policy", 3, other)
    await _until(lambda: world.store.keys[key].value == msgspec.json.encode(other))
    await _end([telling])


async def test_holdings_that_cannot_be_written_are_logged_once_and_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a = await world.lease("a", ttl_s=50.0)
    write, num_refused = a.holdings._registry.transact, 0

    async def refuses(guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        nonlocal num_refused
        if num_refused < 2:
            num_refused += 1
            raise RuntimeError("unforeseen")
        return await write(guards, writes)

    a.holdings._registry.transact = refuses  # type: ignore[method-assign]
    telling = asyncio.create_task(a.holdings.run())
    a.holdings.hold("policy", 3, HOLDING)
    await _until(lambda: keys.holder_key("policy", 3, "a") in world.store.keys)
    assert [r.levelname for r in caplog.records if "unforeseen" in r.getMessage()] == ["ERROR"]
    await _end([telling])


async def test_an_outage_leaves_the_last_view(world: World) -> None:
    a = await world.lease("a")
    keeping = asyncio.create_task(a.keep())
    world.store.reachable = False
    await _until(lambda: not a.reachable)
    assert set(a.view.members) == {"a"}
    world.store.reachable = True
    await _until(lambda: a.reachable)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_another_store_is_not_taken_for_the_one_it_began_with(world: World) -> None:
    a = await world.lease("a")
    following = asyncio.create_task(_follow(a))
    await _until(lambda: "policy" in a.view.models or not following.done())
    other = MemoryStore(world.clock)
    await MemoryRegistry(other).transact([], [Put(keys.STORE, b"wiped"), Put(keys.wanted_key("policy"), b"")])
    world.store.keys, world.store.leases = other.keys, {}
    with pytest.raises(Unavailable, match="another store"):
        await a.check_store()
    assert a.foreign_store == "wiped"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    async for facts in a.follow():
        assert facts == [], "no event of a foreign store is believed"
        break
    assert set(a.view.members) == {"a"}


async def test_a_masters_writes_hold_in_its_own_store_only(world: World) -> None:
    """Another store's revisions may have come to the very number of this election."""
    a = await world.lease("a")
    assert await elections(a).campaign("policy")
    await a.refresh()
    epoch = elections(a).epoch("policy")
    assert epoch is not None
    del world.store.keys[keys.store_mark(a.view.store_id)]
    assert not await elections(a).as_master(epoch, "policy", [], [Put("/written", b"")])
    assert "/written" not in world.store.keys


@pytest.mark.parametrize("emptied_before", [keys.STORE, f"{keys.STORE}/"])
async def test_a_registry_replaced_between_two_calls_is_said_in_words(world: World, emptied_before: str) -> None:
    a = await world.lease("a")
    real = a._registry.list

    async def emptied(prefix: str) -> State:
        found = await real(prefix)
        return State((), 1) if prefix.startswith(emptied_before) else found

    a._registry.list = emptied  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="between two calls"):
        await a.check_store()


async def test_an_adoption_that_fails_half_way_believes_nothing_of_the_other_store(world: World) -> None:
    a = await world.lease("a")
    before = a.view.store_id
    facts = a.follow()
    await anext(facts)
    other = MemoryStore(world.clock)
    await MemoryRegistry(other).transact([], [Put(keys.STORE, b"new"), Put(keys.member_key("x"), b"{}")])
    world.store.keys, world.store.leases = other.keys, {}
    lists, real = [], a._registry.list

    async def list_or_fail(prefix: str) -> State:
        lists.append(prefix)
        if prefix == keys.STORE:
            watched = a._facts(await real(keys.ROOT)) if not a._is_foreign(await real(keys.ROOT)) else []
            assert watched == [], "the watch speaks for a store that was not adopted yet"
            raise Unavailable("it went away again")
        return await real(prefix)

    a._registry.list = list_or_fail  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await a.adopt()
    assert lists == [keys.STORE]
    assert (a.view.store_id, set(a.view.members)) == (before, {"a"})


async def test_an_adoption_whose_registration_was_lost_is_done_by_the_next_try(world: World) -> None:
    a = await world.lease("a", ttl_s=5.0)
    other = MemoryStore(world.clock)
    await MemoryRegistry(other).transact([], [Put(keys.STORE, b"new")])
    world.store.keys, world.store.leases = other.keys, {}
    grant = a._registry.grant

    async def fails(_: float) -> int:
        raise Unavailable("no answer")

    a._registry.grant = fails  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await a.adopt()
    a._registry.grant = grant  # type: ignore[method-assign]
    assert await a.adopt() == "new"
    assert keys.member_key("a") in world.store.keys
    a.adopted()
    with pytest.raises(Conflict, match="nothing to adopt"):
        await a.adopt()


async def test_an_adoption_beside_a_renewal_of_the_lease_is_not_taken_for_another_relay(world: World) -> None:
    a = await world.lease("a", ttl_s=5.0)
    other = MemoryStore(world.clock)
    await MemoryRegistry(other).transact([], [Put(keys.STORE, b"new")])
    world.store.keys, world.store.leases = other.keys, {}
    asked, answer, keep_alive = asyncio.Event(), asyncio.Event(), a._registry.keep_alive

    async def answers_late(lease: int) -> bool:
        found = await keep_alive(lease)
        asked.set()
        await answer.wait()
        return found

    a._registry.keep_alive = answers_late  # type: ignore[method-assign]
    renewal = asyncio.create_task(a._keep_once())  # of the lease in the store that is gone
    await asked.wait()
    a._registry.keep_alive = keep_alive  # type: ignore[method-assign]
    assert await a.adopt() == "new"
    answer.set()
    await renewal
    assert a.trouble == ""
    assert await keep_alive(a.lease_id)


async def test_a_registration_whose_reply_was_lost_is_not_taken_for_another_relay(world: World) -> None:
    a = await world.lease("a", ttl_s=5.0)
    world.clock.now += 10.0
    transact = a._registry.transact

    async def loses_the_reply(guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        outcome = await transact(guards, writes)
        if any(write.key == keys.member_key("a") for write in writes):
            raise Unavailable("no answer")
        return outcome

    a._registry.transact = loses_the_reply  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await a._keep_once()
    a._registry.transact = transact  # type: ignore[method-assign]
    await a._keep_once()
    assert not a.name_taken, "it is its own"
    world.clock.now += 10.0
    await a._keep_once()
    assert await a._registry.keep_alive(a.lease_id)


async def test_an_adoption_that_fails_after_it_knows_the_store_records_the_earlier_one_at_the_next_try(
    world: World,
) -> None:
    a = await world.lease("a", ttl_s=5.0)
    before = a.view.store_id
    other = MemoryStore(world.clock)
    await MemoryRegistry(other).transact([], [Put(keys.STORE, b"new")])
    world.store.keys, world.store.leases = other.keys, {}
    transact = a._registry.transact

    async def fails(guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        if any(write.key == keys.continues_key(before) for write in writes):
            raise Unavailable("no answer")
        return await transact(guards, writes)

    a._registry.transact = fails  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await a.adopt()
    a._registry.transact = transact  # type: ignore[method-assign]
    await a._keep_once()  # registers there: only what the adoption writes is left
    assert await a.adopt() == "new"
    assert keys.continues_key(before) in world.store.keys


async def test_a_watch_that_fails_in_a_way_nobody_foresaw_begins_anew(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a = await world.lease("a")
    watch, num_watches = a._registry.watch, 0

    async def fails_twice(prefix: str) -> AsyncIterator[Event]:
        nonlocal num_watches
        num_watches += 1
        async for event in watch(prefix):
            yield event
            if num_watches < 3:
                raise RuntimeError("unforeseen")

    a._registry.watch = fails_twice  # type: ignore[method-assign]
    following = asyncio.create_task(_follow(a))
    await _until(lambda: num_watches == 3)
    await MemoryRegistry(world.store).transact([], [Put(keys.wanted_key("policy"), b"")])
    await _until(lambda: "policy" in a.view.models)
    assert len([r for r in caplog.records if "unforeseen" in r.getMessage()]) == 1
    await _end([following])


async def test_a_lease_is_kept_after_an_error_that_nobody_foresaw(world: World) -> None:
    a = await world.lease("a")
    keep_alive, num_failed = a._registry.keep_alive, 0

    async def fails_twice(lease: int) -> bool:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise RuntimeError("unforeseen")
        return await keep_alive(lease)

    a._registry.keep_alive = fails_twice  # type: ignore[method-assign]
    world.clock.now += 1.0
    keeping = asyncio.create_task(a.keep())
    await _until(lambda: num_failed == 2 and keys.member_key("a") in world.store.keys)
    await _end([keeping])


async def test_an_election_that_fails_costs_no_other_models(world: World) -> None:
    a = await world.lease("a")
    for model in ("m1", "m2", "m3"):
        await elections(a).want(model)
    await a.refresh()
    campaign = elections(a).campaign

    async def fails_for_one(model: str, guards: Sequence[Guard] = ()) -> bool:
        if model == "m2":
            raise RuntimeError("unforeseen")
        return await campaign(model, guards)

    elections(a).campaign = fails_for_one  # type: ignore[method-assign]
    assert await elections(a).stand({}, now=0.0) == ["m1", "m3"]


async def test_a_relay_whose_name_was_taken_while_it_was_stopped_says_so_once_and_in_its_status(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a = await world.lease("a")
    world.clock.now += 1.0
    other = await world.lease("a", instance="other", ttl_s=50.0)
    keeping = asyncio.create_task(a.keep())
    await _until(lambda: "the name a was taken by another relay, at h:1" in a.trouble)
    num_tries = world.store.last_lease
    await _until(lambda: world.store.last_lease > num_tries + 5)
    assert len([r for r in caplog.records if "was taken by another relay" in r.getMessage()]) == 1
    assert len([r for r in caplog.records if "the lease was lost" in r.getMessage()]) == 1
    await other.leave()
    await _until(lambda: a.trouble == "")
    assert world.store.keys[keys.member_key("a")].value == msgspec.json.encode(a.member)
    await _end([keeping])


async def test_a_watch_that_takes_a_cancellation_for_its_own_ends_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As grpc.aio's does when its call fails at that moment; its relay would not end on SIGTERM."""
    a = await world.lease("a")
    watching, num_cancelled = asyncio.Event(), 0

    async def watch(prefix: str) -> AsyncIterator[Event]:
        nonlocal num_cancelled
        while True:
            watching.set()
            try:
                yield await asyncio.Future()
            except asyncio.CancelledError:
                num_cancelled += 1
                if num_cancelled > 1:
                    raise

    monkeypatch.setattr(a.registry, "watch", watch)
    following = asyncio.create_task(_follow(a))
    await watching.wait()
    following.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([following])
    assert following.cancelled()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(lease: MemberLease) -> None:
    async for _ in lease.follow():
        pass


async def _until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_a_relay_says_that_its_etcd_is_full_though_its_lease_is_kept(
    etcd: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with the alarm that a full etcd raises: it answers, keeps leases, and takes no writes."""
    monkeypatch.setattr(member_lease, "WRITES_TRIED_S", 0.1)
    registry = await EtcdRegistry.connect(etcd, timeout_s=60.0)
    lease = MemberLease(registry, Member("a", "instance-a", "h:1", "h:2"), ttl_s=2.0)
    await lease.take()
    async with httpx.AsyncClient(base_url=f"http://{etcd}", timeout=60.0) as admin, asyncio.TaskGroup() as group:
        keeping = group.create_task(lease.keep())
        await admin.post("/v3/maintenance/alarm", json={"action": "ACTIVATE", "alarm": "NOSPACE"})
        await _until(lambda: not lease.reachable)
        full = "the registry answers, and takes no writes: "
        refused = f"etcd at {etcd} refuses transact: etcdserver: mvcc: database space exceeded"
        assert lease.trouble.startswith(full + refused)
        assert f"going on with the last view: {full}" in caplog.text
        assert await registry.keep_alive(lease.lease_id)
        await admin.post("/v3/maintenance/alarm", json={"action": "DEACTIVATE", "alarm": "NOSPACE"})
        await _until(lambda: lease.reachable)
        assert not lease.trouble
        keeping.cancel()
    await registry.close()
