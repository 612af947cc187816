"""The pure core of the relay tier under virtual time, in one thread: a thin shell around it, and faults by seed.

The shell does in one step what the daemons do between two awaits. Registry: the store behind the in-memory one, with
fenced transactions whose answers get lost. Safety is checked after every step; `heal` then demands liveness.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from paramserver.core import view as keys
from paramserver.core.pins import Pins
from paramserver.core.records import (
    Announced,
    ChunkMap,
    Ended,
    Epoch,
    FileSpec,
    Manifest,
    Master,
    Member,
    Plan,
    Sealed,
    digest,
    version_root,
)
from paramserver.core.transfer import TransferState
from paramserver.core.versions import Drop, Effect, Fetch, ModelVersions, Show
from paramserver.core.view import Fact, HolderFact, VersionFact, View
from paramserver.membership.memory import MemoryStore, _LeaseState
from paramserver.membership.registry import Absent, Changed, Created, Delete, Guard, Put, Removed, State, Write

MODEL = "policy"
FILES = (FileSpec("f", 10), FileSpec("g", 3))
CHUNK_BYTES = 4
ROOM = 4  # versions that fit into the memory of one relay


class AnswerLost(Exception):
    """The transaction may have been applied, or not."""


@dataclass
class Snapshot:
    """Bytes of one version on one relay, and what is known of its chunks."""

    announced: Announced
    chunks: ChunkMap = field(init=False)
    data: dict[int, bytearray] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chunks = ChunkMap.of(self.announced.manifest)

    @property
    def complete(self) -> bool:
        return len(self.digests) == self.chunks.num_chunks

    def root(self) -> str:
        """Of the bytes themselves, not of the digests that were noted."""
        bytes_ = [digest(bytes(self.data[i])) for i in range(self.chunks.num_chunks)]
        return version_root(self.announced.manifest, bytes_)


@dataclass
class Draft:
    snapshot: Snapshot
    recorded: bool = False
    root: str = ""


class SimRelay:
    """One life of one relay."""

    def __init__(self, world: World, name: str, life: int) -> None:
        self.world, self.name, self.instance = world, name, f"{name}#{life}"
        self.versions = ModelVersions(MODEL, retain=2)
        self.view, self.pins = View(), Pins()
        self.memory: dict[int, Snapshot] = {}
        self.draft: Draft | None = None
        self.fetching: tuple[int, TransferState] | None = None
        self.position = self.lease = 0
        self.newest_shown = self.deaf_until = 0
        self.settled: Epoch | None = None

    # ---- the registry

    def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> bool:
        store, rng = self.world.store, self.world.rng
        fault = rng.random() if self.world.faulty else 1.0
        if fault < 0.1:
            raise AnswerLost
        held = all(self.world.holds(guard) for guard in guards)
        if held:
            store.apply(writes)
        if fault < 0.2:
            raise AnswerLost
        return held

    def register(self) -> None:
        if self.lease in self.world.store.leases:
            return
        key = keys.member_key(self.name)
        lease = self.world.grant()
        member = Member(self.name, self.instance, "h:1", "h:2")
        if self.transact([Absent(key)], [Put(key, msgspec.json.encode(member), lease)]):
            self.lease = lease
            shown = [record.version for record in self.versions.shown()]
            self.world.store.apply([Put(keys.holder_key(MODEL, v, self.name), b"", lease) for v in shown])

    def deliver(self, num: int) -> None:
        log = self.world.store.log
        if self.world.faulty and self.world.num_steps < self.deaf_until:
            return None
        if self.position == 0 or (self.world.faulty and self.world.rng.random() < 0.1):
            return self.refresh()
        for _, event in log[self.position : self.position + num]:
            match event:
                case Changed(entry, _):
                    self.take(self.view.put(entry.key, entry.value, entry.created))
                case Removed(key, _):
                    self.take(self.view.remove(key))
                case State():
                    raise AssertionError("the log holds changes only")
        self.position = min(len(log), self.position + num)
        return self.tidy()

    def refresh(self) -> None:
        """The whole state, as after a compacted watch."""
        self.take(self.view.replace([(n, k.value, k.created) for n, k in sorted(self.world.store.keys.items())]))
        self.position = len(self.world.store.log)
        self.tidy()

    def take(self, facts: list[Fact]) -> None:
        for fact in facts:
            match fact:
                case VersionFact(_, _, Announced() as record):
                    self.apply(self.versions.announced(record))
                case VersionFact(_, _, Sealed() as record):
                    self.apply(self.versions.sealed(record))
                case VersionFact(_, version, Ended() as record):
                    self.apply(self.versions.ended(version, record))
                case HolderFact(_, version, relay, present):
                    self.versions.holder(version, relay, present=present)

    # ---- effects

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Fetch(announced):
                    if len(self.memory) < ROOM:
                        self.versions.opened(announced)
                        self.memory[announced.manifest.version] = Snapshot(announced)
                        self.fetching = announced.manifest.version, TransferState(ChunkMap.of(announced.manifest))
                case Show(sealed):
                    if self.lease in self.world.store.leases:
                        key = keys.holder_key(MODEL, sealed.version, self.name)
                        self.world.store.apply([Put(key, b"", self.lease)])
                case Drop(version):
                    del self.memory[version]  # a second drop fails here
                    self.world.store.apply([Delete(keys.holder_key(MODEL, version, self.name))])
                    if self.fetching is not None and self.fetching[0] == version:
                        self.fetching = None
                    if self.draft is not None and self.draft.snapshot.announced.manifest.version == version:
                        self.draft = None

    def tidy(self) -> None:
        self.apply(self.versions.retire(self.pins.counts(MODEL)))
        self.apply(self.versions.next_fetch())

    # ---- master

    @property
    def epoch(self) -> Epoch | None:
        seen = self.view.masters.get(MODEL)
        return self.view.epoch(MODEL) if seen is not None and seen.master.instance == self.instance else None

    def campaign(self) -> None:
        member = self.world.store.keys.get(keys.member_key(self.name))
        if MODEL in self.view.masters or member is None or member.lease != self.lease:
            return
        guards = [Absent(keys.master_key(MODEL)), Created(keys.member_key(self.name), member.created)]
        master = msgspec.json.encode(Master(self.name, self.instance))
        self.transact(guards, [Put(keys.master_key(MODEL), master, self.lease)])
        self.refresh()

    def settle(self) -> None:
        """Once in each epoch of its own: ends what an earlier master left open."""
        epoch = self.epoch
        if epoch is None or epoch == self.settled:
            return
        self.refresh()
        for version, state in self.versions.items():
            if state.announced and not state.sealed and not state.ended and state.announced.manifest.epoch != epoch:
                self.end(version, epoch, "its master died")
        self.settled = epoch

    def as_master(self, epoch: Epoch, guards: Sequence[Guard], write: Put) -> bool:
        return self.transact([Created(keys.master_key(MODEL), epoch.revision), *guards], [write])

    def announce(self) -> None:
        epoch = self.epoch
        if epoch is None or self.draft is not None or len(self.memory) >= ROOM:
            return
        manifest = Manifest(MODEL, self.versions.newest_known + 1, "run", 0, epoch, FILES, CHUNK_BYTES)
        order = (self.name, *sorted(set(self.view.members) - {self.name}))
        announced = Announced(manifest, Plan(epoch, 1, order))
        self.versions.opened(announced)
        self.draft = Draft(Snapshot(announced))
        self.memory[manifest.version] = self.draft.snapshot
        self.record(self.draft)

    def record(self, draft: Draft) -> None:
        manifest = draft.snapshot.announced.manifest
        key = keys.version_key(MODEL, manifest.version, "announced")
        newest = self.world.newest_sealed()
        done = self.as_master(manifest.epoch, [Absent(key)], Put(key, msgspec.json.encode(draft.snapshot.announced)))
        if done:
            assert manifest.version > newest, "a number at or below a sealed one was given"
        else:
            self.refresh()
        if self.draft is draft and self.epoch != manifest.epoch:
            return self.fail("another relay became master")
        draft.recorded = True
        return None

    def publish(self) -> None:
        """The next piece of work on the draft: one chunk, the commit, or a try to seal."""
        draft = self.draft
        if draft is None:
            return
        snapshot, manifest = draft.snapshot, draft.snapshot.announced.manifest
        if not snapshot.complete:
            index = len(snapshot.digests)
            content = digest(f"{manifest.version} {manifest.epoch} {index}".encode())
            snapshot.data[index] = bytearray(content[: snapshot.chunks.chunk(index).length])
            snapshot.digests[index] = digest(bytes(snapshot.data[index]))
        elif not draft.root:
            draft.root = snapshot.root()
            self.apply(self.versions.filled(manifest.version, draft.root))
        elif not draft.recorded:
            self.record(draft)
        else:
            self.seal(draft, manifest)

    def seal(self, draft: Draft, manifest: Manifest) -> None:
        sealed = Sealed(MODEL, manifest.version, 0, "run", draft.root, manifest.size_bytes, 0.0)
        key, ended = (keys.version_key(MODEL, manifest.version, what) for what in ("sealed", "ended"))  # type: ignore[arg-type]
        if self.as_master(manifest.epoch, [Absent(key), Absent(ended)], Put(key, msgspec.json.encode(sealed))):
            assert manifest.epoch.revision >= self.world.sealing_revision, "a stale master sealed"
            self.world.sealing_revision = manifest.epoch.revision
            self.take([VersionFact(MODEL, manifest.version, sealed)])
        else:
            self.refresh()
        state = self.versions.get(manifest.version)
        if self.draft is not draft:
            return
        if state is not None and state.sealed is not None and state.sealed.root_digest == draft.root:
            self.draft = None
        else:
            self.fail("refused")

    def fail(self, why: str) -> None:
        assert self.draft is not None
        manifest, self.draft = self.draft.snapshot.announced.manifest, None
        self.apply(self.versions.ended(manifest.version, Ended("aborted", why)))
        self.end(manifest.version, manifest.epoch, why)

    def end(self, version: int, epoch: Epoch, why: str) -> None:
        key = keys.version_key(MODEL, version, "ended")
        guards = [Absent(key), Absent(keys.version_key(MODEL, version, "sealed"))]
        self.as_master(epoch, guards, Put(key, msgspec.json.encode(Ended("aborted", why))))

    def note_lost(self) -> None:
        """The newest sealed version that nobody holds any more is recorded as lost, so that nobody waits for it."""
        newest, epoch = self.versions.newest_sealed, self.epoch
        state = self.versions.get(newest) if newest is not None else None
        if newest is not None and epoch and state and not state.holders and state.stage not in ("complete", "shown"):
            lost = Ended("lost", "no verified holder is left")
            key = keys.version_key(MODEL, newest, "ended")
            self.as_master(epoch, [Absent(key)], Put(key, msgspec.json.encode(lost)))

    # ---- bytes

    def fetch(self) -> None:
        """One request of the transfer under way: whole, in part, broken, or with a wrong byte."""
        if self.fetching is None:
            return
        version, transfer = self.fetching
        mine, sources, rng = self.memory[version], self.world.sources(self, version), self.world.rng
        want = transfer.take("stripe") if sources else None
        if want is None:
            if self.versions.overtaken(version):
                self.give_up(version)
            return
        theirs = rng.choice(sources)
        if want.index not in theirs.digests:
            transfer.broken("stripe")
            if self.versions.overtaken(version):
                self.give_up(version)
            return
        whole = bytes(theirs.data[want.index])
        place = mine.data.setdefault(want.index, bytearray(len(whole)))
        upto = rng.randint(want.from_byte, len(whole) - 1) if self.world.chance(0.3) else len(whole)
        place[want.from_byte : upto] = whole[want.from_byte : upto]
        if self.world.chance(0.1):
            place[rng.randrange(len(place))] ^= 1
        transfer.received(want.index, upto)
        if upto < len(whole):
            transfer.broken("stripe")
        elif digest(bytes(place)) != theirs.digests[want.index]:
            transfer.mismatched(want.index)
        else:
            transfer.verified(want.index)
            mine.digests[want.index] = theirs.digests[want.index]
            if self.world.chance(0.02):  # memory that does not keep what was verified
                place[0] ^= 1
        if transfer.complete:
            self.fetching = None
            self.apply(self.versions.filled(version, mine.root()))
            self.tidy()

    def give_up(self, version: int) -> None:
        self.fetching = None
        del self.memory[version]
        self.versions.gave_up(version)
        self.tidy()

    # ---- readers

    def acquire(self) -> None:
        shown = self.versions.shown()
        if shown and len(self.pins.all()) < 2:
            record = self.world.rng.choice(shown)
            self.pins.add(record.root_digest, MODEL, record.version, "reader", 60.0, self.world.now)

    def release(self) -> None:
        for pin in self.pins.all()[:1]:
            self.pins.release(pin.lease_id, self.world.now)
        self.tidy()

    def check(self) -> None:
        shown = {record.version: record for record in self.versions.shown()}
        for version, record in shown.items():
            assert self.memory[version].root() == record.root_digest, "what is shown is whole and as sealed"
            assert self.world.sealed.setdefault(version, record.root_digest) == record.root_digest, "one content each"
        for pin in self.pins.all():
            state = self.versions.get(pin.version)
            assert pin.version in shown or (state and state.ended), "pinned memory went back"
        assert max(shown, default=0) >= self.newest_shown, "the newest version here went back"
        self.newest_shown = max(shown, default=0)
        assert len(self.memory) <= ROOM, "more in memory than fits"


class World:
    """Some relays at one registry; every choice comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        self.store = MemoryStore(lambda: self.now)
        self.store.apply([Put(keys.STORE, b"store"), Put(keys.wanted_key(MODEL), b"")])
        self.sealed: dict[int, str] = {}
        self.lives = self.sealing_revision = self.num_steps = 0
        self.faulty = False
        self.relays = {name: self.born(name) for name in "abcd"[: self.rng.randint(2, 4)]}
        for relay in self.relays.values():
            relay.register()
        self.faulty = True

    def born(self, name: str) -> SimRelay:
        self.lives += 1
        return SimRelay(self, name, self.lives)

    def chance(self, probability: float) -> bool:
        return self.faulty and self.rng.random() < probability

    def grant(self) -> int:
        lease = max(self.store.leases, default=0) + self.store.revision + 1
        self.store.leases[lease] = _LeaseState(60.0, 60.0)  # time stands still: leases end by `reap` only
        return lease

    def holds(self, guard: Guard) -> bool:
        key = self.store.keys.get(guard.key)
        return key is None if isinstance(guard, Absent) else key is not None and key.created == guard.revision

    def newest_sealed(self) -> int:
        return max((int(key.split("/")[-2]) for key in self.store.keys if key.endswith("/sealed")), default=0)

    def sources(self, me: SimRelay, version: int) -> list[Snapshot]:
        """Those before it in the plan, and complete holders; they refuse another epoch's bytes."""
        announced = me.memory[version].announced
        order = announced.plan.order
        before = order[: order.index(me.name)] if me.name in order else order
        found = [relay.memory.get(version) for relay in self.relays.values() if relay is not me]
        names = [relay.name for relay in self.relays.values() if relay is not me]
        epoch = announced.manifest.epoch
        return [
            snapshot
            for name, snapshot in zip(names, found, strict=True)
            if snapshot is not None
            and snapshot.announced.manifest.epoch == epoch
            and (name in before or snapshot.complete)
        ]

    def step(self) -> None:
        self.num_steps += 1
        name = self.rng.choice(sorted(self.relays))
        relay = self.relays[name]
        match self.rng.choices(range(12), (14, 12, 12, 30, 10, 4, 3, 3, 3, 0.4, 0.4, 0.5))[0]:
            case 0:
                relay.deliver(self.rng.randint(1, 8))
            case 1 | 2:
                relay.fetch()
            case 3:
                relay.publish()
            case 4:
                relay.announce()
            case 5:
                relay.campaign()
                relay.settle()
            case 6:
                relay.acquire()
            case 7:
                relay.release()
            case 8:
                relay.register()
            case 9:  # kill -9; its lease lives on for a while
                self.relays[name] = self.born(name)
            case 10 if relay.lease in self.store.leases:  # etcd takes it for dead, and it does not hear of that
                self.store.end_lease(relay.lease)
                relay.deaf_until = self.num_steps + DEAF_STEPS
            case 11:
                self.reap()
        self.relays[name].check()

    def reap(self) -> None:
        """The leases of dead lives run out."""
        alive = {relay.lease for relay in self.relays.values()}
        for lease in sorted(set(self.store.leases) - alive):
            self.store.end_lease(lease)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.step()
            except AnswerLost:
                continue

    def heal(self, rounds: int = 400) -> None:
        """No more faults: within so many rounds every relay shows one newest version that was published last."""
        self.faulty = False
        self.reap()
        published = 0
        for number in range(rounds):
            for relay in self.relays.values():
                relay.release()
                relay.register()
                relay.deliver(1000)
                relay.campaign()
                relay.settle()
                relay.publish()
                relay.fetch()
                relay.check()
                if number > GRACE_ROUNDS:
                    relay.note_lost()
            newest = self.newest_sealed()
            if published >= NUM_HEALING and newest and {r.newest_shown for r in self.relays.values()} == {newest}:
                return
            if number % GRACE_ROUNDS == 0 and all(relay.draft is None for relay in self.relays.values()):
                published += 1
                for relay in self.relays.values():
                    relay.announce()
        raise AssertionError(f"newest sealed {newest}, shown {[r.newest_shown for r in self.relays.values()]}")


DEAF_STEPS = 150
DEAF_STEPS = 150
GRACE_ROUNDS = 20  # holders whose lease ran out have registered again by then
NUM_HEALING = 2  # versions published after the last fault
