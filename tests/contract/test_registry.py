"""What every registry must do; the real etcd and the one in memory pass the same suite."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paramserver.membership import EtcdRegistry, LocalEtcd, MemoryRegistry, MemoryStore, Registry
from paramserver.membership.registry import (
    OPERATIONS_MAX,
    Absent,
    Changed,
    Created,
    Delete,
    Event,
    Put,
    Removed,
    State,
    parts,
)
from protos.access.etcd import EtcdAccess
from protos.errors import TooLarge, Unavailable
from tests.support.guarded_etcd import GuardedEtcd

MakeRegistry = Callable[[], Awaitable[Registry]]


@pytest.fixture(params=["memory", "etcd", pytest.param("guarded", marks=pytest.mark.slow)])
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakeRegistry]:
    """Makes connections to one store: in memory, in etcd, and in an etcd with TLS, a user and a prefix of its own."""
    opened: list[Registry] = []
    store, endpoint, access = MemoryStore(time.monotonic), "", EtcdAccess()
    if request.param == "etcd":
        endpoint = request.getfixturevalue("shared_etcd")
    elif request.param == "guarded":
        guarded: GuardedEtcd = request.getfixturevalue("guarded")
        endpoint, access = guarded.endpoint, guarded.access(tmp_path)

    async def make() -> Registry:
        opened.append(
            await EtcdRegistry.connect(endpoint, timeout_s=60.0, access=access) if endpoint else MemoryRegistry(store)
        )
        return opened[-1]

    yield make
    for registry in opened:
        await registry.close()


@pytest.fixture
async def registry(connect: MakeRegistry) -> Registry:
    return await connect()


@pytest.fixture
def root() -> str:
    """A prefix of this test's own: the etcd is shared."""
    return f"/test/{uuid.uuid4().hex}/"


async def values(registry: Registry, root: str) -> dict[str, bytes]:
    return {entry.key.removeprefix(root): entry.value for entry in (await registry.list(root)).entries}


async def test_what_is_put_is_listed_in_order_and_only_below_the_prefix(registry: Registry, root: str) -> None:
    await registry.transact([], [Put(root + "b", b"2"), Put(root + "a", b"1"), Put(root[:-1] + "x", b"3")])
    assert list((await values(registry, root)).items()) == [("a", b"1"), ("b", b"2")]


async def test_a_transaction_whose_guard_fails_changes_nothing(registry: Registry, root: str) -> None:
    assert (await registry.transact([Absent(root + "a")], [Put(root + "a", b"1")])).succeeded
    refused = await registry.transact(
        [Absent(root + "b"), Absent(root + "a")], [Put(root + "b", b"2"), Delete(root + "a")]
    )
    assert not refused.succeeded
    assert await values(registry, root) == {"a": b"1"}


async def test_a_key_taken_anew_is_not_the_key_it_was(registry: Registry, root: str) -> None:
    key = root + "master"
    first = await registry.transact([Absent(key)], [Put(key, b"a")])
    assert (await registry.transact([Created(key, first.revision)], [Put(root + "x", b"by a")])).succeeded
    await registry.transact([], [Put(key, b"a again")])  # rewriting keeps the key
    assert (await registry.transact([Created(key, first.revision)], [])).succeeded
    await registry.transact([], [Delete(key)])
    second = await registry.transact([Absent(key)], [Put(key, b"b")])
    assert second.revision > first.revision
    assert not (await registry.transact([Created(key, first.revision)], [Put(root + "x", b"by a")])).succeeded
    assert (await registry.list(key)).entries[0].created == second.revision


async def test_leased_keys_go_together_when_the_lease_is_revoked(registry: Registry, root: str) -> None:
    lease = await registry.grant(30.0)
    await registry.transact([], [Put(root + "a", b"1", lease), Put(root + "b", b"2", lease), Put(root + "c", b"3")])
    assert await registry.keep_alive(lease)
    await registry.revoke(lease)
    assert await values(registry, root) == {"c": b"3"}
    assert not await registry.keep_alive(lease)


@pytest.mark.slow
async def test_nothing_is_written_under_a_lease_that_has_ended(registry: Registry, root: str) -> None:
    lease = await registry.grant(30.0)
    await registry.revoke(lease)
    with pytest.raises(Unavailable):
        await registry.transact([Absent(root + "a")], [Put(root + "b", b"1"), Put(root + "a", b"1", lease)])
    assert await values(registry, root) == {}


@pytest.mark.slow
async def test_a_lease_that_is_not_kept_alive_runs_out(registry: Registry, root: str) -> None:
    # Of one length: else nothing shows that the one was kept alive. No stall of the machine is as long.
    kept, left = await registry.grant(6.0), await registry.grant(6.0)
    await registry.transact([], [Put(root + "kept", b"", kept), Put(root + "left", b"", left)])
    deadline = time.monotonic() + 60.0
    while "left" in await values(registry, root):
        assert time.monotonic() < deadline
        assert await registry.keep_alive(kept)
        await asyncio.sleep(0.2)
    assert await values(registry, root) == {"kept": b""}


async def next_of(events: AsyncIterator[Event]) -> Event:
    async with asyncio.timeout(60):
        return await anext(events)


async def test_a_watch_gives_the_state_then_every_change_in_order(connect: MakeRegistry, root: str) -> None:
    writer, reader = await connect(), await connect()
    before = await writer.transact([], [Put(root + "a", b"1")])
    events = reader.watch(root)
    state = await next_of(events)
    assert isinstance(state, State)
    assert [(entry.key, entry.value, entry.created) for entry in state.entries] == [(root + "a", b"1", before.revision)]
    assert state.revision >= before.revision
    await writer.transact([], [Put(root + "b", b"2"), Put(root[:-1] + "x", b"elsewhere")])
    await writer.transact([], [Put(root + "a", b"3")])
    await writer.transact([], [Delete(root + "b")])
    found = [await next_of(events) for _ in range(3)]
    assert [(e.entry.key, e.entry.value) for e in found[:2] if isinstance(e, Changed)] == [
        (root + "b", b"2"),
        (root + "a", b"3"),
    ]
    assert isinstance(found[2], Removed)
    assert found[2].key == root + "b"
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_watch_sees_leased_keys_go(connect: MakeRegistry, root: str) -> None:
    registry, other = await connect(), await connect()
    lease = await registry.grant(30.0)
    await registry.transact([], [Put(root + "a", b"1", lease)])
    events = other.watch(root)
    await next_of(events)
    await registry.revoke(lease)
    gone = await next_of(events)
    assert isinstance(gone, Removed)
    assert gone.key == root + "a"
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_key_that_is_no_text_keeps_nobody_from_reading_the_others(shared_etcd: str, root: str) -> None:
    registry = await EtcdRegistry.connect(shared_etcd, timeout_s=60.0)
    events = registry.watch(root)
    await next_of(events)
    await registry._kv.put(root.encode() + b"\xff\xfe", b"x", timeout=60.0)
    await registry.transact([], [Put(root + "a", b"1")])
    odd, good = await next_of(events), await next_of(events)
    assert isinstance(odd, Changed)
    assert isinstance(good, Changed)
    assert (odd.entry.key, good.entry.key) == (root + r"\xff\xfe", root + "a")
    assert await values(registry, root) == {"a": b"1", r"\xff\xfe": b"x"}
    await events.aclose()  # type: ignore[attr-defined]
    await registry.close()


async def test_an_outage_in_memory_looks_like_one_of_etcd() -> None:
    store = MemoryStore(time.monotonic)
    registry = MemoryRegistry(store)
    store.reachable = False
    with pytest.raises(Unavailable):
        await registry.list("/")


async def test_nothing_at_the_address_is_said_in_one_line() -> None:
    with pytest.raises(Unavailable, match=r"no etcd answers at 127.0.0.1:1 .*paramserver etcd") as refused:
        await EtcdRegistry.connect("127.0.0.1:1")
    assert "\n" not in str(refused.value.__cause__), "nor is it said in gRPC's own form"
    assert "AioRpcError" not in str(refused.value.__cause__)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_that_the_library_takes_for_its_own_is_heeded(fails: bool) -> None:
    """As grpc.aio does when its call ends at that moment; a loop of calls would go on for ever."""
    begun = asyncio.Event()

    async def call() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if fails:
                raise TimeoutError from None
        return "found"

    calling = asyncio.create_task(EtcdRegistry("127.0.0.1:1")._call(call(), "list"))
    await begun.wait()
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()


@pytest.mark.slow
async def test_a_watch_on_etcd_outlives_its_death_and_return(caplog: pytest.LogCaptureFixture) -> None:
    """And leaves nothing behind that asyncio finds, and reports with a traceback."""
    async with LocalEtcd() as etcd:
        registry = await EtcdRegistry.connect(etcd.endpoint, timeout_s=60.0)
        events = registry.watch("/test/")
        await next_of(events)
        reading = asyncio.create_task(next_of(events))  # through the outage
        await etcd.kill()
        with pytest.raises(Unavailable, match="did not answer"):
            await registry.list("/test/")
        await etcd.start()
        writer = await EtcdRegistry.connect(etcd.endpoint, timeout_s=60.0)
        await writer.transact([], [Put("/test/after", b"1")])
        async with asyncio.timeout(60):
            event = await reading
            while not (isinstance(event, Changed) or (isinstance(event, State) and event.entries)):
                event = await anext(events)
        gc.collect()
        await asyncio.sleep(0)
        assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
        await events.aclose()  # type: ignore[attr-defined]
        await writer.close()
        await registry.close()


async def test_a_transaction_larger_than_etcd_takes_is_refused_and_changes_nothing(
    registry: Registry, root: str
) -> None:
    """A caller that took the refusal for an outage would repeat it for ever."""
    writes = [Put(f"{root}{number:03d}", b"") for number in range(OPERATIONS_MAX + 1)]
    with pytest.raises(TooLarge, match="129 operations"):
        await registry.transact([], writes)
    assert await values(registry, root) == {}
    assert (await registry.transact([], writes[:-1])).succeeded


async def test_writes_of_any_number_and_size_go_in_parts(registry: Registry, root: str) -> None:
    writes = [Put(f"{root}{number:03d}", b"x" * (400_000 if number % 100 == 0 else 1)) for number in range(300)]
    for part in parts(writes):
        assert (await registry.transact([], part)).succeeded
    assert len(await values(registry, root)) == 300


async def test_a_list_larger_than_a_message_of_grpc_comes_whole_and_of_one_revision(
    registry: Registry, root: str
) -> None:
    """gRPC takes 4 MiB by default: 64 versions with 1,100 files each are more."""
    for number in range(20):
        await registry.transact([], [Put(f"{root}{number:03d}", bytes([number]) * 1_000_000)])
    before = await registry.list(root)
    assert [entry.value[:1] for entry in before.entries] == [bytes([number]) for number in range(20)]
    many = [Put(f"{root}many/{number:05d}", b"") for number in range(2500)]
    for part in parts(many):
        await registry.transact([], part)
    assert [entry.key for entry in (await registry.list(root + "many/")).entries] == [put.key for put in many]
