"""Brings this host's snapshots in line with what the registry and the pins want: fetches, shows, drops.

Invariants:
- everything here runs on one event loop; `core.versions` decides, this module applies its effects and reports what
  came of them;
- a version's memory is reserved before its fetch begins, and goes back after it has ended;
- a relay without room leaves the chain for that version, and goes on with the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from paramserver.config import show_bytes
from paramserver.core.records import Announced, Ended, Sealed
from paramserver.core.spans import fetch_span, relay_trace
from paramserver.core.versions import Drop, Effect, Fetch, Notify, Show
from paramserver.data.spill import Spill
from paramserver.memory.allocator import PoolAllocator
from paramserver.memory.pool import Allotment, Stopped
from paramserver.memory.store import Snapshot, Store
from paramserver.relay.changes import Changes
from paramserver.relay.elections import Elections
from paramserver.relay.fetches import Fetched, Fetches
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.models import VERSIONS_KEPT, ModelTable
from paramserver.relay.pins import RelayPins
from paramserver.relay.removals import Removals
from paramserver.relay.watchers import Watchers
from protos.errors import OutOfCapacity, TooLarge
from protos.tasks import Tasks
from protos.telemetry.logs import about
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)


class Reconciler:
    """Applies the decisions about the versions of one relay."""

    def __init__(
        self,
        lease: MemberLease,
        elections: Elections,
        *,
        models: ModelTable,
        store: Store,
        allocator: PoolAllocator,
        pins: RelayPins,
        fetches: Fetches,
        watchers: Watchers,
        spill: Spill | None,
        tasks: Tasks,
        changes: Changes,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._lease, self._view, self._holdings = lease, lease.view, lease.holdings
        self._elections = elections
        self._models = models
        self._store, self._allocator, self._spill = store, allocator, spill
        self._pins, self._fetches, self._watchers = pins, fetches, watchers
        self._tasks, self._changes = tasks, changes
        self._removals = Removals(store, tasks, changes)
        self._allocating: set[str] = set()  # models for whose next version memory is being allocated
        self._no_room: set[tuple[str, int]] = set()

    # ---- decisions and their effects

    def record(self, model: str, version: int, record: Announced | Sealed | Ended) -> None:
        """A record of the registry, seen or just written by this relay itself."""
        if version < self._view.dropped.get(model, 0):  # its deletion is on the way
            return
        versions = self._models.of(model)
        match record:
            case Announced():
                effects = versions.announced(record)
            case Sealed():
                effects = versions.sealed(record)
            case Ended():
                effects = versions.ended(version, record)
        self.apply(model, effects)
        self._changes.notify()

    def apply(self, model: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Fetch():
                    self._fetch(effect)
                case Show(sealed):
                    self._show(sealed)
                case Drop(version, why):
                    self._drop(model, version, why)
                case Notify():
                    self._watchers.notify(effect)

    def reconcile(self, model: str) -> None:
        """Retires what retention no longer wants and nobody uses; starts the fetch that is due."""
        versions = self._models.get(model)
        if versions is None or self._changes.closed:
            return
        self._retire(model)
        if not self._elections.is_master(model):  # the master forgets when it deletes the records
            versions.forget(versions.forgettable(2 * VERSIONS_KEPT, self._view.pinned_versions(model)))
        self._cancel_overtaken(model)
        if not self._lease.member.draining:
            versions.copy_here(self._models.copies_due(model))
            self.apply(model, versions.next_fetch())

    def drop_below(self, model: str, number: int) -> None:
        """An operator dropped all versions below this number."""
        if model in self._models:
            effects = self._models.of(model).dropped(number)
            log.info("%s: versions below %d were dropped", model, number)
            self.apply(model, effects)
        self._store.pool.forget(model)
        if self._spill is not None:
            self._spill.drop(model, number)

    def offer_again(self, snapshot: Snapshot, announced: Announced) -> None:
        """A snapshot of an earlier life, whole, is the version that was announced."""
        model, versions = snapshot.manifest.model, self._models.of(snapshot.manifest.model)
        self._store.open_again(snapshot)
        versions.opened(announced)
        self.apply(model, versions.filled(snapshot.manifest.version, snapshot.root()))

    def withdraw(self, model: str, version: int, why: str) -> None:
        """This relay's own bytes of a version do not count any more."""
        self.apply(model, self._models.of(model).withdrawn(version, why))

    def forget(self, model: str) -> None:
        self._models.forget(model)
        self._no_room = {one for one in self._no_room if one[0] != model}
        self._store.pool.forget(model)

    def report_spilled(self) -> None:
        """Reports the registry's versions that are on this disk; another registry's of the same number are none."""
        if self._spill is not None:
            on_disk = [one.manifest for one in self._spill.versions()]
            self._holdings.spilled([(one.model, one.version) for one in on_disk if self._models.has_announced(one)])

    # ---- room

    def make_room(self, model: str) -> bool:
        """Retires what can be spared; whether memory is on its way back.

        Only when none is on its way any more, what is kept aside goes, and after that pins for the fleet give way.
        """
        self._retire(model, need_room=True)
        if self._removals.num_running:
            return True
        if (aside := self._store.give_up_aside()) is not None:
            log.warning("%s, kept aside, makes room", aside)
            self._removals.start(aside, "its room is needed")
            return True
        retained = {(r.model, r.version) for _, v in self._models.items() for r in v.shown()[-v.retain :]}
        for concerned in self._pins.give_way(retained):
            self._retire(concerned, need_room=True)
        return self._removals.num_running > 0

    def has_no_room(self, model: str, version: int) -> bool:
        """Whether this relay left the chain for that version. Any thread may call it."""
        return (model, version) in self._no_room

    def _retire(self, model: str, *, need_room: bool = False) -> None:
        """With `need_room` pins alone keep a version: peers that fetch it, and the fleet, find it on other relays."""
        versions, reasons = self._models.of(model), self._pins.counts(model)
        if not need_room:
            for record in versions.shown():
                snapshot = self._store.get(model, record.version)
                is_lent = snapshot is not None and snapshot.num_links > 0
                reasons[record.version] += is_lent + self._models.is_kept_for_the_fleet(record)
        self.apply(model, versions.retire(reasons))

    # ---- showing and dropping

    def _show(self, sealed: Sealed) -> None:
        snapshot = self._store.get(sealed.model, sealed.version)
        assert snapshot is not None
        path = self._store.publish(snapshot, sealed)
        log.info(
            "%s version %d (step %d) available at %s",
            sealed.model,
            sealed.version,
            sealed.step,
            path,
            extra=about(
                relay_trace(sealed.labels, self._lease.member.name), model=sealed.model, version=sealed.version
            ),
        )
        self._holdings.hold(sealed.model, sealed.version, snapshot.holding)
        if self._spill is not None:
            self._spill.want(snapshot, sealed)

    def _drop(self, model: str, version: int, why: str) -> None:
        self._holdings.unhold(model, version)
        self._pins.drop(model, version, why)
        fetching = self._fetches.cancel(model, version)
        snapshot = self._store.get(model, version)
        if snapshot is not None:
            self._tasks.start(self._reconcile_after(self._removals.start(snapshot, why, after=fetching), model))

    async def _reconcile_after(self, removal: asyncio.Task[None], model: str) -> None:
        await asyncio.wait([removal])
        self.reconcile(model)

    # ---- fetching

    def _fetch(self, due: Fetch) -> None:
        manifest = due.announced.manifest
        if manifest.model in self._allocating:
            return
        aside = self._store.take_aside(manifest.model, manifest.version)
        if aside is not None:
            self._use_aside(aside, due.announced)
            return
        try:
            if due.copy and self._store.pool.statistics().free_bytes < 2 * manifest.size_bytes:
                raise OutOfCapacity("a copy of it, for the fleet, would take the room of the next version")
            self._store.check(manifest)
        except (OutOfCapacity, TooLarge) as error:
            self._leave_chain(due, error)
            if not due.copy and not self._store.is_taken(manifest):  # else it is not room that it lacks
                self.make_room(manifest.model)
        else:
            self._allocating.add(manifest.model)
            self._tasks.start(self._bring(due))

    def _use_aside(self, aside: Snapshot, announced: Announced) -> None:
        """What was kept aside is the version that is due, which another relay brought along, or is in its way."""
        model, state = aside.manifest.model, self._models.of(aside.manifest.model).get(aside.manifest.version)
        root = state.sealed.root_digest if state is not None and state.sealed is not None else aside.root()
        if (aside.manifest, aside.root()) == (announced.manifest, root):
            log.info("%s, kept aside, is offered again: the registry has it now", aside)
            self.offer_again(aside, announced)
        else:
            log.warning("%s, kept aside, makes way: the registry has another of its number", aside)
            removal = self._removals.start(aside, "the registry has another of its number")
            self._tasks.start(self._reconcile_after(removal, model))

    async def _bring(self, due: Fetch) -> None:
        """Memory for a version, then its bytes, then what follows from them."""
        manifest = due.announced.manifest
        what = f"version {manifest.version} of {manifest.model}"
        try:
            allotment = await self._allocator.take(manifest.model, [file.size_bytes for file in manifest.files], what)
        except OutOfCapacity as error:
            self._leave_chain(due, error)
            if not due.copy:
                self.make_room(manifest.model)
            return
        except Stopped:
            return
        finally:
            self._allocating.discard(manifest.model)
        snapshot = self._open(due, allotment)
        if snapshot is not None:
            await self._fetched(snapshot, await self._fetches.run(due.announced, snapshot))

    def _open(self, due: Fetch, allotment: Allotment) -> Snapshot | None:
        """The snapshot to fill; None when there is no room for its record, or the version is not wanted any more.

        While memory was allocated, the version may have ended, or a newer one may have been sealed.
        """
        manifest = due.announced.manifest
        if self._changes.closed or self._models.of(manifest.model).next_fetch() != [due]:
            self._store.pool.release(allotment)
            self.reconcile(manifest.model)
            return None
        try:
            snapshot = self._store.open(manifest, allotment, due.announced.labels)
        except OutOfCapacity as error:
            self._store.pool.release(allotment)
            self._leave_chain(due, error)
            return None
        except BaseException:
            self._store.pool.release(allotment)
            raise
        if due.copy:
            log.info("copying %s, which is pinned for the fleet and has lost a holder", snapshot)
        self._no_room.discard((manifest.model, manifest.version))
        self._models.of(manifest.model).opened(due.announced)
        return snapshot

    def _leave_chain(self, due: Fetch, error: OutOfCapacity | TooLarge) -> None:
        manifest = due.announced.manifest
        if not self.has_no_room(manifest.model, manifest.version):
            log.warning("leaving the chain for %s version %d: %s", manifest.model, manifest.version, error)
            self._no_room.add((manifest.model, manifest.version))

    async def _fetched(self, snapshot: Snapshot, fetched: Fetched | None) -> None:
        manifest = snapshot.manifest
        versions = self._models.of(manifest.model)
        state = versions.get(manifest.version)
        if state is None:  # dropped meanwhile: its removal waits for this task and gives the memory back
            return
        if fetched is not None and state.stage == "filling":
            over = f" over {fetched.holding.transport}" if fetched.holding.transport else ""
            log.info(
                "%s complete, %s in %.3f s%s",
                snapshot,
                show_bytes(manifest.size_bytes),
                fetched.duration_s,
                over,
                extra=about(model=manifest.model, version=manifest.version),
            )
            snapshot.holding = fetched.holding
            if self._tracer is not None and state.announced is not None:
                self._record_fetch(self._tracer, state.announced, fetched)
            self.apply(manifest.model, versions.filled(manifest.version, fetched.root_digest))
        elif state.stage == "filling":
            await asyncio.wait([self._removals.start(snapshot, "its bytes could not be had")])
            if versions.get(manifest.version) is state and state.stage == "filling":  # not ended meanwhile
                versions.gave_up(manifest.version)
        self.reconcile(manifest.model)
        self._changes.notify()

    def _record_fetch(self, tracer: Tracer, announced: Announced, fetched: Fetched) -> None:
        if fetched.holding.upstream not in self._view.members:
            return
        span = fetch_span(
            announced.manifest,
            announced.labels,
            self._lease.member.name,
            fetched.holding,
            duration_s=fetched.duration_s,
            ended_unix_s=time.time(),
        )
        if span is not None:
            tracer.record(span)

    def _cancel_overtaken(self, model: str) -> None:
        """A fetch that gets no bytes makes way for a newer sealed version; others keep what they have and wait."""
        for version in self._fetches.idle(model):
            if self._models.of(model).overtaken(version):
                log.info("%s version %d makes way for a newer one: no byte of it comes", model, version)
                self._fetches.cancel(model, version)
