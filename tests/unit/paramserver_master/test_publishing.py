"""The master's side of a version's life, on a real pool and the registry in memory, with answers that get lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paramserver.config import RelayConfig
from paramserver.core import view as keys
from paramserver.core.layout import Part, TensorSpec
from paramserver.core.records import (
    Announced,
    Ended,
    Epoch,
    FileSpec,
    Manifest,
    Member,
    Plan,
    Rank,
    Sealed,
    digest,
    version_root,
)
from paramserver.daemon.memory import find_again
from paramserver.daemon.operations import Operations
from paramserver.daemon.parts import RelayParts
from paramserver.daemon.service import RelayService
from paramserver.data import fetch as data_fetch
from paramserver.data.spill import Spill
from paramserver.master import duties, publications
from paramserver.master.drafts import Draft
from paramserver.master.rendezvous import Rendezvous
from paramserver.master.sealer import end_version
from paramserver.membership import MemoryRegistry, MemoryStore
from paramserver.membership.registry import Delete, Guard, Outcome, Put, State, Write
from paramserver.memory import stored
from paramserver.memory.pool import Pool
from paramserver.memory.store import Store
from paramserver.relay import removals
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.models import VERSIONS_KEPT
from paramserver.relay.recovery import Recovery
from protos.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    OutOfCapacity,
    Preparing,
    StaleEpoch,
    TooLarge,
    Unavailable,
    UnknownModel,
    VersionLost,
)
from protos.laminar.v1 import relay_pb2 as pb
from tests.support.relays import until

MIB = 1 << 20
MODEL = "policy"
DEADLINE_S = 60.0  # of what hangs


class LossyRegistry(MemoryRegistry):
    """Applies every transaction; the replies of the next `answers_lost` that write a key with `about` are lost.

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
        self.lease = MemberLease(self.registry, Member(name, f"instance-{name}", "h:1", "h:2"), ttl_s=2.0)
        self.left = stored.find(directory / name)  # by an earlier life
        self.dialled: Peer = SilentPeer()  # the peer that answers this relay's queries
        self.dialled.holds_nothing = True
        self.parts = RelayParts(
            RelayConfig(name, "", pool_dir=directory / name, retain=1, chunk_bytes=MIB),
            self.lease,
            Store(Pool(directory / name, 13 * MIB, keep=[path for one in self.left for path in one.paths]), self.left),
            dial=lambda _: self.dialled,  # type: ignore[arg-type, return-value]
        )
        self.relay, self.reconciler, self.models = self.parts.relay, self.parts.reconciler, self.parts.models
        self.pins, self.pool, self.fetches = self.parts.pins, self.parts.store.pool, self.parts.fetches
        self.publications, self.duties, self.claims = self.parts.publications, self.parts.duties, self.parts.claims
        self.drafts, self.sealer, self.elections = self.parts.drafts, self.parts.sealer, self.parts.elections
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.lease.take()
        work = (self.lease.keep(), self.lease.holdings.run(), self.relay.follow(), self.relay.housekeep())
        self._tasks = [asyncio.create_task(task) for task in (*work, self.duties.run())]
        await until(self._sees_itself, "the relay sees itself")

    async def _sees_itself(self) -> bool:
        return self.lease.member.name in self.lease.view.members

    async def recover(self) -> None:
        store, notices = self.parts.store, self.parts.notices
        found = find_again(store, self.left, notices)
        recovery = Recovery(self.lease.view, self.elections, self.models, self.reconciler, notices)
        await recovery.know_again(self.left, self.left)
        recovery.offer_again(found, store)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self.parts.close()
        self.parts.store.close()

    async def announce(
        self,
        size: int = 4 * MIB - 100,
        *,
        wait_room_s: float = 0.0,
        run: str = "r",
        labels: dict[str, str] | None = None,
    ) -> Draft:
        await self.duties.locate(MODEL)
        with contextlib.suppress(Conflict):
            self.claims.claim(MODEL, run, "test")
        tensors = [TensorSpec("w", "U8", (size,))]
        return await self.publications.announce(
            MODEL, run, 1, tensors, file_bytes_max=1 << 30, metadata=None, labels=labels, wait_room_s=wait_room_s
        )

    async def commit(self, draft: Draft) -> None:
        await self.publications.commit(MODEL, draft.manifest.version, draft.token, draft.snapshot.root())

    async def publish(self, size: int = 4 * MIB - 100, *, labels: dict[str, str] | None = None) -> Draft:
        draft = await self.announce(size, labels=labels)
        write(draft)
        await self.commit(draft)
        await self.reaches(draft, "sealed")
        return draft

    async def reaches(self, draft: Draft, state: str) -> None:
        async def reached() -> bool:
            return draft.state == state

        await until(reached, f"version {draft.manifest.version} is {state}")

    async def memory_back(self, used_bytes: int = 0) -> None:
        async def back() -> bool:
            return self.pool.statistics().used_bytes == used_bytes

        await until(back, f"only {used_bytes} bytes are in use")

    def shown(self) -> list[int]:
        return [record.version for record in self.models.shown(MODEL)]


def write(draft: Draft) -> None:
    for index in draft.snapshot.missing():
        draft.snapshot.place(index)[:] = (
            bytes([draft.manifest.version % 251]) * draft.snapshot.chunks.chunk(index).length
        )
        draft.snapshot.present(index, digest(draft.snapshot.place(index)))


class World:
    """One registry and the hosts at it."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore(lambda: 0.0)  # a lease ends when a test ends it, not while the machine stands still
        self.directory = directory
        self.hosts: list[Host] = []

    async def host(self, name: str) -> Host:
        host = Host(self.store, name, self.directory)
        self.hosts.append(host)
        await host.start()
        return host

    def replace(self) -> None:
        """An empty registry stands in the old one's place; its revisions go on, so that none means two things."""
        self.store.apply([Delete(key) for key in self.store.keys])
        self.store.leases.clear()

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


# ---- memory for a version


class SlowKernel:
    """Allocates memory only once the test permits it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self.go_on = threading.Event()
        self._allocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self._wait_and_allocate)

    def _wait_and_allocate(self, fd: int, offset: int, length: int) -> None:
        if length >= MIB:  # no record of a version
            self.num_calls += 1
            assert self.go_on.wait(60.0)
        self._allocate(fd, offset, length)


async def test_while_the_kernel_allocates_the_relay_goes_on_and_the_publisher_asks_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publications, "PREPARE_S", 0.2)
    kernel = SlowKernel(monkeypatch)
    for _ in range(2):
        with pytest.raises(Preparing, match=r"memory for the next version of policy is being allocated, 0 B of 4 MiB"):
            await host.announce()
    assert kernel.num_calls == 1, "another announcement waits for the same memory"
    assert host.pool.sweep() == 0
    with pytest.raises(OutOfCapacity, match="10 MiB wanted, 9 MiB available"):  # promised already
        host.pool.reserve([10 * MIB])
    kernel.go_on.set()
    monkeypatch.setattr(publications, "PREPARE_S", 60.0)
    draft = await host.announce()
    assert draft.manifest.version == 1
    write(draft)
    await host.commit(draft)
    await host.reaches(draft, "sealed")


async def test_what_was_allocated_for_a_publisher_that_left_is_there_for_the_next(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SlowKernel(monkeypatch)
    announcing = asyncio.create_task(host.announce())

    async def allocating() -> bool:
        return kernel.num_calls == 1

    await until(allocating, "memory is being allocated")
    announcing.cancel()
    await asyncio.wait([announcing])
    for claim in list(host.claims._claims[MODEL].values()):
        host.claims.release(MODEL, claim)
    kernel.go_on.set()
    await host.memory_back()
    monkeypatch.setattr(host.pool, "expect", lambda *_: None)  # nothing is cut in advance
    assert (await host.announce()).manifest.version == 1
    assert kernel.num_calls == 1


async def test_a_publisher_that_left_while_memory_was_allocated_begins_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SlowKernel(monkeypatch)
    announcing = asyncio.create_task(host.announce())

    async def allocating() -> bool:
        return kernel.num_calls == 1

    await until(allocating, "memory is being allocated")
    host.claims.release(MODEL, host.claims._claims[MODEL][0])
    kernel.go_on.set()
    with pytest.raises(StaleEpoch, match="rank 0 of run r left before its version of policy could begin"):
        await announcing
    await host.memory_back()


async def test_the_next_version_finds_files_of_its_sizes_cut_in_advance(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    await host.publish()
    pool = host.pool

    async def cut() -> bool:
        return not pool.uncut and sum(file.size_bytes for file in pool._free) > 0

    await until(cut, "the pool is cut")
    kernel = SlowKernel(monkeypatch)
    assert (await host.announce()).manifest.version == 2
    assert kernel.num_calls == 0


async def test_memory_that_somebody_is_inside_of_comes_back_when_they_leave(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs while a version is spilled cannot be broken off; what it holds must not be lost for good."""
    monkeypatch.setattr(removals, "RETRY_S", 0.05)
    draft = await host.announce()
    close = draft.snapshot.close
    monkeypatch.setattr(draft.snapshot, "close", lambda why: close(why, 0.05))
    with draft.snapshot.reading():
        host.publications.abort(MODEL, 1, draft.token, "gone")

        async def refused() -> bool:
            return draft.snapshot.leaving and not host.reconciler._removals.num_running

        await until(refused, "giving it back was refused")
        assert host.pool.statistics().used_bytes == draft.manifest.size_bytes
    await host.memory_back()


# ---- models that come and go


def unclaim(host: Host) -> None:
    for claim in list(host.claims._claims[MODEL].values()):
        host.claims.release(MODEL, claim)


async def forgotten(host: Host) -> None:
    async def gone() -> bool:
        return MODEL not in host.lease.view.models and MODEL not in host.models

    await until(gone, "nobody knows the model any more")


async def test_a_model_that_is_dropped_ends_with_all_its_versions_and_its_numbers_go_on(
    world: World, host: Host
) -> None:
    await host.publish()
    watched = host.parts.watchers.watch(MODEL)
    assert [(await anext(watched)).kind] == ["available"]
    with pytest.raises(Conflict, match=r"test publishes to policy \(run r\) \(end that run first"):
        await host.duties.drop(MODEL)
    unclaim(host)
    assert await host.duties.drop(MODEL) == [1]
    assert (await anext(watched)).kind == "lost"
    await host.memory_back()
    await forgotten(host)
    assert [key for key in world.store.keys if MODEL in key] == [keys.dropped_key(MODEL)]
    assert (await host.publish()).manifest.version == 2, "versions never go back"
    assert host.shown() == [2]


async def test_a_relay_that_missed_the_drop_gives_up_what_was_dropped_and_nothing_else(host: Host) -> None:
    host.models.of(MODEL).retain = 2
    await host.publish()
    second = await host.publish()
    assert host.shown() == [1, 2]
    await host.registry.transact([], [Put(keys.dropped_key(MODEL), b"2")])
    await host.memory_back(second.manifest.size_bytes)
    assert host.shown() == [2]
    await host.relay.refresh()
    assert host.shown() == [2], "the record of the first is still there, and counts for nothing"


async def test_a_registry_that_is_busy_for_a_moment_costs_the_first_publish_nothing(world: World, host: Host) -> None:
    host.registry.about, host.registry.answers_lost = "/master", 1
    assert await host.duties.locate(MODEL) == "a"
    assert host.registry.answers_lost == 0, "an answer was lost"


async def test_there_are_only_so_many_models(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duties, "MODELS_MAX", 2)
    for model in ("one", "two", "one"):
        await host.duties.locate(model)
    with pytest.raises(OutOfCapacity, match=r"three would be more than 2 models \(drop one: `paramserver drop"):
        await host.duties.locate("three")


async def test_who_may_not_publish_begins_no_model_by_asking_for_its_master(world: World, host: Host) -> None:
    await host.publish()
    assert await host.duties.locate(MODEL, begins=False) == "a"
    with pytest.raises(
        UnknownModel,
        match=r"\(known: policy; only a caller with the role trainer or admin begins one\)",
    ):
        await host.duties.locate("typo", begins=False)
    assert not [key for key in world.store.keys if "typo" in key]


async def test_a_master_key_that_nobody_can_read_is_named_to_whoever_wants_the_master(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "LOCATE_S", 0.5)
    await host.registry.transact([], [Put(keys.master_key(MODEL), b"junk")])
    why = r"its key /laminar/models/policy/master in the registry is no master's record \(.+\): delete it"
    with pytest.raises(Unavailable, match=f"no relay became master of policy in 0.5 s: {why}"):
        await host.duties.locate(MODEL)
    status = await answer(host, "Status", pb.StatusRequest())
    assert re.fullmatch(f"policy has no master: {why}, unless a newer relay wrote it", status.trouble)
    await host.registry.transact([], [Delete(keys.master_key(MODEL))])

    async def led() -> bool:
        return host.elections.is_master(MODEL)

    await until(led, "an election")
    assert not (await answer(host, "Status", pb.StatusRequest())).trouble


async def test_a_model_of_which_nothing_was_ever_published_is_forgotten(
    world: World, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "UNUSED_S", 0.2)
    await host.duties.locate("typo")
    await host.publish()

    async def gone() -> bool:
        return "typo" not in host.lease.view.models and "typo" not in host.models

    await until(gone, "it is forgotten")
    assert not [key for key in world.store.keys if "typo" in key]
    assert host.shown() == [1]


async def test_a_model_to_which_nothing_happens_costs_no_look(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    await host.publish()

    async def settled() -> bool:
        return host.relay._is_settled(MODEL)

    await until(settled, "nothing is left to do")
    looks: list[str] = []
    monkeypatch.setattr(host.reconciler, "reconcile", looks.append)
    num_checks = 0

    def three_rounds_later() -> bool:
        nonlocal num_checks
        num_checks += 1  # once now, then after each round of housekeeping
        return num_checks > 3

    await host.parts.changes.wait_until(three_rounds_later)
    assert looks == []


async def test_who_finds_no_room_is_told_what_holds_it_and_of_pins_that_exist(host: Host) -> None:
    await host.publish(size=6 * MIB)
    await host.pins.acquire("lease", MODEL, 1, "engine-7", 60.0)
    await host.duties.locate("critic")
    host.claims.claim("critic", "r", "test")
    tensors = [TensorSpec("w", "U8", (9 * MIB,))]

    async def announce() -> Draft:
        return await host.publications.announce(
            "critic", "r", 1, tensors, file_bytes_max=1 << 30, metadata=None, wait_room_s=0.0
        )

    with pytest.raises(OutOfCapacity) as refused:
        await announce()
    assert "held: policy version 1 (6 MiB) pinned by engine-7; quarantined: 0 B" in refused.value.message
    assert refused.value.hint.startswith(
        "release pins, or drop a model that nobody uses (`paramserver drop --model pol"
    )
    await host.pins.release("lease")
    with pytest.raises(OutOfCapacity) as refused:
        await announce()
    assert "pin" not in f"{refused.value}"


# ---- committing


async def test_only_what_is_whole_and_as_the_publisher_says_is_committed(world: World, host: Host) -> None:
    draft = await host.announce()
    number, token = draft.manifest.version, draft.token
    for wrong in ("another token", "ein Schlüssel"):
        with pytest.raises(Conflict, match="with this token"):
            await host.publications.commit(MODEL, number, wrong, "")
    with pytest.raises(Conflict, match="4 chunks of version 1 of policy are not written, the first is 0"):
        await host.publications.commit(MODEL, number, token, "")
    assert draft.state == "writing", "a commit too early costs nothing"
    write(draft)
    with pytest.raises(Conflict, match=r"the publisher computed root wrong, the relay [0-9a-f]{32}"):
        await host.publications.commit(MODEL, number, token, "wrong")
    with pytest.raises(VersionLost, match="was given up: the publisher computed root wrong"):
        await host.publications.commit(MODEL, number, token, draft.snapshot.root())
    assert "computed root wrong" in (await world.ended(1)).reason
    await host.memory_back()
    assert (host.shown(), world.recorded(1, "sealed")) == ([], None)


async def test_committing_twice_seals_once_and_afterwards_nothing_is_written(world: World, host: Host) -> None:
    draft = await host.publish()
    await host.commit(draft)
    with pytest.raises(Conflict, match="version 1 of policy is sealed: no more writing"):
        host.drafts.writable(MODEL, 1, draft.token)
    host.publications.abort(MODEL, 1, draft.token, "too late")
    assert host.shown() == [1]
    assert world.recorded(1, "ended") is None


@pytest.mark.parametrize("how", ["abort", "publisher leaves", "announces again"])
async def test_what_is_given_up_ends_everywhere_and_its_memory_comes_back(world: World, host: Host, how: str) -> None:
    draft = await host.announce()
    draft.snapshot.present(0, b"x" * 16)
    match how:
        case "abort":
            host.publications.abort(MODEL, 1, draft.token, "abort")
        case "publisher leaves":
            host.claims.release(MODEL, host.claims._claims[MODEL][0])
        case "announces again":
            await host.publish()
    assert draft.state == "failed"
    assert {"abort": "abort", "publisher leaves": "left before it was committed"}.get(how, "again") in (
        await world.ended(1)
    ).reason
    await host.memory_back(0 if how != "announces again" else draft.manifest.size_bytes)
    assert (await host.publish()).manifest.version == (3 if how == "announces again" else 2), "numbers are never reused"


async def test_one_publisher_at_a_time_and_a_run_has_a_name(host: Host) -> None:
    await host.duties.locate(MODEL)
    first = host.claims.claim(MODEL, "one", "host:1")
    with pytest.raises(Conflict, match=r"publisher already: host:1 \(run one\).*end that one first"):
        host.claims.claim(MODEL, "two", "host:2")
    with pytest.raises(InvalidRequest, match="a run is named in 0 characters"):
        host.claims.claim(MODEL, "", "host:2")
    host.claims.release(MODEL, first)
    second = host.claims.claim(MODEL, "two", "host:2")
    host.claims.release(MODEL, first)
    assert host.claims._claims[MODEL][0] is second, "an old claim that ends late takes nothing away"
    with pytest.raises(StaleEpoch, match=r"relay a is not master of critic \(wait for an election\)"):
        host.claims.claim("critic", "one", "host:1")


async def test_a_claim_ends_with_the_epoch_in_which_it_was_made(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease ran out, and this relay was elected again before the publisher's stream noticed."""
    await host.duties.locate(MODEL)
    first = host.claims.claim(MODEL, "one", "host:1")
    draft = await host.announce(run="one")
    before = host.elections.epoch(MODEL)
    assert before is not None
    later = Epoch(before.store_id, before.revision + 1)
    monkeypatch.setattr(host.elections, "epoch", lambda model: later)
    assert not host.claims.holds(MODEL, first)
    second = host.claims.claim(MODEL, "two", "host:2")
    assert host.claims.holds(MODEL, second)
    host.claims.release(MODEL, first)
    assert host.claims.holds(MODEL, second), "an old claim that ends late takes nothing away"
    assert draft.state == "failed"


async def test_a_client_whose_connection_broke_unheard_takes_its_own_claim_over_at_once(host: Host) -> None:
    """The relay notices the break a minute later, or never; until then the publisher's own claim would refuse it."""
    await host.duties.locate(MODEL)
    first = host.claims.claim(MODEL, "one", "host:1", client="x")
    draft = await host.announce(run="one")
    again = host.claims.claim(MODEL, "one", "host:1", client="x")
    assert not host.claims.holds(MODEL, first)
    assert draft.state == "failed", "of the broken connection's version nothing can come"
    later = await host.announce(run="one")
    host.claims.release(MODEL, first)
    assert later.state == "writing", "the old stream's end costs the new claim nothing"
    for run, client in (("one", "y"), ("two", "x"), ("one", "")):
        with pytest.raises(Conflict, match="publisher already"):
            host.claims.claim(MODEL, run, "host:1", client=client)
    host.claims.release(MODEL, again)
    assert later.state == "failed"


async def announce_rank(host: Host, rank: int, wait_room_s: float, labels: dict[str, str] | None = None) -> Draft:
    """Of a run of two."""
    host.claims.claim(MODEL, "job", f"rank{rank}", Rank(rank, 2))
    tensors = [TensorSpec(f"w{rank}", "U8", (MIB,))]
    return await host.publications.announce(
        MODEL,
        "job",
        1,
        tensors,
        file_bytes_max=1 << 30,
        metadata=None,
        labels=labels,
        wait_room_s=wait_room_s,
        rank=Rank(rank, 2),
    )


async def test_a_rank_that_leaves_while_all_wait_for_room_ends_the_version_for_the_others(host: Host) -> None:
    """It will write nothing: a version that began without it would be neither sealed nor lost."""
    await host.duties.locate(MODEL)
    pool = host.pool
    taken = pool.take([12 * MIB])  # no room
    first = asyncio.create_task(announce_rank(host, 0, DEADLINE_S))
    await asyncio.sleep(0)  # it is there before the last, who begins
    last = asyncio.create_task(announce_rank(host, 1, DEADLINE_S))
    await asyncio.sleep(0)
    host.claims.release(MODEL, host.claims._claims[MODEL][0])
    first.cancel()
    await asyncio.wait([first])
    with pytest.raises(Unavailable, match="rank 0 left step 1 of run job while it waited for room"):
        await announce_rank(host, 0, DEADLINE_S)
    pool.give_back(taken)
    with pytest.raises(Unavailable, match=r"rank 0 of 2 left while step 1 of run job waited for room"):
        await asyncio.wait_for(last, DEADLINE_S)
    assert not host.drafts.writing(MODEL)
    await host.memory_back()


@pytest.mark.slow
@pytest.mark.parametrize("patient", [0, 1])
async def test_the_least_patient_rank_decides_how_long_room_is_waited_for(host: Host, patient: int) -> None:
    """Its call ends then, which ends the version for all; and it is not to matter which rank comes last."""
    await host.duties.locate(MODEL)
    taken = host.pool.take([12 * MIB])  # no room
    both = [asyncio.create_task(announce_rank(host, rank, 600.0 if rank == patient else 2.0)) for rank in (0, 1)]
    for outcome in await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), DEADLINE_S):
        assert isinstance(outcome, OutOfCapacity), outcome
    host.pool.give_back(taken)
    await host.memory_back()


# ---- labels


async def test_labels_are_sealed_with_their_version_and_brought_along_into_another_registry(
    world: World, host: Host
) -> None:
    draft = await host.publish(labels={"note": "lower rate", "of_tomorrow": "x"})
    for what in ("announced", "sealed"):
        assert msgspec.json.decode(world.recorded(1, what) or b"")["labels"] == draft.announced.labels
    (reply,) = (await answer(host, "Versions", pb.VersionsRequest(model=MODEL))).versions
    (model,) = (await answer(host, "Status", pb.StatusRequest())).models
    assert [*model.sealed] == [reply]
    assert dict(reply.labels) == {"note": "lower rate", "of_tomorrow": "x"}
    record = world.recorded(1, "sealed")
    world.replace()
    other = await world.host("b")
    await other.duties.locate(MODEL)
    await Operations(host.parts).adopt()

    async def brought() -> bool:
        return world.recorded(1, "sealed") == record

    await until(brought, "it is recorded there as it was")


async def answer(host: Host, call: str, request: Any) -> Any:
    service = RelayService(host.parts, data_address="h:2", publish_socket=None)
    return await getattr(service, call)(request, None)


async def test_labels_that_no_version_may_have_are_refused_by_name_and_begin_nothing(host: Host) -> None:
    for labels, words in (({"note": "x" * 257}, "note has 257 characters"), ({"Note": "x"}, "'Note' cannot name")):
        with pytest.raises(InvalidRequest, match=words):
            await host.announce(labels=labels)
    assert len(host.drafts) == 0
    assert (await host.publish(labels={"note": "x" * 256})).manifest.version == 1


@pytest.mark.parametrize("last", [0, 1])
async def test_where_ranks_differ_in_a_label_the_lowest_that_gives_it_stands(host: Host, last: int) -> None:
    await host.duties.locate(MODEL)
    given = [{"note": "of rank 0"}, {"note": "of rank 1", "of_tomorrow": "x"}]
    ranks = [asyncio.create_task(announce_rank(host, rank, DEADLINE_S, given[rank])) for rank in (1 - last, last)]
    draft, _ = await asyncio.wait_for(asyncio.gather(*ranks), DEADLINE_S)
    assert draft.announced.labels == {"note": "of rank 0", "of_tomorrow": "x"}


async def test_a_version_that_is_announced_again_at_the_next_master_has_its_labels(world: World, host: Host) -> None:
    await host.announce(labels={"note": "lower rate"})
    other = await world.host("b")
    await host.stop()
    world.store.end_lease(host.lease.lease_id)
    await world.ended(1)
    draft = await other.publish(labels={"note": "lower rate"})
    assert draft.manifest.version == 2
    assert [(one.version, one.labels) for one in other.models.shown(MODEL)] == [(2, {"note": "lower rate"})]


async def test_ranks_that_waited_for_one_are_all_told_of_that_one(host: Host) -> None:
    """Whose own wait is over later would name those that gave up before it: the log would accuse the wrong hosts."""

    async def attends(rendezvous: Rendezvous, rank: int, timeout_s: float) -> Draft:
        async def begin(_: Sequence[Part]) -> Draft:
            raise AssertionError("rank 2 is not there")

        return await rendezvous.join(rank, Part([]), begin, host.sealer.fail, timeout_s)

    rendezvous = Rendezvous(3, "step 1")
    waiting = [attends(rendezvous, 0, 0.1), attends(rendezvous, 1, DEADLINE_S)]
    for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), DEADLINE_S):
        assert isinstance(error, Unavailable)
        assert error.message == "rank 2 of 3 did not announce step 1 in 0.1 s"
    assert rendezvous.over


async def test_ranks_that_wait_for_room_are_not_said_to_be_missing(host: Host) -> None:
    await host.duties.locate(MODEL)
    host.pool.take([12 * MIB])
    announcing = [announce_rank(host, rank, 0.3) for rank in range(2)]
    for error in await asyncio.gather(*announcing, return_exceptions=True):
        assert isinstance(error, OutOfCapacity), error
        assert "no room for version 1" in str(error)


async def test_the_first_version_is_warned_of_a_pool_without_room_for_the_second(host: Host) -> None:
    assert (await host.announce(6 * MIB)).warnings == ()
    (warning,) = (await host.announce(7 * MIB)).warnings
    assert warning.startswith("two versions of this size take 14 MiB, the pool has 13 MiB: the next finds no room")
    assert warning.endswith("--pool-bytes of at least 28 MiB")


async def test_a_publisher_hears_that_its_version_before_came_to_nothing(host: Host) -> None:
    """`publish` returned at copied; what became of the version, only its ticket would show."""
    draft = await host.announce()
    write(draft)
    host.publications.abort(MODEL, 1, draft.token, "its master lost the registry")
    await host.reaches(draft, "failed")
    assert (await host.announce()).warnings == (
        "the run's version before, 1, came to nothing: its master lost the registry",
    )
    host.claims.release(MODEL, host.claims._claims[MODEL][0])
    assert (await host.announce(run="another")).warnings == ()


async def test_a_version_that_is_given_up_while_its_commit_looks_at_it_is_not_committed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = await host.announce()
    write(draft)
    root, loop = draft.snapshot.root(), asyncio.get_running_loop()

    def slow_root() -> str:  # in a thread of its own
        loop.call_soon_threadsafe(host.publications.abort, MODEL, 1, draft.token, "meanwhile")
        return root

    monkeypatch.setattr(draft.snapshot, "root", slow_root)
    with pytest.raises(VersionLost, match="was given up: meanwhile"):
        await host.publications.commit(MODEL, 1, draft.token, root)
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
    world.store.end_lease(host.lease.lease_id)
    host.lease.view.remove(keys.master_key(MODEL))  # the last event of the watch
    before = host.registry.num_lists

    async def read_back() -> bool:
        return host.registry.num_lists > before + 1

    await until(read_back, "reading back was tried, twice")
    assert draft.state == "committed", "nothing is known yet"
    world.store.reachable = True
    await host.reaches(draft, "failed")
    assert world.recorded(1, "sealed") is None


async def test_an_announcement_refused_late_takes_back_nothing_that_was_sealed(world: World, host: Host) -> None:
    draft = await host.publish()
    world.store.end_lease(host.lease.lease_id)  # and the watch has had no turn since
    with pytest.raises(StaleEpoch):
        await host.sealer._record(draft)  # an earlier try, whose answer took that long
    host.sealer.fail(draft, "too late")
    assert (draft.state, host.shown()) == ("sealed", [1])


async def test_what_was_sealed_is_never_recorded_as_aborted(world: World, host: Host) -> None:
    draft = await host.publish()
    manifest = draft.manifest
    await end_version(host.elections, MODEL, 1, manifest.epoch, Ended("aborted", "by mistake"))
    assert world.recorded(1, "ended") is None
    await end_version(host.elections, MODEL, 1, manifest.epoch, Ended("lost", "no verified holder is left"))
    assert await world.ended(1) == Ended("lost", "no verified holder is left")


async def test_what_is_read_because_an_announcement_was_refused_is_told_to_all(world: World, host: Host) -> None:
    draft = await host.publish()
    ended = msgspec.json.encode(Ended("aborted", "by an earlier master"))
    world.store.apply([Put(f"{keys.ROOT}models/{MODEL}/versions/{7:016d}/ended", ended)])
    await host.sealer._record(draft)  # refused: it is there already; the watch had no turn yet
    state = host.models.of(MODEL).get(7)
    assert state is not None
    assert state.ended is not None


@pytest.mark.parametrize("about", ["/announced", "/plan", "/sealed"])
async def test_a_transaction_in_doubt_is_settled_by_reading_back(world: World, host: Host, about: str) -> None:
    await host.duties.locate(MODEL)
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
    await host.duties.locate(MODEL)
    host.registry.about, host.registry.answers_lost = "/sealed", 1 << 30
    draft = await host.announce()
    assert host.drafts.num_in_doubt() == 0
    write(draft)
    await host.commit(draft)

    async def in_doubt() -> bool:
        return host.drafts.num_in_doubt() == 1

    await until(in_doubt, "it is in doubt")
    host.registry.answers_lost = 0
    await host.reaches(draft, "sealed")
    assert host.drafts.num_in_doubt() == 0


async def test_without_a_registry_nothing_seals_and_with_it_again_everything_does(world: World, host: Host) -> None:
    await host.publish()
    world.store.reachable = False
    drafts = []
    for _ in range(2):
        drafts.append(await host.announce())
        write(drafts[-1])
        await host.commit(drafts[-1])
    assert [draft.state for draft in drafts] == ["committed"] * 2
    assert host.drafts.num_in_doubt() == 0, "nothing was sent"
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
    world.store.end_lease(host.lease.lease_id)  # etcd took it for dead
    other = await world.host("b")
    await other.elections.want(MODEL)
    await host.reaches(draft, "failed")
    assert (world.recorded(1, "sealed"), host.shown()) == (None, [])
    await host.memory_back()

    async def master() -> Host | None:
        return next((h for h in (host, other) if h.elections.is_master(MODEL)), None)

    later = await (await until(master, "one of them is master again")).publish()
    assert later.manifest.version > 1


async def test_a_relay_brings_its_versions_along_into_a_registry_where_another_is_master(
    world: World, host: Host
) -> None:
    await host.publish()
    record, announced = world.recorded(1, "sealed"), world.recorded(1, "announced")
    world.replace()
    other = await world.host("b")  # the first there, and holds nothing
    await other.duties.locate(MODEL)
    host.registry.about, host.registry.answers_lost = "/sealed", 1
    await Operations(host.parts).adopt()

    async def brought() -> bool:
        return (world.recorded(1, "sealed"), world.recorded(1, "announced")) == (record, announced)

    await until(brought, "it is recorded there as it was")

    async def seen() -> bool:
        state = other.models.of(MODEL).get(1)
        return state is not None and state.holders == {"a"}

    await until(seen, "the master knows of it, and who holds it")
    assert other.elections.is_master(MODEL)
    assert host.shown() == [1]


@pytest.mark.parametrize("step", [1, 7], ids=["the same", "another of its number"])
async def test_what_is_kept_aside_counts_when_another_relay_brings_its_version_along_or_makes_way(
    world: World, host: Host, step: int
) -> None:
    await host.publish()
    old = host.lease.view.store_id
    what = {kind: world.recorded(1, kind) or b"" for kind in ("announced", "sealed")}
    announced = msgspec.json.decode(what["announced"], type=Announced)
    manifest = msgspec.structs.replace(announced.manifest, step=step)
    what["announced"] = msgspec.json.encode(msgspec.structs.replace(announced, manifest=manifest))
    await host.close()
    world.hosts.remove(host)
    world.replace()
    again = await world.host("a")
    await again.recover()
    assert again.models.of(MODEL).shown() == []
    for refused in (again.parts.store.check, again.parts.store.open):
        with pytest.raises(OutOfCapacity, match="another version 1 of policy is still on its way out"):
            refused(manifest)
    brought: list[Write] = [Put(keys.version_key(MODEL, 1, kind), value) for kind, value in what.items()]
    world.store.apply([Put(keys.continues_key(old), b""), *brought])
    if step == 1:

        async def shown() -> bool:
            return again.shown() == [1]

        await until(shown, "it is offered again")
        _, _, path = await again.pins.acquire("lease", MODEL, 1, "test", 60.0)
        assert path == str(again.pool.directory / "snapshots" / MODEL / "v00000001")
        assert again.pool.statistics().used_bytes == manifest.size_bytes
    else:

        async def fetching() -> bool:
            snapshot = again.parts.store.get(MODEL, 1)
            return snapshot is not None and snapshot.manifest == manifest

        await until(fetching, "the registry's is fetched")
        assert not (again.pool.directory / "snapshots" / MODEL / "v00000001").exists()
    again.fetches.cancel_all()


async def test_what_a_restored_registry_has_gone_on_without_is_kept_aside_and_named(world: World, host: Host) -> None:
    await host.publish()
    backup: list[Write] = [Put(key, entry.value) for key, entry in world.store.keys.items() if not entry.lease]
    for _ in (2, 3):
        await host.publish()
    await host.close()
    world.hosts.remove(host)
    world.replace()
    world.store.apply(backup)
    other = await world.host("b")  # holds nothing, and is there first
    assert (await other.publish()).manifest.version == 2
    again = await world.host("a")
    await again.recover()
    [notice] = again.parts.notices.all()
    assert notice.text == (
        "the registry went back (was it restored from a backup?) and has gone on without version 3 of policy, sealed "
        "before and found here, now kept aside, since readers would go back to other weights, and the next number "
        "is 1003 at least"
    )
    assert (again.pool.directory / "snapshots" / MODEL / "v00000003").exists()
    assert 3 not in again.shown()

    async def skipped() -> bool:
        return other.models.of(MODEL).next_number == 1003

    await until(skipped, "the other relay gives none of its numbers")
    again.fetches.cancel_all()


async def test_another_registrys_version_of_a_number_on_disk_is_not_reported(
    world: World, host: Host, tmp_path: Path
) -> None:
    def manifest(version: int, store_id: str) -> Manifest:
        return Manifest(MODEL, version, "r", 1, Epoch(store_id, 1), (FileSpec("w", 4),))

    for of in (manifest(1, "mine"), manifest(2, "other")):
        digests = (digest(b"abcd"),)
        kept = stored.StoredSnapshot(tmp_path, of, Sealed.of(of, version_root(of, digests), 1.0, {}), digests)
        stored.copy_out([memoryview(b"abcd")], kept, contextlib.nullcontext)
    host.reconciler._spill = Spill(tmp_path, retain=2, notices=host.parts.notices)
    records = [Announced(of, Plan(of.epoch, 0, ())) for of in (manifest(1, "mine"), manifest(2, "mine"))]
    world.store.apply(
        [
            Put(keys.version_key(MODEL, record.manifest.version, "announced"), msgspec.json.encode(record))
            for record in records
        ]
    )

    async def reported() -> bool:
        return keys.spilled_key(MODEL, 1, "a") in world.store.keys

    await until(reported, "what it has of this registry is known")
    assert keys.spilled_key(MODEL, 2, "a") not in world.store.keys
    host.reconciler._spill.close()


async def test_what_a_master_deletes_after_it_was_brought_along_stays_deleted(world: World, host: Host) -> None:
    await host.publish()
    world.replace()
    await Operations(host.parts).adopt()

    async def brought() -> bytes | None:
        return world.recorded(1, "sealed")

    await until(brought, "it is recorded")
    world.store.apply([Delete(keys.version_key(MODEL, 1, what)) for what in ("announced", "sealed")])
    await host.relay.refresh()
    for _ in range(3):
        await host.duties._adopt_versions()
    assert world.recorded(1, "sealed") is None


async def test_a_lone_relay_that_lost_its_lease_blames_no_other(world: World, host: Host) -> None:
    host.registry.about, host.registry.hung = "/announced", asyncio.Event()
    draft = await host.announce()
    world.store.end_lease(host.lease.lease_id)

    async def deposed() -> bool:
        return not host.elections.is_master(MODEL)

    await until(deposed, "it sees that its election is over")
    host.registry.hung.set()
    await host.reaches(draft, "failed")
    assert draft.reason == "this relay lost its election: its lease in the registry ran out"


@pytest.mark.parametrize(
    "lost", ["", "/master", "/ended"], ids=["all answered", "election unanswered", "end unanswered"]
)
async def test_a_new_master_ends_what_the_old_one_left_open(world: World, host: Host, lost: str) -> None:
    await host.publish()
    await host.announce()
    other = await world.host("b")
    other.registry.about, other.registry.answers_lost = lost, bool(lost)
    await host.stop()
    world.store.end_lease(host.lease.lease_id)
    assert (await world.ended(2)) == Ended("aborted", "its master died before it was sealed")
    assert (await other.publish()).manifest.version == 3


async def test_what_a_master_gives_up_while_the_registry_is_away_ends_when_it_is_back(world: World, host: Host) -> None:
    """It stays master, and no other comes to end it; the other relays fetch until they hear of the end."""
    draft = await host.announce()
    assert draft.recording is not None
    await draft.recording
    world.store.reachable = False
    host.publications.abort(MODEL, 1, draft.token, "the trainer said so")
    await asyncio.sleep(0)
    world.store.reachable = True
    assert (await world.ended(1)) == Ended("aborted", "the trainer said so")


async def test_what_a_master_gave_up_without_a_lease_it_ends_when_it_is_elected_again(world: World, host: Host) -> None:
    draft = await host.announce()
    assert draft.recording is not None
    await draft.recording
    world.store.end_lease(host.lease.lease_id)  # and the watch has had no turn since
    host.publications.abort(MODEL, 1, draft.token, "the trainer said so")
    assert (await world.ended(1)) == Ended("aborted", "the trainer said so")


async def test_a_run_and_its_publisher_are_named_in_few_words(host: Host) -> None:
    await host.duties.locate(MODEL)
    for run, publisher in (("r" * 257, "p"), ("r", "p" * 257)):
        with pytest.raises(InvalidRequest, match="257 characters"):
            host.claims.claim(MODEL, run, publisher)


async def test_a_reason_of_any_length_ends_the_version_for_everybody(world: World, host: Host) -> None:
    draft = await host.announce()
    assert draft.recording is not None
    await draft.recording
    host.publications.abort(MODEL, 1, draft.token, "no " * 1_000_000)
    assert len((await world.ended(1)).reason) <= 1000


async def test_an_above_that_no_number_fits_above_is_refused(host: Host) -> None:
    operating = Operations(host.parts)
    with pytest.raises(InvalidRequest, match="above"):
        await operating.continue_store("earlier", MODEL, (1 << 63) - 1)
    assert (await host.publish()).manifest.version == 1


async def test_a_drain_that_the_registry_did_not_hear_of_is_told_again(
    world: World, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the chain would go through a relay that takes nothing any more."""
    operating, member = Operations(host.parts), keys.member_key("a")

    async def away(guards: object, writes: Sequence[Write]) -> Outcome:
        raise Unavailable("the registry is away")

    with monkeypatch.context() as patch:
        patch.setattr(host.registry, "transact", away)
        with pytest.raises(Unavailable, match="is away"):
            await operating.drain()
    await operating.drain()
    assert msgspec.json.decode(world.store.keys[member].value, type=Member).draining


async def test_a_fleet_pin_released_while_it_is_told_leaves_nothing_in_the_registry(world: World, host: Host) -> None:
    await host.publish()
    host.registry.about, host.registry.hung = "lease", asyncio.Event()
    acquiring = asyncio.create_task(host.pins.acquire("lease", MODEL, 1, "engine", 60.0, copies=1))
    await asyncio.sleep(0.05)
    releasing = asyncio.create_task(host.pins.release("lease"))
    await asyncio.sleep(0.05)
    host.registry.hung.set()
    await releasing
    with pytest.raises(NotFound, match="is not held"):
        await acquiring
    assert keys.pin_key(MODEL, 1, "lease") not in world.store.keys
    assert not host.pins._keys._leases


async def test_adopting_needs_no_model(host: Host) -> None:
    service = RelayService(host.parts, data_address="h:2", publish_socket=None)
    context = AbortedCall()
    with pytest.raises(ConnectionAbortedError):
        await service.Adopt(pb.AdoptRequest(), context)  # type: ignore[arg-type]
    [(status, message)] = context.aborted
    assert (status, "is the store that a belongs to" in message) == ("FAILED_PRECONDITION", True), message


async def test_a_version_that_goes_while_its_pin_is_told_is_not_held(host: Host) -> None:
    await host.publish()
    service = RelayService(host.parts, data_address="h:2", publish_socket=None)
    host.registry.about, host.registry.hung = "", asyncio.Event()
    request = pb.AcquireRequest(model=MODEL, version=1, holder="engine", ttl_s=60.0, copies=1)
    context = AbortedCall()
    asking = asyncio.create_task(service.Acquire(request, context))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    host.reconciler.withdraw(MODEL, 1, "its bytes turned out bad")
    host.registry.hung.set()
    with pytest.raises(ConnectionAbortedError):
        await asking
    [(status, message)] = context.aborted
    assert status == "NOT_FOUND"
    assert "not held" in message


class AbortedCall:
    """A call's context that keeps how it was aborted."""

    def __init__(self) -> None:
        self.aborted: list[tuple[str, str]] = []

    async def abort(self, status: Any, message: str, trailers: Any) -> None:
        self.aborted.append((status.name, message))
        raise ConnectionAbortedError


async def test_a_plans_number_is_given_once_though_the_registry_has_not_heard_of_it(world: World, host: Host) -> None:
    await host.publish()
    known = host.lease.view.plans[MODEL]
    orders = {known.number: known.order}
    world.store.reachable = False
    for joined in ("b", "c"):
        host.lease.view.members[joined] = Member(joined, joined, "h:1", "h:2")
        plan = (await host.announce()).announced.plan
        assert orders.setdefault(plan.number, plan.order) == plan.order
        host.lease.view.plans[MODEL] = known  # a list gives the registry's plan
        del host.lease.view.members[joined]
    assert len(orders) == 3


@pytest.mark.parametrize("grace_s", [0.3, 3600.0])
async def test_a_version_without_a_holder_is_lost_after_a_while_and_numbers_go_on(
    world: World, host: Host, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "LOST_GRACE_S", grace_s)
    await host.publish()
    other = await world.host("b")
    await host.stop()
    world.store.end_lease(host.lease.lease_id)

    async def noticed() -> bool:
        return bool(other.duties._lost_since)

    await until(noticed, "the new master misses the holders")
    if grace_s < 60:
        assert (await world.ended(1)) == Ended("lost", "no verified holder is left")
        await until(lambda: _holds(other.models.of(MODEL).newest_sealed is None), "its relay has heard of it")
    else:
        holder = keys.holder_key(MODEL, 1, "c")
        await other.registry.transact([], [Put(holder, b"")])  # it registers again
        await until(lambda: _gone(other.duties._lost_since), "it is not missed any more")
        assert world.recorded(1, "ended") is None
    assert (await other.announce()).manifest.version == 2


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True], ids=["holds it", "does not answer"])
async def test_what_a_live_relay_may_hold_is_not_lost_though_the_registry_has_no_holder(
    world: World, host: Host, silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The holder's key may be away for any reason; a version that is recorded as lost is dropped by its last holder."""
    monkeypatch.setattr(duties, "LOST_GRACE_S", 0.2)
    await host.publish()
    other = await world.host("b")
    other.dialled = SilentPeer() if silent else Peer(host)
    monkeypatch.setattr(host.lease.holdings, "_write", _writes_nothing)
    await other.registry.transact([], [Delete(keys.master_key(MODEL)), Delete(keys.holder_key(MODEL, 1, "a"))])
    monkeypatch.setattr(host.elections, "stand", _stands_for_nothing)

    async def queried_often() -> bool:
        return other.dialled.num_asked >= 3

    await until(queried_often, "the new master queried it before it gave the version up")
    assert world.recorded(1, "ended") is None
    assert host.shown() == [1]
    said = [r.getMessage() for r in caplog.records if "no holder in the registry" in r.getMessage()]
    assert len(said) == 1, said
    other.dialled.holds_nothing = True
    assert (await world.ended(1)) == Ended("lost", "no verified holder is left")


@pytest.mark.slow
async def test_a_silent_relay_keeps_nobody_from_an_election_nor_from_asking_for_another_model(
    world: World, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query takes up to 2 s, and is repeated: a model without a master must not wait for that."""
    monkeypatch.setattr(duties, "LOST_GRACE_S", 0.2)
    monkeypatch.setattr(host.elections, "stand", _stands_for_nothing)
    await host.publish()
    other = await world.host("b")
    other.dialled = hung = HungPeer()
    monkeypatch.setattr(host.lease.holdings, "_write", _writes_nothing)
    gone = [Delete(keys.master_key(MODEL)), Delete(keys.holder_key(MODEL, 1, "a"))]
    await other.registry.transact([], gone)

    async def queries() -> bool:
        return MODEL in hung.queried

    await until(queries, "the new master queries what is held")
    await other.elections.want("newer")

    async def elected() -> bool:
        return other.elections.is_master("newer")

    await until(elected, "the model without a version has its master meanwhile", timeout_s=DEADLINE_S)
    assert hung.queried == [MODEL], "the reply is still waited for, once"
    sealed, announced = (world.store.keys[keys.version_key(MODEL, 1, what)].value for what in ("sealed", "announced"))
    copies = {"sealed": _of_model("newer", sealed), "announced": announced.replace(b'"policy"', b'"newer"')}
    writes = [Put(keys.version_key("newer", 1, what), value) for what, value in copies.items()]  # type: ignore[arg-type]
    await other.registry.transact([], writes)

    async def queries_both() -> bool:
        return sorted(hung.queried) == sorted(["newer", MODEL])

    await until(queries_both, "the other one is queried beside it", timeout_s=DEADLINE_S)
    hung.go_on.set()


def _of_model(model: str, sealed: bytes) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(msgspec.json.decode(sealed, type=Sealed), model=model))


async def _writes_nothing() -> None:
    """A relay that cannot write to the registry now: it would write again what was deleted there."""


async def _stands_for_nothing(newest_holders: object, now: float) -> list[str]:
    return []


class Peer:
    """Another relay's gRPC port, without the port."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.num_asked = 0
        self.holds_nothing = False

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def versions(self, model: str) -> list[Sealed]:
        self.num_asked += 1
        return [] if self.holds_nothing else self._host.models.shown(model)


class SilentPeer(Peer):
    """A relay that is alive to the registry and answers nobody."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.holds_nothing = False

    async def versions(self, model: str) -> list[Sealed]:
        self.num_asked += 1
        if self.holds_nothing:
            return []
        raise Unavailable("silent")


class HungPeer(SilentPeer):
    """One that answers once the test permits it."""

    def __init__(self) -> None:
        super().__init__()
        self.queried: list[str] = []
        self.go_on = asyncio.Event()

    async def versions(self, model: str) -> list[Sealed]:
        self.queried.append(model)
        await self.go_on.wait()
        return []


async def test_old_records_are_deleted_in_parts_and_forgotten_only_then(world: World, host: Host) -> None:
    """More than one transaction takes, as after a while in which nobody pruned."""
    await host.publish(64)
    epoch = host.elections.epoch(MODEL)
    assert epoch is not None
    first = host.drafts.get(MODEL, 1)
    assert first is not None
    host.registry.about, host.registry.answers_lost = "/ended", 1
    for version in range(2, 2 * VERSIONS_KEPT + 2):
        manifest = msgspec.structs.replace(first.manifest, version=version)
        announced = msgspec.structs.replace(first.announced, manifest=manifest)
        writes = {"announced": announced, "ended": Ended("aborted", "test")}
        await MemoryRegistry(world.store).transact(
            [],
            [Put(keys.version_key(MODEL, version, what), msgspec.json.encode(it)) for what, it in writes.items()],  # type: ignore[arg-type]
        )

    async def pruned() -> bool:
        return len([key for key in world.store.keys if "/versions/" in key]) <= 2 * VERSIONS_KEPT + 4

    await until(pruned, "old records are deleted though an answer was lost")
    assert host.registry.answers_lost == 0


async def _holds(condition: bool) -> bool:
    return condition


async def _gone(what: Sized) -> bool:
    return not what


# ---- an unexpected error costs one thing alone


class FailsFor:
    """A method that raises for one model, a number of times (at first: for ever), and does its work else."""

    def __init__(self, work: Callable[..., Any], model: str, times: int = 1 << 30) -> None:
        self._work, self._model, self.times = work, model, times
        self.num_failed = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.num_failed < self.times and any(self._model in str(argument) for argument in arguments):
            self.num_failed += 1
            raise ZeroDivisionError("unforeseen")
        return self._work(*arguments, **named)


def logged(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return len([r for r in caplog.records if words in r.getMessage() and r.levelname == "ERROR"])


@pytest.mark.parametrize(("part", "method"), [("reconciler", "reconcile"), ("relay", "apply")])
async def test_what_fails_for_one_model_on_a_relay_costs_no_other(
    host: Host, part: str, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailsFor(getattr(getattr(host, part), method), "cursed")
    monkeypatch.setattr(getattr(host, part), method, failing)
    host.models.of("cursed")
    await host.elections.want("cursed")
    await host.elections.want("cursed too")
    await host.publish()

    async def failed_again() -> bool:
        return failing.num_failed > 2

    if method == "reconcile":
        await until(failed_again, "it is tried again")
    await host.publish()

    async def retired() -> bool:
        return host.shown() == [2]

    await until(retired, "the one before has retired")
    assert logged(caplog, "versions of cursed neither come nor go") == (method == "reconcile")
    assert not any(task.done() for task in host._tasks)


async def test_an_undone_duty_of_a_master_costs_its_model_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of names before and after the other's: no order hides that one ends the round for all."""
    failing = FailsFor(host.duties.settle, "cursed")
    monkeypatch.setattr(host.duties, "settle", failing)
    for model in ("a cursed one", "z cursed too"):
        await host.elections.want(model.replace(" ", "-"))

    async def failed_again() -> bool:
        return failing.num_failed > 4

    await until(failed_again, "it is tried again")
    await host.publish()
    assert logged(caplog, "leaves something undone: ZeroDivisionError") == 2
    assert not any(task.done() for task in host._tasks)


async def test_quarantine_that_cannot_be_looked_at_ends_no_relay(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system without leases refuses each check."""
    num_swept = 0

    def refuses() -> int:
        nonlocal num_swept
        num_swept += 1
        raise OSError(errno.EINVAL, "Invalid argument")

    async def swept_again() -> bool:
        return num_swept > 2

    monkeypatch.setattr(host.pool, "sweep", refuses)
    await until(swept_again, "it is tried again")
    await host.publish()
    assert logged(caplog, "quarantined memory is not checked") == 1


async def test_work_in_the_background_that_fails_again_and_again_is_logged_once(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise ZeroDivisionError("unforeseen")

    for _ in range(3):
        await asyncio.wait([host.parts.tasks.start(fails())])
        await asyncio.sleep(0)  # its end is noted
    assert logged(caplog, "background work ") == 1


async def test_a_call_that_fails_in_a_way_nobody_foresaw_is_answered_in_words(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[tuple[str, str]] = []

    class Context:
        async def abort(self, status: Any, message: str, trailers: Any) -> None:
            aborted.append((status.name, message))
            raise ConnectionAbortedError

    service = RelayService(host.parts, data_address="h:2", publish_socket=None)
    monkeypatch.setattr(host.duties, "locate", lambda model, **_: 1 // 0)
    with pytest.raises(ConnectionAbortedError):
        await service.Locate(pb.LocateRequest(model=MODEL), Context())  # type: ignore[arg-type]
    assert aborted == [("INTERNAL", "Locate failed: ZeroDivisionError: integer division or modulo by zero")]


async def test_beyond_the_bound_a_wait_for_a_stage_is_refused_and_those_that_stand_go_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.daemon.service.STAGE_WAITS_MAX", 2)
    service = RelayService(host.parts, data_address="h:2", publish_socket=None)
    draft = await host.announce()

    def ask(wait_s: float) -> Coroutine[Any, Any, pb.StageReply]:
        version, run = draft.manifest.version, draft.manifest.run
        request = pb.StageRequest(model=MODEL, version=version, run=run, want="sealed", wait_s=wait_s)
        return service.Stage.__wrapped__(service, request, None)  # type: ignore[attr-defined,no-any-return]

    async def both_wait() -> bool:
        return service._stage_waits == 2

    async def known() -> bool:
        versions = host.parts.models.get(MODEL)
        return versions is not None and versions.get(draft.manifest.version) is not None

    await until(known, "it is announced")
    waits = [asyncio.create_task(ask(DEADLINE_S)) for _ in range(2)]
    await until(both_wait, "both wait")
    with pytest.raises(OutOfCapacity, match="2 calls wait for a stage"):
        await ask(DEADLINE_S)
    assert not (await ask(0.0)).reached, "without waiting it is told"
    write(draft)
    await host.commit(draft)
    assert [reply.reached for reply in await asyncio.gather(*waits)] == [True, True]
    assert service._stage_waits == 0
    assert (await ask(DEADLINE_S)).reached


async def test_an_error_in_sealing_that_nobody_foresaw_is_tried_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.master.sealer.UNFORESEEN_RETRY_S", 0.1)
    draft = await host.announce()
    monkeypatch.setattr(host.elections, "as_master", FailsFor(host.elections.as_master, MODEL, times=3))
    write(draft)
    await host.commit(draft)
    await host.reaches(draft, "sealed")


async def test_an_announcement_that_the_registry_refuses_for_good_gives_the_version_up_by_name(host: Host) -> None:
    """Taken for an outage, it would be announced again for ever, and its ticket stay at copied."""

    async def refuses(guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        if any(one.key.endswith("/announced") for one in writes):
            raise TooLarge("etcd refuses transact: request is too large")
        return await MemoryRegistry.transact(host.registry, guards, writes)

    host.registry.transact = refuses  # type: ignore[method-assign]
    draft = await host.announce()
    await host.reaches(draft, "failed")
    assert draft.reason == "it cannot be announced: etcd refuses transact: request is too large"


async def test_a_fetch_that_fails_in_a_way_nobody_foresaw_is_made_again(
    world: World, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the version would be under way for ever, and with it every later one of its model."""
    monkeypatch.setattr("paramserver.relay.fetches.FAILED_RETRY_S", 0.05)
    run, num_failed = data_fetch.Fetch.run, 0

    def fails_twice(fetch: data_fetch.Fetch) -> bool:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise ZeroDivisionError("unforeseen")
        return False if fetch._cancelled.wait(0.5) else run(fetch)

    monkeypatch.setattr(data_fetch.Fetch, "run", fails_twice)
    other = await world.host("b")
    await host.announce()

    async def begun_again() -> bool:
        return num_failed == 2 and bool(other.fetches.transfers())

    await until(begun_again, "it is fetched again")
    assert logged(caplog, "does not come and is tried again") == 1


async def test_fetches_without_a_byte_keep_no_thread_from_other_work(world: World, host: Host) -> None:
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        other = await world.host("b")
        await host.announce()

        async def under_way() -> bool:
            return bool(other.fetches.transfers())

        await until(under_way, "it is fetched")
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "done") == "done"
        assert await under_way()


# ---- room


async def test_a_pinned_version_stays_and_its_memory_is_used_again_only_after_its_release(host: Host) -> None:
    first = await host.publish()
    pin, record, path = await host.pins.acquire("lease", MODEL, 1, "engine-1", 60.0)
    place = Path(path) / "model.safetensors"
    content = place.read_bytes()
    later = [await host.publish() for _ in range(4)]
    assert host.shown() == [1, 5], "retention keeps the newest, the pin keeps the first"
    assert (place.read_bytes(), record.root_digest) == (content, first.root)
    blocker, _, _ = await host.pins.acquire("newest", MODEL, None, "engine-2", 60.0)
    await host.publish()
    with pytest.raises(OutOfCapacity, match=r"version 1 \(.*\) pinned by engine-1, version 5 .* pinned by engine-2"):
        await host.announce()
    waiting = asyncio.create_task(host.announce(wait_room_s=DEADLINE_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    await host.pins.release(pin.lease_id)
    assert (await waiting).manifest.version == later[-1].manifest.version + 2
    assert host.shown() == [5, 6]
    assert not place.exists()
    await host.pins.release(blocker.lease_id)


async def test_an_exact_version_is_acquired_or_refused_and_never_another(host: Host) -> None:
    """Engines on several hosts get one version: the newest of this host is no answer."""
    await host.publish()
    await host.pins.acquire("keeps it", MODEL, 1, "engine-1", 60.0)
    await host.publish()
    pin, record, _ = await host.pins.acquire("again", MODEL, 1, "engine-2", 60.0)
    assert (pin.version, record.version) == (1, 1)
    assert (await host.pins.acquire("newest", MODEL, None, "engine-3", 60.0))[0].version == 2
    for absent in (3, 99):
        with pytest.raises(NotFound, match=f"no sealed version {absent} of policy.*held here: 1, 2"):
            await host.pins.acquire("none", MODEL, absent, "engine-4", 60.0)


async def test_a_version_about_to_retire_is_either_held_or_refused(host: Host) -> None:
    """Each pin taken in the race stays good; nobody gets a pin on memory that went back."""
    held: list[tuple[int, Path]] = []
    for version in range(1, 9):
        await host.publish(MIB)
        with contextlib.suppress(NotFound):
            pin, _, path = await host.pins.acquire(str(version), MODEL, max(1, version - 1), "late", 60.0)
            held.append((pin.version, Path(path)))
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
    assert len(host.models.of(MODEL).items()) <= VERSIONS_KEPT + 1
    assert len(host.drafts) <= VERSIONS_KEPT


async def test_a_registry_that_hangs_holds_up_the_seal_and_never_the_trainer(host: Host) -> None:
    await host.publish()
    host.registry.about, host.registry.hung = "/announced", asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):  # nothing would ever answer
        draft = await host.announce()
        write(draft)
        await host.commit(draft)
    assert draft.state == "committed", "not sealed, and not called so"
    host.registry.hung.set()
    await host.reaches(draft, "sealed")
    assert draft.manifest.version in host.shown()
