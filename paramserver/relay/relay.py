"""One relay: follows the registry, has versions brought here, shows, pins and retires them.

Invariants:
- everything here runs on one event loop and owns its state; threads (data port, fetches) only call the store,
  or come back through `call_soon_threadsafe`;
- what to do is decided by `core`; this module applies its effects and reports what came of them;
- a version's memory is reserved before its fetch begins, and goes back after it has ended;
- without the registry the relay goes on with its last view: bytes flow, pins hold, nothing new is sealed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable

from paramserver.config import RelayConfig, show_bytes
from paramserver.core.copies import MissingCopies, PinnedVersion
from paramserver.core.pins import Pin, Pins, keepers
from paramserver.core.records import Announced, Ended, Holding, Manifest, Plan, Sealed
from paramserver.core.stragglers import Hop, Stragglers
from paramserver.core.versions import Drop, Effect, Fetch, ModelVersions, Show, Tell
from paramserver.core.view import (
    DroppedFact,
    Fact,
    HolderFact,
    MasterFact,
    MemberFact,
    SkippedFact,
    SpilledFact,
    VersionFact,
    View,
)
from paramserver.data.nixl_processes import NixlProcesses
from paramserver.data.spill import Spill
from paramserver.memory.pool import Stopped
from paramserver.memory.store import Snapshot, Store
from paramserver.memory.supply import Memory
from paramserver.relay.fetches import Fetched, Fetches
from paramserver.relay.fleet_pins import FleetPins
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.watchers import Watchers
from paramserver.troubles import Troubles
from protos.errors import (
    Conflict,
    Corrupt,
    LaminarError,
    NotFound,
    OutOfCapacity,
    TooLarge,
    UnknownModel,
)

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.25
GIVE_BACK_RETRY_S = 1.0
VERSIONS_KEPT = 64  # numbers of old versions remembered, for tickets and late questions


class Relay:
    """The state of one relay and the effects on it."""

    def __init__(
        self,
        config: RelayConfig,
        seat: MemberLease,
        store: Store,
        *,
        spill: Spill | None = None,
        bind_host: str = "",
        movers: NixlProcesses | None = None,
    ) -> None:
        """`bind_host`: the address that bytes are asked for from; "": any."""
        self.config = config
        self.spill = spill
        self.seat = seat
        self.store = store
        self.pins = Pins()
        self.fleet_pins = FleetPins(seat.registry, config.name)
        self.models: dict[str, ModelVersions] = {}
        self.changed = asyncio.Condition()
        self.closing = False
        self._watchers = Watchers()
        self._fetches = Fetches(
            config,
            seat,
            holders=self._holders,
            ended=self._fetched,
            spawn=self.spawn,
            spill=spill,
            movers=movers,
            bind_host=bind_host,
        )
        self.memory = Memory(store.pool, self.spawn)
        self._taking: set[str] = set()  # models for whose next version memory is being allocated
        self._came: dict[tuple[str, int], Holding] = {}
        self._stragglers: dict[str, Stragglers] = {}
        self._missing: dict[str, MissingCopies] = {}
        self._settled: dict[str, int] = {}  # revisions of models' versions at which nothing was left to do
        self._leaving = 0  # snapshots whose memory is on its way back
        self._no_room: set[tuple[str, int]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._troubles = Troubles(log)
        self._loop = asyncio.get_running_loop()

    @property
    def view(self) -> View:
        return self.seat.view

    # ---- the tasks of a relay; the server runs them in its TaskGroup

    async def follow(self) -> None:
        """Applies what the registry says, for ever."""
        async for facts in self.seat.follow():
            for fact in facts:
                with self._troubles.contained(f"not applied: {type(fact).__name__} of {_subject(fact)}"):
                    self.take_fact(fact)
            self._tidy_all()
            await self._notify()

    async def housekeep(self) -> None:
        """Pins that lapse, versions that retire, quarantine that clears, fetches that may go better now."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            with self._troubles.contained("pins that lapsed are not ended"):
                for pin in self.pins.expire(time.monotonic()):
                    log.warning("pin of %s on %s version %d lapsed", pin.holder, pin.model, pin.version)
                    self.spawn(self.fleet_pins.end(pin))
            with self._troubles.contained("quarantined memory is not looked at"):
                self.store.pool.sweep()
            with self._troubles.contained("memory is not cut for the versions to come"):
                self.memory.cut()
            with self._troubles.contained("records of versions shown here are not written"):
                self.store.record_shown()
            self._tidy_all()
            await self._notify()

    def _tidy_all(self) -> None:
        self._forget_models()
        for model in list(self.models):
            if self._is_settled(model):
                continue
            with self._troubles.contained(f"versions of {model} neither come nor go here"):
                self.tidy(model)
                if self.models[model].settled:
                    self._settled[model] = self.models[model].revision

    def _is_settled(self, model: str) -> bool:
        """Nothing has happened since the last look, and no time that passes makes a difference: most models, mostly."""
        pinned = bool(self.view.pinned_versions(model)) if self.view.pins else False
        return not pinned and self._settled.get(model) == self.models[model].revision

    async def dismiss(self) -> None:
        """Ends the streams that would otherwise wait for ever: watchers, runs, tickets."""
        self.closing = True
        self._watchers.dismiss()
        await self._notify()

    async def close(self) -> None:
        """Ends fetches and what runs in the background, and starts no more of either."""
        self.closing = True
        self._fetches.cancel_all()
        self.memory.stop()
        while self._background:
            await asyncio.wait(self._background)
        self._fetches.close()

    # ---- readers

    def versions(self, model: str) -> list[Sealed]:
        self._known(model)
        found = self.models.get(model)
        return found.shown() if found else []

    def acquire(
        self, lease_id: str, model: str, version: int | None, holder: str, ttl_s: float, copies: int = 0
    ) -> tuple[Pin, Sealed]:
        """Pins a shown version (None: the newest). NotFound names what is here."""
        shown = {record.version: record for record in self.versions(model)}
        wanted = max(shown, default=None) if version is None else version
        if wanted is None or wanted not in shown:
            raise NotFound(
                f"relay {self.config.name} holds no sealed version {version or ''} of {model}".replace("  ", " "),
                hint=f"held here: {', '.join(map(str, sorted(shown))) or 'none yet'}",
            )
        pin = self.pins.add(lease_id, model, wanted, holder, ttl_s, time.monotonic(), copies)
        return pin, shown[wanted]

    def path_of(self, pin: Pin) -> str:
        """Where a pinned version lies. NotFound when it went all the same: its bytes turned out bad, or it was lost."""
        snapshot = self.store.get(pin.model, pin.version)
        if snapshot is None or not self.pins.holds(pin.lease_id):
            raise NotFound(f"the pin on version {pin.version} of {pin.model} is not held: it is here no more")
        return str(snapshot.directory)

    def watch(self, model: str) -> AsyncIterator[Tell]:
        """The current state, then every change. Raises Unavailable when the watcher fell behind, or the relay ends."""
        return self._watchers.watch(model, lambda: self._state(model))

    def _state(self, model: str) -> list[Tell]:
        known = self.models.get(model)
        states = [state for _, state in known.items() if not state.ended] if known else []
        return [Tell("available" if s.stage == "shown" else "sealed", s.sealed) for s in states if s.sealed]

    def transfers(self) -> list[tuple[str, int, str, str, int, int]]:
        """(model, version, upstream, transport, bytes done, bytes total) of what is on its way here."""
        return self._fetches.transfers()

    def cut_off(self) -> set[str]:
        """Relays that the registry calls alive and that this one cannot reach: sources bypassed right now."""
        return self._fetches.bypassed()

    def _known(self, model: str) -> None:
        if model not in self.models and model not in self.view.models:
            raise UnknownModel(
                f"no model {model!r} here", hint=f"known: {', '.join(sorted(self.view.models)) or 'none yet'}"
            )

    # ---- the data port's provider (called from its threads)

    def find(self, model: str, version: int, timeout_s: float) -> Snapshot | None:
        snapshot = self.store.wait(model, version, timeout_s)
        if snapshot is None:
            versions = self.models.get(model)
            state = versions.get(version) if versions else None
            if state is not None and state.stage in ("skipped", "retired", "ended"):
                raise NotFound(f"version {version} of {model} is {state.stage} here")
            if (model, version) in self._no_room:  # those behind must not wait for it here
                raise NotFound(f"no room for version {version} of {model} here")
        return snapshot

    def chunk_is_bad(self, snapshot: Snapshot, error: Corrupt) -> None:
        log.error("withdrawing as holder: %s", error)
        self._loop.call_soon_threadsafe(self._withdraw, snapshot, str(error))

    def _withdraw(self, snapshot: Snapshot, reason: str) -> None:
        manifest = snapshot.manifest
        self.apply(manifest.model, self.of(manifest.model).withdrawn(manifest.version, reason))

    def stragglers(self, model: str) -> Stragglers:
        return self._stragglers.setdefault(model, Stragglers())

    # ---- events in, effects out

    def of(self, model: str) -> ModelVersions:
        if model not in self.models:
            self.models[model] = ModelVersions(model, retain=self.config.retain)
            self.models[model].skip_to(self.view.dropped.get(model, 0))
        return self.models[model]

    async def refresh(self) -> None:
        """Takes the registry as it is now. Raises Unavailable."""
        for fact in await self.seat.refresh():
            self.take_fact(fact)

    def take_fact(self, fact: Fact) -> None:
        match fact:
            case VersionFact(model, version, record):
                self.record(model, version, record)
            case HolderFact(model, version, relay, present, came):
                self.of(model).holder(version, relay, present=present)
                if came is not None and came.rate_bytes_s:
                    hop = Hop(version, came.upstream, relay, came.rate_bytes_s, came.rtt_s, came.transport)
                    self.stragglers(model).saw(hop)
            case SpilledFact(model, version, relay, present):
                self.of(model).spilled(version, relay, present=present)
            case SkippedFact(model, number):
                self.of(model).skip_to(number)
            case DroppedFact(model, number):
                self._end_dropped(model, number)
            case MasterFact(model, seen):
                log.info("%s: master is %s", model, seen.master.name if seen else "nobody")
            case MemberFact(name, member):
                log.info("relay %s %s", name, "joined" if member else "left")
                for stragglers in self._stragglers.values():
                    stragglers.forget(frozenset(self.view.members))

    def record(self, model: str, version: int, record: Announced | Sealed | Ended) -> None:
        """A record of the registry, seen or just written by this relay itself."""
        if version < self.view.dropped.get(model, 0):  # its deletion is on the way
            return
        versions = self.of(model)
        match record:
            case Announced():
                effects = versions.announced(record)
            case Sealed():
                effects = versions.sealed(record)
            case Ended():
                effects = versions.ended(version, record)
        self.apply(model, effects)

    def apply(self, model: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Fetch(announced, copy):
                    self._start_fetch(announced, copy=copy)
                case Show(sealed):
                    self._show(sealed)
                case Drop(version, why):
                    self._drop(model, version, why)
                case Tell():
                    self._watchers.tell(effect)

    def tidy(self, model: str) -> None:
        """Retires what retention no longer wants and nobody uses; starts the fetch that is due."""
        if self.closing:
            return
        versions = self.models.get(model)
        if versions is None:
            return
        self.retire(model)
        if not self.seat.is_master(model):  # the master forgets when it deletes the records
            versions.forget(versions.forgettable(2 * VERSIONS_KEPT, self.view.pinned_versions(model)))
        self._cancel_overtaken(model)
        if not self.seat.member.draining:
            versions.copy_here(self._copies_due(model))
            self.apply(model, versions.next_fetch())

    def _end_dropped(self, model: str, number: int) -> None:
        if model in self.models:
            effects = self.of(model).dropped(number)
            log.info("%s: versions below %d were dropped", model, number)
            self.apply(model, effects)
        self.store.pool.forget(model)
        if self.spill is not None:
            self.spill.drop(model, number)

    def _forget_models(self) -> None:
        """Those of which neither this relay nor the registry has anything: dropped, or never used."""
        for model in self.view.keyless() | (self.models.keys() - self.view.models):
            if model not in self.models or self.models[model].empty:
                self._forget_model(model)

    def _forget_model(self, model: str) -> None:
        self.view.forget(model)
        self.models.pop(model, None)
        self._settled.pop(model, None)
        self._stragglers.pop(model, None)
        self._missing.pop(model, None)
        self._no_room = {one for one in self._no_room if one[0] != model}
        self.store.pool.forget(model)

    def retire(self, model: str, *, need_room: bool = False) -> None:
        """What a peer is fetching, or the fleet wants kept here, stays unless `need_room`: peers can ask others."""
        versions = self.of(model)
        pins = self.pins.counts(model)
        if not need_room:
            for record in versions.shown():
                pins[record.version] += self._lent(record) + self._kept_for_the_fleet(record)
        self.apply(model, versions.retire(pins))

    def _lent(self, record: Sealed) -> bool:
        snapshot = self.store.get(record.model, record.version)
        return snapshot is not None and snapshot.num_links > 0

    def _kept_for_the_fleet(self, record: Sealed) -> bool:
        pinned = self.view.pinned(record.model, record.version)
        state = self.of(record.model).get(record.version)
        if not pinned or state is None:
            return False
        staying = self.view.places().keys()
        # This relay holds it, whether or not the registry has been told already.
        return self.config.name in keepers(pinned, (state.holders | {self.config.name}) & staying)

    def _copies_due(self, model: str) -> set[int]:
        """Versions pinned for the fleet that this relay is to make a further copy of, since a holder of one died."""
        pinned = {}
        for version in self.view.pinned_versions(model):
            state = self.of(model).get(version)
            if state is not None and state.ended is None:
                copies = max(self.view.pinned(model, version).values())
                pinned[version] = PinnedVersion(copies, state.holders & self.view.members.keys())
        missing = self._missing.setdefault(model, MissingCopies())
        return missing.due(self.config.name, pinned, self.view.places().keys(), time.monotonic())

    def make_room(self, model: str) -> bool:
        """Retires what can be spared. Only when nothing is on its way out any more, pins for the fleet give way.

        Whether memory is on its way back.
        """
        self.retire(model, need_room=True)
        if self._leaving:
            return True
        retained = {(r.model, r.version) for v in self.models.values() for r in v.shown()[-v.retain :]}
        for pin in self.pins.give_way(retained):
            log.warning("pin of %s on %s version %d gives way: its room is needed", pin.holder, pin.model, pin.version)
            self.spawn(self.fleet_pins.end(pin))
            self.retire(pin.model, need_room=True)
        return self._leaving > 0

    def _cancel_overtaken(self, model: str) -> None:
        """A fetch that gets no bytes makes way for a newer sealed version; others keep what they have and wait."""
        for version in self._fetches.idle(model):
            if self.of(model).overtaken(version):
                log.info("%s version %d makes way for a newer one: no byte of it comes", model, version)
                self._fetches.cancel(model, version)

    def _show(self, sealed: Sealed) -> None:
        snapshot = self.store.get(sealed.model, sealed.version)
        assert snapshot is not None
        path = self.store.publish(snapshot)
        log.info("%s version %d (step %d) available at %s", sealed.model, sealed.version, sealed.step, path)
        came = self._came.pop((sealed.model, sealed.version), Holding())
        self.seat.hold(sealed.model, sealed.version, came)
        if self.spill is not None:
            self.spill.want(snapshot, sealed.root_digest)

    def _drop(self, model: str, version: int, why: str) -> None:
        self.seat.unhold(model, version)
        for pin in self.pins.dropped(model, version):
            log.warning("pin of %s on %s version %d ends with it: %s", pin.holder, model, version, why)
            self.spawn(self.fleet_pins.leave(pin))
        fetching = self._fetches.cancel(model, version)
        snapshot = self.store.get(model, version)
        if snapshot is not None:
            self._leaving += 1
            self.spawn(self._leave(snapshot, why, after=fetching))

    async def _leave(self, snapshot: Snapshot, why: str, after: asyncio.Task[None] | None) -> None:
        try:
            await self._remove(snapshot, why, after)
        finally:
            self._leaving -= 1

    async def _remove(self, snapshot: Snapshot, why: str, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        if snapshot.leaving:  # given up here and ended elsewhere at the same time
            return
        snapshot.leaving = True
        try:
            await self._give_back(snapshot, why)
        except Conflict as error:
            log.error("its memory is kept until they leave: %s", error)
            self.spawn(self._give_back_later(snapshot, why))

    async def _give_back_later(self, snapshot: Snapshot, why: str) -> None:
        """Somebody is inside who could not be broken off, such as a disk that hangs: it ends some time."""
        while not self.closing:
            await asyncio.sleep(GIVE_BACK_RETRY_S)
            with contextlib.suppress(Conflict):  # it was logged
                await self._give_back(snapshot, why)
                return

    async def _give_back(self, snapshot: Snapshot, why: str) -> None:
        quarantined = await asyncio.to_thread(self.store.remove, snapshot, why)
        log.info("dropped %s (%s), quarantined %s", snapshot, why, show_bytes(quarantined))
        self.tidy(snapshot.manifest.model)
        await self._notify()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if task.cancelled():
            return
        what = f"background work failed ({getattr(task.get_coro(), '__qualname__', 'unnamed')})"
        error = task.exception()
        if isinstance(error, Exception):
            self._troubles.met(what, error)
        elif error is not None:
            log.error(what, exc_info=error)
        else:
            self._troubles.over(what)

    def wake(self) -> None:
        """Lets those who wait on `changed` look again."""
        self.spawn(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def heed_earlier_registry(self, manifests: Iterable[Manifest]) -> None:
        """Versions left by an earlier life may be of a registry that was replaced: no number of theirs is given again.

        Called once, before this relay can be elected. Raises Unavailable.
        """
        newest: dict[str, Manifest] = {}
        for manifest in manifests:
            if manifest.epoch.store_id not in {self.view.store_id, *self.view.continues}:
                newest[manifest.model] = max(
                    newest.get(manifest.model, manifest), manifest, key=lambda one: one.version
                )
        for model, manifest in sorted(newest.items()):
            old, number = manifest.epoch.store_id, manifest.version
            log.error(
                "the registry was replaced: it is %s, and version %d of %s, left here by an earlier life, is of %s; "
                "readers refuse this one until `paramserver adopt --continues %s --model %s --above %d`",
                *(self.view.store_id, number, model, old, old, model, number),
            )
            self.of(model).skip_to(number + 1)
            await self.seat.skip_numbers(model, number + 1)

    def offer_again(self, found: Iterable[Snapshot]) -> None:
        """Snapshots left by an earlier life, hashed: those sealed as they are count, the memory of others is free.

        Called once, before anything is fetched.
        """
        for snapshot in found:
            manifest = snapshot.manifest
            versions = self.of(manifest.model)
            state = versions.get(manifest.version)
            root = snapshot.root()
            sealed = state is not None and state.sealed is not None and state.ended is None
            if state is None or state.sealed is None or not sealed or state.sealed.root_digest != root:
                log.info("%s, left by an earlier life, is not sealed as it is here", snapshot)
                self.store.remove(snapshot, "not sealed")
                continue
            self.store.open_again(snapshot)
            versions.opened(state.announced or Announced(manifest, Plan(manifest.epoch, 0, ())))
            self.apply(manifest.model, versions.filled(manifest.version, root))

    # ---- bringing a version here

    def _start_fetch(self, announced: Announced, *, copy: bool) -> None:
        manifest = announced.manifest
        if manifest.model in self._taking:
            return
        try:
            if copy and self.store.pool.statistics().free_bytes < 2 * manifest.size_bytes:
                raise OutOfCapacity("a copy of it, for the fleet, would take the room of the next version")
            self.store.check(manifest)
        except (OutOfCapacity, TooLarge) as error:
            self._say_no_room(manifest.model, manifest.version, error)
            if not copy:
                self.make_room(manifest.model)
            return
        self._taking.add(manifest.model)
        self.spawn(self._take_and_fetch(announced, copy=copy))

    async def _take_and_fetch(self, announced: Announced, *, copy: bool) -> None:
        """Fetches once there is memory, if the version is still wanted then; else it is there for the next one."""
        manifest = announced.manifest
        what = f"version {manifest.version} of {manifest.model}"
        try:
            allotment = await self.memory.take(manifest.model, [file.size_bytes for file in manifest.files], what)
        except OutOfCapacity as error:
            self._say_no_room(manifest.model, manifest.version, error)
            if not copy:
                self.make_room(manifest.model)
            return
        except Stopped:
            return
        finally:
            self._taking.discard(manifest.model)
        versions = self.of(manifest.model)
        if self.closing or versions.next_fetch() != [Fetch(announced, copy)]:
            self.store.pool.release(allotment)
            self.tidy(manifest.model)
            return
        try:
            snapshot = self.store.open(manifest, allotment)
        except OutOfCapacity as error:
            self.store.pool.release(allotment)
            self._say_no_room(manifest.model, manifest.version, error)
            return
        except BaseException:
            self.store.pool.release(allotment)
            raise
        if copy:
            log.info("copying %s, which is pinned for the fleet and has lost a holder", snapshot)
        self._no_room.discard((manifest.model, manifest.version))
        versions.opened(announced)
        self._fetches.start(announced, snapshot)

    def spill_changed(self) -> None:
        """Tells the registry what is on this disk; from any thread."""
        assert self.spill is not None
        on_disk = [(one.model, one.version) for one in self.spill.manifests()]
        self._loop.call_soon_threadsafe(self.seat.spilled, on_disk)

    def _say_no_room(self, model: str, version: int, error: LaminarError) -> None:
        if (model, version) not in self._no_room:
            log.warning("leaving the chain for %s version %d: %s", model, version, error)
            self._no_room.add((model, version))

    def _holders(self, model: str, version: int) -> set[str]:
        state = self.of(model).get(version)
        return state.holders if state is not None else set()

    async def _fetched(self, snapshot: Snapshot, fetched: Fetched | None) -> None:
        manifest = snapshot.manifest
        versions = self.of(manifest.model)
        state = versions.get(manifest.version)
        if state is None:  # dropped meanwhile: who dropped it waits for this and gives its memory back
            return
        if fetched is not None and state.stage == "filling":
            over = f" over {fetched.came.transport}" if fetched.came.transport else ""
            log.info("%s complete, %s in %.3f s%s", snapshot, show_bytes(manifest.size_bytes), fetched.took_s, over)
            self._came[manifest.model, manifest.version] = fetched.came
            self.apply(manifest.model, versions.filled(manifest.version, fetched.root_digest))
        elif state.stage == "filling":
            await self._remove(snapshot, "its bytes could not be had", after=None)
            if versions.get(manifest.version) is state and state.stage == "filling":  # not ended meanwhile
                versions.gave_up(manifest.version)
        self.tidy(manifest.model)
        await self._notify()


def _subject(fact: Fact) -> str:
    """What a fact is about, in words."""
    if isinstance(fact, MemberFact):
        return fact.name
    version = getattr(fact, "version", None)
    return fact.model if version is None else f"{fact.model} version {version}"
