"""What every store of experience must do: the gateway's database, this process's memory, and a shared Redis."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from gateway.core.selection import Entry
from gateway.experience.leases import LeaseState
from gateway.experience.redis_store import RedisStore
from gateway.experience.stores import STORES, DatabaseStore, ExperienceStore, MemoryStore, make_store
from gateway.store import Database
from protos import packed
from protos.errors import Conflict, InvalidRequest, Unavailable
from protos.trajectories import Trajectory
from tests.support.redis_servers import connect
from tests.unit.gateway_store.disk import Disk, until
from tests.unit.gateway_store.test_experience import trajectory


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database(tmp_path / "db") as database:
        yield database


@pytest.fixture(params=[*sorted(STORES), "redis"])
async def store(request: pytest.FixtureRequest, database: Database, namespace: str) -> AsyncIterator[ExperienceStore]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "redis":
            server = await connect(stack, request.getfixturevalue("shared_redis"), namespace)
            store: ExperienceStore = RedisStore(database, server, 100, 1 << 30)
        else:
            store = make_store(request.param, database)
        kept = await store.open()
        assert (list(kept.entries), list(kept.leases), list(kept.closed_groups)) == ([], [], [])
        yield store


async def kept_by(store: ExperienceStore, database: Database) -> Sequence[tuple[Entry, str | None]] | None:
    """What the next life of the gateway finds; None for a store that keeps nothing."""
    if isinstance(store, MemoryStore):
        return None
    again = DatabaseStore(database) if isinstance(store, DatabaseStore) else store
    return (await again.open()).entries


def entry(seq: int, group: str = "g") -> Entry:
    return Entry(seq, f"s{seq}", group, 1)


def lease(*entries: Entry, name: str = "lease") -> LeaseState:
    return LeaseState(name, "reader", 4e9, {found.seq: found for found in entries})


async def add(store: ExperienceStore, *entries: Entry, reward: float = 0.5, gone: Sequence[Entry] = ()) -> None:
    for found in entries:
        leaves = [msgspec.structs.replace(trajectory(found.session_id, group=found.group_id), reward=reward)]
        await store.add(found, packed.pack(leaves), gone, None)


async def names(store: ExperienceStore, *entries: Entry) -> list[str]:
    """Of the sessions whose bodies a lease of `entries` gets; the lease is given back."""
    bodies = await store.lease(lease(*entries, name="look"))
    await store.release("look")
    return [leaf.session_id for body in bodies for leaf in packed.unpack(body)]


async def test_a_lease_gets_the_bodies_in_its_order_until_they_are_used_up(store: ExperienceStore) -> None:
    await add(store, entry(1), entry(2), entry(3))
    assert await names(store, entry(3), entry(1)) == ["s3", "s1"]
    held = lease(entry(1), entry(2))
    await store.lease(held)
    await store.use_up(held)
    assert await names(store, entry(3)) == ["s3"]
    await add(store, Entry(4, "s1", "g", 1))  # no trace of it is left


async def test_what_is_given_back_is_leased_again(store: ExperienceStore) -> None:
    await add(store, entry(1), entry(2))
    first = lease(entry(1), entry(2), name="first")
    await store.lease(first)
    await store.release("first")
    second = lease(entry(1), name="second")
    await store.lease(second)
    await store.use_up(second)
    assert await names(store, entry(2)) == ["s2"]


async def test_what_makes_room_is_gone_with_what_it_is_made_for(store: ExperienceStore) -> None:
    await add(store, entry(1), entry(2))
    await add(store, entry(3), gone=[entry(1)])
    await store.delete([entry(2), entry(1)])
    assert await names(store, entry(3)) == ["s3"]
    await add(store, Entry(4, "s1", "g", 1), Entry(5, "s2", "g", 1))


async def test_what_is_written_along_is_committed_with_it(
    store: ExperienceStore, database: Database, tmp_path: Path
) -> None:
    await database.run(lambda connection: connection.execute("CREATE TABLE ends(name TEXT)") and None)
    body = packed.pack([trajectory("s1")])
    await store.add(entry(1), body, (), lambda c: c.execute("INSERT INTO ends VALUES ('s1')"))
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as other, other:
        assert other.execute("SELECT name FROM ends").fetchall() == [("s1",)]
    other.close()
    assert await names(store, entry(1)) == ["s1"]


async def test_where_the_disk_refuses_what_is_written_along_nothing_is_added_nor_gone(
    store: ExperienceStore, database: Database
) -> None:
    await add(store, entry(1))
    disk = Disk()
    await disk.make(database)
    disk.full = True
    body = packed.pack([trajectory("s2")])
    with pytest.raises(Unavailable, match="full"):
        await store.add(entry(2), body, [entry(1)], disk.write)
    disk.full = False
    await asyncio.wait_for(database.owe(disk.write), 60)
    await until(lambda: not database.failure, "a disk that can be written")
    assert await names(store, entry(1)) == ["s1"]
    await store.add(entry(2), body, [entry(1)], disk.write)
    assert await names(store, entry(2)) == ["s2"]


async def test_a_revision_replaces_the_leaves_and_one_that_fails_changes_nothing(store: ExperienceStore) -> None:
    await add(store, entry(1))
    await store.revise(entry(1), lambda leaves: [msgspec.structs.replace(leaf, reward=0.75) for leaf in leaves])

    def refuse(leaves: list[Trajectory]) -> list[Trajectory]:
        leaves.clear()
        raise Conflict("too late")

    with pytest.raises(Conflict, match="too late"):
        await store.revise(entry(1), refuse)
    [body] = await store.lease(lease(entry(1)))
    assert [leaf.reward for leaf in packed.unpack(body)] == [0.75]


async def test_a_revision_gives_the_facts_that_the_store_keeps(store: ExperienceStore, database: Database) -> None:
    await add(store, entry(1))
    facts = await store.revise(entry(1), lambda leaves: [msgspec.structs.replace(leaf, reward=1.0) for leaf in leaves])
    assert (facts.rewards, facts.versions, facts.num_tokens) == ([1.0], {1: 1, 2: 1}, 3)
    if (found := await kept_by(store, database)) is not None:
        [(kept, _)] = found
        assert kept.facts == facts


async def test_what_may_be_used_again_stays_with_its_use_counted(store: ExperienceStore, database: Database) -> None:
    await add(store, entry(1), entry(2))
    before = dataclasses.replace(lease(entry(2), name="before"), uses_max=2)
    await store.lease(before)
    await store.use_up(before)
    held = dataclasses.replace(lease(entry(1), dataclasses.replace(entry(2), uses=1)), uses_max=2)
    await store.lease(held)
    await store.use_up(held)
    assert await names(store, dataclasses.replace(entry(1), uses=1)) == ["s1"]
    await add(store, Entry(3, "s2", "g", 1))  # no trace of the other is left
    if (kept := await kept_by(store, database)) is not None:
        assert [(found.session_id, found.uses, lease) for found, lease in kept] == [("s1", 1, None), ("s2", 0, None)]


async def test_memory_keeps_nothing_of_what_is_gone_and_writes_no_row(database: Database) -> None:
    store = MemoryStore(database)
    await store.open()
    await add(store, *(entry(seq) for seq in range(1, 6)))
    await add(store, entry(6), gone=[entry(1)])
    await store.delete([entry(2)])
    held = lease(entry(3), entry(4))
    await store.lease(held)
    await store.use_up(held)
    await store.leave_out(entry(5))
    await store.close_group("g", 1, [])
    assert len(store) == 1
    for table in ("trajectories", "trajectory_bodies", "leases", "closed_groups"):
        assert await database.run(lambda c, t=table: c.execute(f"SELECT * FROM {t}").fetchall()) == []  # type: ignore[misc]


async def test_a_name_that_no_store_has_is_refused_with_those_there_are(database: Database) -> None:
    with pytest.raises(InvalidRequest, match="no experience store is named 'disk'") as refused:
        make_store("disk", database)
    assert refused.value.hint == f"there are: {', '.join(STORES)}"
