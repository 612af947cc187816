"""One relay: applies the registry's changes to its parts, and does what is due as time passes.

Invariants:
- an error about one fact, model or pin costs that one alone: the loops go on;
- without the registry the relay goes on with its last view: bytes flow, pins hold, nothing new is sealed.
"""

from __future__ import annotations

import asyncio
import logging

from paramserver.core.stragglers import Hop
from paramserver.core.view import (
    DroppedFact,
    Fact,
    HolderFact,
    MasterFact,
    MemberFact,
    SkippedFact,
    SpilledFact,
    VersionFact,
)
from paramserver.memory.allocator import PoolAllocator
from paramserver.memory.store import Store
from paramserver.relay.changes import Changes
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.models import ModelTable
from paramserver.relay.pins import RelayPins
from paramserver.relay.reconciler import Reconciler
from protos.failures import FailureLog

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.25


class Relay:
    """The loops of one relay; everything that it owns lives on one event loop."""

    def __init__(
        self,
        lease: MemberLease,
        reconciler: Reconciler,
        *,
        models: ModelTable,
        store: Store,
        allocator: PoolAllocator,
        pins: RelayPins,
        changes: Changes,
    ) -> None:
        self._lease, self._view = lease, lease.view
        self._reconciler = reconciler
        self._models = models
        self._store, self._allocator = store, allocator
        self._pins, self._changes = pins, changes
        self._settled: dict[str, int] = {}  # revisions of models' versions at which nothing was left to do
        self._failures = FailureLog(log)

    async def follow(self) -> None:
        """Applies the registry's state and changes, for ever."""
        async for facts in self._lease.follow():
            for fact in facts:
                with self._failures.contained(f"not applied: {type(fact).__name__} of {_subject(fact)}"):
                    self.apply(fact)
            self._reconcile_all()
            self._changes.notify()

    async def refresh(self) -> None:
        """Reads the registry as it is now, and applies it. Raises Unavailable."""
        for fact in await self._lease.refresh():
            self.apply(fact)
        self._changes.notify()

    def apply(self, fact: Fact) -> None:
        match fact:
            case VersionFact(model, version, record):
                self._reconciler.record(model, version, record)
            case HolderFact(model, version, relay, present, holding):
                self._models.of(model).holder(version, relay, present=present and not self._is_dropped(model, version))
                if holding is not None and holding.rate_bytes_s:
                    hop = Hop(version, holding.upstream, relay, holding.rate_bytes_s, holding.rtt_s, holding.transport)
                    self._models.stragglers(model).observe(hop)
            case SpilledFact(model, version, relay, present):
                self._models.of(model).spilled(version, relay, present=present and not self._is_dropped(model, version))
            case SkippedFact(model, number):
                self._models.of(model).skip_to(number)
            case DroppedFact(model, number):
                self._reconciler.drop_below(model, number)
            case MasterFact(model, seen):
                log.info("%s: master is %s", model, seen.master.name if seen else "nobody")
            case MemberFact(name, member):
                log.info("relay %s %s", name, "joined" if member else "left")
                self._models.forget_relays_that_left()

    def _is_dropped(self, model: str, version: int) -> bool:
        """A copy of such a version is on its way out, and nothing else would be left of its model."""
        return version < self._view.dropped.get(model, 0)

    async def housekeep(self) -> None:
        """Pins that lapse, versions that retire, quarantine that clears, fetches that may go better now."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            with self._failures.contained("pins that lapsed are not ended"):
                self._pins.expire()
            with self._failures.contained("quarantined memory is not checked"):
                self._store.pool.sweep()
            with self._failures.contained("memory is not cut for the versions to come"):
                self._allocator.cut()
            with self._failures.contained("records of versions shown here are not written"):
                self._store.record_shown()
            with self._failures.contained("the registry does not know what is on this disk"):
                self._reconciler.report_spilled()
            self._reconcile_all()
            self._changes.notify()

    def _reconcile_all(self) -> None:
        for model in self._models.unused():
            self._view.forget(model)
            self._settled.pop(model, None)
            self._reconciler.forget(model)
        for model, versions in self._models.items():
            if self._is_settled(model):
                continue
            with self._failures.contained(f"versions of {model} neither come nor go here"):
                self._reconciler.reconcile(model)
                if versions.settled:
                    self._settled[model] = versions.revision

    def _is_settled(self, model: str) -> bool:
        """Whether reconciling the model again would do nothing: true of most models most of the time."""
        pinned = bool(self._view.pinned_versions(model)) if self._view.pins else False
        return not pinned and self._settled.get(model) == self._models.of(model).revision


def _subject(fact: Fact) -> str:
    """The model, version or relay of a fact, for logs."""
    if isinstance(fact, MemberFact):
        return fact.name
    version = getattr(fact, "version", None)
    return fact.model if version is None else f"{fact.model} version {version}"
