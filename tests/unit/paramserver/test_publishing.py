"""The master's side of a version's life, on a real pool and the registry in memory, with answers that get lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence, Sized
from pathlib import Path

import msgspec
import pytest

from paramserver import presiding
from paramserver.config import RelayConfig
from paramserver.core import view as keys
from paramserver.core.layout import TensorSpec
from paramserver.core.records import Ended, Member, Sealed, digest
from paramserver.drafts import Draft
from paramserver.membership import MemoryRegistry, MemoryStore
from paramserver.membership.registry import Guard, Outcome, Put, State, Write
from paramserver.pool import Pool
from paramserver.publishing import Publishing
from paramserver.relay import VERSIONS_KEPT, Relay
from paramserver.sealing import end_version
from paramserver.seat import Seat
from paramserver.store import Store
from protos.errors import Conflict, InvalidRequest, NotFound, OutOfCapacity, StaleEpoch, Unavailable, VersionLost
from tests.support.relays import until

MIB = 1 << 20
MODEL = "policy"


class LossyRegistry(MemoryRegistry):
    """Applies what it is told; `answers_lost` of the next transactions that write a key with `about` say nothing.

    While `hung` is there, those wait until it is set.
    """

    about = ""
    answers_lost = 0
    hung: asyncio.Event | None = None
    num_lists = 0

    async def list(self, prefix: str) -> State:
        self.num_lists += 1
        return await super().list(prefix)

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        if self.hung is not None and any(write.key.endswith(self.about) for write in writes):
            await self.hung.wait()
        outcome = await super().transact(guards, writes)
        if self.answers_lost and any(write.key.endswith(self.about) for write in writes):
            self.answers_lost -= 1
            raise Unavailable("the answer was lost")
        return outcome


class Host:
    """A relay without its ports: it publishes, shows and retires, with room for three versions of 4 MiB."""

    def __init__(self, store: MemoryStore, name: str, directory: Path) -> None:
        self.registry = LossyRegistry(store)
        self.seat = Seat(self.registry, Member(name, f"instance-{name}", "h:1", "h:2"), ttl_s=2.0)
        pool = Pool(directory / name, 13 * MIB)
        self.relay = Relay(
            RelayConfig(name, "", pool_dir=directory / name, retain=1, chunk_bytes=MIB), self.seat, Store(pool)
        )
        self.publishing = Publishing(self.relay)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.seat.take()
        work = (self.seat.keep(), self.seat.tell_holdings(), self.relay.follow(), self.relay.housekeep())
        self._tasks = [asyncio.create_task(task) for task in (*work, self.publishing.presiding.preside())]
        await until(self._sees_itself, "the relay sees itself")

    async def _sees_itself(self) -> bool:
        return self.seat.member.name in self.seat.view.members

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self.publishing.close()
        await self.relay.close()
        self.relay.store.close()

    async def announce(self, size: int = 4 * MIB - 100, *, wait_room_s: float = 0.0, run: str = "r") -> Draft:
        await self.publishing.locate(MODEL)
        with contextlib.suppress(Conflict):
            self.publishing.claim(MODEL, run, "test")
        tensors = [TensorSpec("w", "U8", (size,))]
        return await self.publishing.announce(
            MODEL, run, 1, tensors, file_bytes_max=1 << 30, metadata=None, wait_room_s=wait_room_s
        )

    async def commit(self, draft: Draft) -> None:
        await self.publishing.commit(MODEL, draft.manifest.version, draft.token, draft.snapshot.root())

    async def publish(self, size: int = 4 * MIB - 100) -> Draft:
        draft = await self.announce(size)
        write(draft)
        await self.commit(draft)
        await self.reaches(draft, "sealed")
        return draft

    async def reaches(self, draft: Draft, state: str) -> None:
        async def reached() -> bool:
            return draft.state == state

        await until(reached, f"version {draft.manifest.version} is {state}", timeout_s=5.0)

    async def memory_back(self, used_bytes: int = 0) -> None:
        async def back() -> bool:
            return self.relay.store.pool.statistics().used_bytes == used_bytes

        await until(back, f"only {used_bytes} bytes are in use", timeout_s=5.0)

    def shown(self) -> list[int]:
        return [record.version for record in self.relay.versions(MODEL)]


def write(draft: Draft) -> None:
    for index in draft.snapshot.missing():
        draft.snapshot.place(index)[:] = (
            bytes([draft.manifest.version % 251]) * draft.snapshot.chunks.chunk(index).length
        )
        draft.snapshot.present(index, digest(draft.snapshot.place(index)))


class World:
    """One registry and the hosts at it."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore(time.monotonic)
        self.directory = directory
        self.hosts: list[Host] = []

    async def host(self, name: str) -> Host:
        host = Host(self.store, name, self.directory)
        self.hosts.append(host)
        await host.start()
        return host

    def recorded(self, version: int, what: str) -> bytes | None:
        found = self.store.keys.get(f"{keys.ROOT}models/{MODEL}/versions/{version:016d}/{what}")
        return found.value if found else None

    async def ended(self, version: int) -> Ended:
        async def found() -> bytes | None:
            return self.recorded(version, "ended")

        return msgspec.json.decode(await until(found, f"the end of version {version} is recorded"), type=Ended)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    directory = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    found = World(directory)
    yield found
    for host in found.hosts:
        await host.close()
    shutil.rmtree(directory)


@pytest.fixture
async def host(world: World) -> Host:
    return await world.host("a")


# ---- committing


async def test_only_what_is_whole_and_as_the_publisher_says_is_committed(world: World, host: Host) -> None:
    draft = await host.announce()
    number, token = draft.manifest.version, draft.token
    with pytest.raises(Conflict, match="with this token"):
        await host.publishing.commit(MODEL, number, "another token", "")
    with pytest.raises(Conflict, match="4 chunks of version 1 of policy are not written, the first is 0"):
        await host.publishing.commit(MODEL, number, token, "")
    assert draft.state == "writing", "a commit too early costs nothing"
    write(draft)
    with pytest.raises(Conflict, match=r"the publisher computed root wrong, the relay [0-9a-f]{32}"):
        await host.publishing.commit(MODEL, number, token, "wrong")
    with pytest.raises(VersionLost, match="was given up: the publisher computed root wrong"):
        await host.publishing.commit(MODEL, number, token, draft.snapshot.root())
    assert "computed root wrong" in (await world.ended(1)).reason
    await host.memory_back()
    assert (host.shown(), world.recorded(1, "sealed")) == ([], None)


async def test_committing_twice_seals_once_and_afterwards_nothing_is_written(world: World, host: Host) -> None:
    draft = await host.publish()
    await host.commit(draft)
    with pytest.raises(Conflict, match="version 1 of policy is sealed: no more writing"):
        host.publishing.writable(MODEL, 1, draft.token)
    host.publishing.abort(MODEL, 1, draft.token, "too late")
    assert host.shown() == [1]
    assert world.recorded(1, "ended") is None


@pytest.mark.parametrize("how", ["abort", "publisher leaves", "announces again"])
async def test_what_is_given_up_ends_everywhere_and_its_memory_comes_back(world: World, host: Host, how: str) -> None:
    draft = await host.announce()
    draft.snapshot.present(0, b"x" * 16)
    match how:
        case "abort":
            host.publishing.abort(MODEL, 1, draft.token, "abort")
        case "publisher leaves":
            host.publishing.unclaim(MODEL, host.publishing._claims[MODEL][0])
        case "announces again":
            await host.publish()
    assert draft.state == "failed"
    assert {"abort": "abort", "publisher leaves": "left before it was committed"}.get(how, "again") in (
        await world.ended(1)
    ).reason
    await host.memory_back(0 if how != "announces again" else draft.manifest.size_bytes)
    assert (await host.publish()).manifest.version == (3 if how == "announces again" else 2), "numbers are never reused"


async def test_one_publisher_at_a_time_and_a_run_has_a_name(host: Host) -> None:
    await host.publishing.locate(MODEL)
    first = host.publishing.claim(MODEL, "one", "host:1")
    with pytest.raises(Conflict, match=r"publisher already: host:1 \(run one\).*end that one first"):
        host.publishing.claim(MODEL, "two", "host:2")
    with pytest.raises(InvalidRequest, match="name each life of a training job"):
        host.publishing.claim(MODEL, "", "host:2")
    host.publishing.unclaim(MODEL, first)
    second = host.publishing.claim(MODEL, "two", "host:2")
    host.publishing.unclaim(MODEL, first)
    assert host.publishing._claims[MODEL][0] is second, "an old claim that ends late takes nothing away"
    with pytest.raises(StaleEpoch, match=r"relay a is not master of critic \(wait for an election\)"):
        host.publishing.claim("critic", "one", "host:1")


async def test_a_version_that_is_given_up_while_its_commit_looks_at_it_is_not_committed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = await host.announce()
    write(draft)
    root, loop = draft.snapshot.root(), asyncio.get_running_loop()

    def slow_root() -> str:  # in a thread of its own
        loop.call_soon_threadsafe(host.publishing.abort, MODEL, 1, draft.token, "meanwhile")
        return root

    monkeypatch.setattr(draft.snapshot, "root", slow_root)
    with pytest.raises(VersionLost, match="was given up: meanwhile"):
        await host.publishing.commit(MODEL, 1, draft.token, root)
    assert draft.state == "failed"
    await host.memory_back()


# ---- a registry that is away, or does not answer


async def test_a_doubt_that_cannot_be_read_back_is_settled_when_the_registry_is_there_again(
    world: World, host: Host
) -> None:
    draft = await host.announce()
    write(draft)
    world.store.reachable = False
    await host.commit(draft)
    world.store.end_lease(host.seat._lease)
    host.seat.view.remove(keys.master_key(MODEL))  # the last that the watch told
    before = host.registry.num_lists

    async def read_back() -> bool:
        return host.registry.num_lists > before + 1

    await until(read_back, "reading back was tried, twice", timeout_s=5.0)
    assert draft.state == "committed", "nothing is known yet"
    world.store.reachable = True
    await host.reaches(draft, "failed")
    assert world.recorded(1, "sealed") is None


async def test_an_announcement_refused_late_takes_back_nothing_that_was_sealed(world: World, host: Host) -> None:
    draft = await host.publish()
    world.store.end_lease(host.seat._lease)  # and the watch has had no turn since
    with pytest.raises(StaleEpoch):
        await host.publishing._sealing._record(draft)  # an earlier try, whose answer took that long
    host.publishing._sealing.fail(draft, "too late")
    assert (draft.state, host.shown()) == ("sealed", [1])


async def test_what_was_sealed_is_never_recorded_as_aborted(world: World, host: Host) -> None:
    draft = await host.publish()
    manifest = draft.manifest
    await end_version(host.seat, MODEL, 1, manifest.epoch, Ended("aborted", "by mistake"))
    assert world.recorded(1, "ended") is None
    await end_version(host.seat, MODEL, 1, manifest.epoch, Ended("lost", "no verified holder is left"))
    assert await world.ended(1) == Ended("lost", "no verified holder is left")


async def test_what_is_read_because_an_announcement_was_refused_is_told_to_all(world: World, host: Host) -> None:
    draft = await host.publish()
    ended = msgspec.json.encode(Ended("aborted", "by an earlier master"))
    world.store.apply([Put(f"{keys.ROOT}models/{MODEL}/versions/{7:016d}/ended", ended)])
    await host.publishing._sealing._record(draft)  # refused: it is there already; the watch had no turn yet
    state = host.relay.of(MODEL).get(7)
    assert state is not None
    assert state.ended is not None


@pytest.mark.parametrize("about", ["/announced", "/plan", "/sealed"])
async def test_a_transaction_in_doubt_is_settled_by_reading_back(world: World, host: Host, about: str) -> None:
    await host.publishing.locate(MODEL)
    host.registry.about, host.registry.answers_lost = about, 2
    draft = await host.announce()
    write(draft)
    await host.commit(draft)
    await host.reaches(draft, "sealed")
    record = msgspec.json.decode(world.recorded(1, "sealed") or b"", type=Sealed)
    assert (record.root_digest, host.shown()) == (draft.root, [1])
    assert world.recorded(1, "ended") is None
    assert host.registry.answers_lost < 2, "an answer was lost"


async def test_a_seal_that_was_sent_and_not_answered_counts_as_in_doubt(world: World, host: Host) -> None:
    await host.publishing.locate(MODEL)
    host.registry.about, host.registry.answers_lost = "/sealed", 1 << 30
    draft = await host.announce()
    assert host.publishing.num_in_doubt == 0
    write(draft)
    await host.commit(draft)

    async def in_doubt() -> bool:
        return host.publishing.num_in_doubt == 1

    await until(in_doubt, "it is in doubt")
    host.registry.answers_lost = 0
    await host.reaches(draft, "sealed")
    assert host.publishing.num_in_doubt == 0


async def test_without_a_registry_nothing_seals_and_with_it_again_everything_does(world: World, host: Host) -> None:
    await host.publish()
    world.store.reachable = False
    drafts = []
    for _ in range(2):
        drafts.append(await host.announce())
        write(drafts[-1])
        await host.commit(drafts[-1])
    assert [draft.state for draft in drafts] == ["committed"] * 2
    assert host.publishing.num_in_doubt == 0, "nothing was sent"
    assert host.shown() == [1]
    with pytest.raises(OutOfCapacity, match="no room for version 4"):
        await host.announce()
    world.store.reachable = True
    for draft in drafts:
        await host.reaches(draft, "sealed")
    assert [bool(world.recorded(version, "sealed")) for version in (1, 2, 3)] == [True] * 3
    assert max(host.shown()) == 3


async def test_a_master_that_was_replaced_seals_nothing(world: World, host: Host) -> None:
    draft = await host.announce()
    assert draft.recording is not None
    await draft.recording
    write(draft)
    world.store.reachable = False
    await host.commit(draft)
    world.store.reachable = True
    world.store.end_lease(host.seat._lease)  # etcd took it for dead
    other = await world.host("b")
    await other.seat.want(MODEL)
    await host.reaches(draft, "failed")
    assert (world.recorded(1, "sealed"), host.shown()) == (None, [])
    await host.memory_back()

    async def master() -> Host | None:
        return next((h for h in (host, other) if h.seat.is_master(MODEL)), None)

    later = await (await until(master, "one of them is master again")).publish()
    assert later.manifest.version > 1


@pytest.mark.parametrize(
    "lost", ["", "/master", "/ended"], ids=["all answered", "election unanswered", "end unanswered"]
)
async def test_a_new_master_ends_what_the_old_one_left_open(world: World, host: Host, lost: str) -> None:
    await host.publish()
    await host.announce()
    other = await world.host("b")
    other.registry.about, other.registry.answers_lost = lost, bool(lost)
    await host.stop()
    world.store.end_lease(host.seat._lease)
    assert (await world.ended(2)) == Ended("aborted", "its master died before it was sealed")
    assert (await other.publish()).manifest.version == 3


async def test_a_plans_number_is_given_once_though_the_registry_has_not_heard_of_it(world: World, host: Host) -> None:
    await host.publish()
    known = host.seat.view.plans[MODEL]
    orders = {known.number: known.order}
    world.store.reachable = False
    for joined in ("b", "c"):
        host.seat.view.members[joined] = Member(joined, joined, "h:1", "h:2")
        plan = (await host.announce()).announced.plan
        assert orders.setdefault(plan.number, plan.order) == plan.order
        host.seat.view.plans[MODEL] = known  # a list tells what the registry has
        del host.seat.view.members[joined]
    assert len(orders) == 3


@pytest.mark.parametrize("grace_s", [0.3, 3600.0])
async def test_a_version_without_a_holder_is_lost_after_a_while_and_numbers_go_on(
    world: World, host: Host, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presiding, "LOST_GRACE_S", grace_s)
    await host.publish()
    other = await world.host("b")
    await host.stop()
    world.store.end_lease(host.seat._lease)

    async def noticed() -> bool:
        return bool(other.publishing.presiding._lost_since)

    await until(noticed, "the new master misses the holders", timeout_s=10.0)
    if grace_s < 60:
        assert (await world.ended(1)) == Ended("lost", "no verified holder is left")
        assert other.relay.of(MODEL).newest_sealed is None
    else:
        holder = keys.holder_key(MODEL, 1, "c")
        await other.registry.transact([], [Put(holder, b"")])  # it registers again
        await until(lambda: _gone(other.publishing.presiding._lost_since), "it is not missed any more")
        assert world.recorded(1, "ended") is None
    assert (await other.announce()).manifest.version == 2


async def _gone(what: Sized) -> bool:
    return not what


# ---- room


async def test_a_pinned_version_stays_and_its_memory_is_used_again_only_after_its_release(host: Host) -> None:
    first = await host.publish()
    pin, record = host.relay.acquire("lease", MODEL, 1, "engine-1", 60.0)
    place = Path(host.relay.path_of(MODEL, 1)) / "model.safetensors"
    content = place.read_bytes()
    later = [await host.publish() for _ in range(4)]
    assert host.shown() == [1, 5], "retention keeps the newest, the pin keeps the first"
    assert (place.read_bytes(), record.root_digest) == (content, first.root)
    blocker, _ = host.relay.acquire("newest", MODEL, None, "engine-2", 60.0)
    await host.publish()
    with pytest.raises(OutOfCapacity, match=r"version 1 \(.*\) pinned by engine-1, version 5 .* pinned by engine-2"):
        await host.announce()
    waiting = asyncio.create_task(host.announce(wait_room_s=10.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    host.relay.pins.release(pin.lease_id, time.monotonic())
    assert (await waiting).manifest.version == later[-1].manifest.version + 2
    assert host.shown() == [5, 6]
    assert not place.exists()
    host.relay.pins.release(blocker.lease_id, time.monotonic())


async def test_an_exact_version_is_acquired_or_refused_and_never_another(host: Host) -> None:
    """Engines on several hosts get one version: the newest of this host is no answer."""
    await host.publish()
    host.relay.acquire("keeps it", MODEL, 1, "engine-1", 60.0)
    await host.publish()
    pin, record = host.relay.acquire("again", MODEL, 1, "engine-2", 60.0)
    assert (pin.version, record.version) == (1, 1)
    assert host.relay.acquire("newest", MODEL, None, "engine-3", 60.0)[0].version == 2
    for absent in (3, 99):
        with pytest.raises(NotFound, match=f"no sealed version {absent} of policy.*held here: 1, 2"):
            host.relay.acquire("none", MODEL, absent, "engine-4", 60.0)


async def test_a_version_about_to_retire_is_either_held_or_refused(host: Host) -> None:
    """Each pin taken in the race stays good; nobody gets a pin on memory that went back."""
    held: list[tuple[int, Path]] = []
    for version in range(1, 9):
        await host.publish(MIB)
        with contextlib.suppress(NotFound):
            host.relay.acquire(str(version), MODEL, max(1, version - 1), "late", 60.0)
            held.append((max(1, version - 1), Path(host.relay.path_of(MODEL, max(1, version - 1)))))
        for number, path in held:
            assert (path / "model.safetensors").read_bytes()[-1000:] == bytes([number]) * 1000
    assert held
    assert sorted({number for number, _ in held} | {8}) == host.shown()


@pytest.mark.slow
async def test_the_registry_and_this_relay_remember_a_bounded_number_of_versions(world: World, host: Host) -> None:
    for _ in range(VERSIONS_KEPT + 20):
        draft = await host.publish(64)

    async def pruned() -> bool:
        return len([key for key in world.store.keys if "/versions/" in key]) <= 2 * VERSIONS_KEPT

    await until(pruned, "old records are deleted")
    assert world.recorded(1, "sealed") is None
    assert world.recorded(draft.manifest.version, "sealed") is not None
    assert len(host.relay.of(MODEL).items()) <= VERSIONS_KEPT + 1
    assert len(host.publishing._drafts) <= VERSIONS_KEPT


async def test_a_registry_that_hangs_holds_up_the_seal_and_never_the_trainer(host: Host) -> None:
    await host.publish()
    host.registry.about, host.registry.hung = "/announced", asyncio.Event()
    async with asyncio.timeout(1.0):  # nothing would ever answer
        draft = await host.announce()
        write(draft)
        await host.commit(draft)
    assert draft.state == "committed", "not sealed, and not called so"
    host.registry.hung.set()
    await host.reaches(draft, "sealed")
    assert draft.manifest.version in host.shown()
