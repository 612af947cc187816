"""What every store of experience must do: the gateway's database, this process's memory, and a shared log."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.experience import BufferState
from gateway.core.experience_commands import (
    Acknowledge,
    AddSession,
    CloseGroup,
    EvictEntries,
    LeaseEntries,
    LeaveOut,
    Raced,
    ReleaseLease,
    ReviseSession,
)
from gateway.core.selection import Entry
from gateway.experience.shared import shared_store
from gateway.experience.stores import STORES, ExperienceStore, MemoryRows, OwnExperience, own_store
from gateway.log.base import Hooks
from gateway.store import Database
from protos import packed
from protos.errors import InvalidRequest, NotFound, Unavailable
from tests.support.shared_stores import SHARED, connect
from tests.unit.gateway_store.disk import Disk, until
from tests.unit.gateway_store.test_experience import trajectory

HOOKS = Hooks(lambda command, outcome, mine: None, lambda: None)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database(tmp_path / "db") as database:
        yield database


Opener = Callable[[], ExperienceStore]


@pytest.fixture(params=[*sorted(STORES), *SHARED])
async def opener(request: pytest.FixtureRequest, database: Database, namespace: str) -> AsyncIterator[Opener]:
    """Makes a store; each is another life of the gateway."""
    async with contextlib.AsyncExitStack() as stack:
        if request.param in SHARED:
            make = shared_store(database, await connect(stack, request, request.param, namespace))
        else:
            make = own_store(request.param, database)
        yield lambda: make(BufferState(100, 1 << 30), HOOKS)


@pytest.fixture
async def store(opener: Opener) -> AsyncIterator[ExperienceStore]:
    store = opener()
    await store.open()
    assert (len(store.state), store.state.leases, store.state.closed_groups) == (0, {}, {})
    yield store
    await store.close()


async def add(
    store: ExperienceStore, *names: str, capacity: int = 100, along: Any = None, group: str = "g"
) -> list[Entry]:
    """The entries of the sessions, in their order."""
    for name in names:
        leaves = [trajectory(name, group=group)]
        row = packed.pack(leaves)
        facts = packed.facts_of(leaves, len(row))
        await store.run(AddSession(name, group, facts.oldest_version, facts, capacity, 1 << 30), row, along)
    return [entry_of(store, name) for name in names]


def entry_of(store: ExperienceStore, name: str) -> Entry:
    return next(entry for entry in store.state.free.values() if entry.session_id == name)


async def lease(store: ExperienceStore, *entries: Entry, name: str = "lease", uses_max: int = 1) -> list[str]:
    """The sessions of the bodies that it gets."""
    chosen = [(entry.seq, entry.uses) for entry in entries]
    leased = await store.run(LeaseEntries(name, "reader", 1000.0, uses_max, chosen))
    return [leaf.session_id for body in await store.read(leased) for leaf in packed.unpack(body)]


async def names(store: ExperienceStore, *entries: Entry) -> list[str]:
    """Of the sessions whose bodies a lease of `entries` gets; the lease is given back."""
    found = await lease(store, *entries, name="look")
    await store.run(ReleaseLease("look"))
    return found


async def kept_by(store: ExperienceStore, opener: Opener) -> Sequence[Entry] | None:
    """What the next life of the gateway finds; None for a store that keeps nothing."""
    if isinstance(store, OwnExperience) and isinstance(store._rows, MemoryRows):
        return None
    again = opener()
    await again.open()
    try:
        return list(again.state.free.values())
    finally:
        await again.close()


async def test_a_lease_gets_the_bodies_in_its_order_until_they_are_used_up(store: ExperienceStore) -> None:
    one, two, three = await add(store, "s1", "s2", "s3")
    assert await names(store, three, one) == ["s3", "s1"]
    await lease(store, one, two)
    await store.run(Acknowledge("lease"))
    assert await names(store, three) == ["s3"]
    assert await store.read([one, two]) == [b"", b""]
    await add(store, "s1")  # no trace of it is left


async def test_what_is_given_back_is_leased_again(store: ExperienceStore) -> None:
    one, two = await add(store, "s1", "s2")
    await lease(store, one, two, name="first")
    with pytest.raises(Raced):
        await lease(store, one, name="other")
    await store.run(ReleaseLease("first"))
    await lease(store, one, name="second")
    await store.run(Acknowledge("second"))
    assert await names(store, two) == ["s2"]
    with pytest.raises(NotFound):
        await store.run(ReleaseLease("first"))


async def test_what_makes_room_is_gone_with_what_it_is_made_for(store: ExperienceStore) -> None:
    one, two = await add(store, "s1", "s2")
    [three] = await add(store, "s3", capacity=2)
    await store.run(EvictEntries([two.seq, one.seq], "by_readers"))
    assert await names(store, three) == ["s3"]
    await add(store, "s1", "s2")


async def test_what_is_written_along_is_committed_with_it(
    store: ExperienceStore, database: Database, tmp_path: Path
) -> None:
    await database.run(lambda connection: connection.execute("CREATE TABLE ends(name TEXT)") and None)
    [one] = await add(store, "s1", along=lambda c: c.execute("INSERT INTO ends VALUES ('s1')"))
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as other, other:
        assert other.execute("SELECT name FROM ends").fetchall() == [("s1",)]
    other.close()
    assert await names(store, one) == ["s1"]


async def test_where_the_disk_refuses_what_is_written_along_nothing_is_added_nor_gone(
    store: ExperienceStore, database: Database
) -> None:
    [one] = await add(store, "s1")
    disk = Disk()
    await disk.make(database)
    disk.full = True
    with pytest.raises(Unavailable, match="full"):
        await add(store, "s2", capacity=1, along=disk.write)
    disk.full = False
    await asyncio.wait_for(database.owe(disk.write), 60)
    await until(lambda: not database.failure, "a disk that can be written")
    assert await names(store, one) == ["s1"]
    [two] = await add(store, "s2", capacity=1, along=disk.write)
    assert await names(store, two) == ["s2"]


async def revise(store: ExperienceStore, entry: Entry, reward: float) -> None:
    leaves = [msgspec.structs.replace(trajectory(entry.session_id), reward=reward)]
    row = packed.pack(leaves)
    await store.run(ReviseSession(entry.session_id, entry.edits, packed.facts_of(leaves, len(row))), row)


async def test_a_revision_replaces_the_leaves_and_one_that_is_late_changes_nothing(
    store: ExperienceStore, opener: Opener
) -> None:
    [one] = await add(store, "s1")
    await revise(store, one, 0.75)
    with pytest.raises(Raced):
        await revise(store, one, 0.25)
    after = entry_of(store, "s1")
    assert (after.facts.rewards, after.facts.versions, after.facts.num_tokens) == ([0.75], {1: 1, 2: 1}, 3)
    [body] = await store.read([after])
    assert [leaf.reward for leaf in packed.unpack(body)] == [0.75]
    if (found := await kept_by(store, opener)) is not None:
        assert [kept.facts for kept in found] == [after.facts]


async def test_what_may_be_used_again_stays_with_its_use_counted(store: ExperienceStore, opener: Opener) -> None:
    _, two = await add(store, "s1", "s2")
    await lease(store, two, name="before", uses_max=2)
    await store.run(Acknowledge("before"))
    await lease(store, entry_of(store, "s1"), entry_of(store, "s2"), uses_max=2)
    await store.run(Acknowledge("lease"))
    assert await names(store, entry_of(store, "s1")) == ["s1"]
    await add(store, "s2")  # no trace of the other is left
    if (kept := await kept_by(store, opener)) is not None:
        assert [(found.session_id, found.uses) for found in kept] == [("s1", 1), ("s2", 0)]


async def test_what_is_left_out_belongs_to_no_lease_and_is_gone_for_readers(store: ExperienceStore) -> None:
    one, two = await add(store, "s1", "s2")
    await lease(store, one, two)
    await store.run(LeaveOut("lease", one.seq))
    await store.run(LeaveOut("lease", one.seq))
    assert await store.run(Acknowledge("lease")) == 1
    assert len(store.state) == 0


async def test_closed_groups_are_kept(store: ExperienceStore, opener: Opener) -> None:
    await store.run(CloseGroup("g", 2))
    assert store.state.closed_groups == {"g": 2}
    if await kept_by(store, opener) is not None:
        again = opener()
        await again.open()
        assert again.state.closed_groups == {"g": 2}
        await again.close()


async def test_memory_keeps_nothing_of_what_is_gone_and_writes_no_row(database: Database) -> None:
    rows = MemoryRows(database)
    store = OwnExperience(rows, BufferState(100), HOOKS)
    await store.open()
    one, two, three, four, five = await add(store, *(f"s{number}" for number in range(1, 6)))
    await add(store, "s6", capacity=5)
    assert one.seq not in store.state.free
    await store.run(EvictEntries([two.seq], "by_readers"))
    await lease(store, three, four)
    await store.run(Acknowledge("lease"))
    await lease(store, five, name="last")
    await store.run(LeaveOut("last", five.seq))
    await store.run(CloseGroup("g", 1))
    assert len(rows) == 1
    for table in ("trajectories", "trajectory_bodies", "leases", "closed_groups"):
        assert await database.run(lambda c, t=table: c.execute(f"SELECT * FROM {t}").fetchall()) == []  # type: ignore[misc]


async def test_a_name_that_no_store_has_is_refused_with_those_there_are(database: Database) -> None:
    with pytest.raises(InvalidRequest, match="no experience store is named 'disk'") as refused:
        own_store("disk", database)
    assert refused.value.hint == f"there are: {', '.join(STORES)}"
