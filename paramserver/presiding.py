"""A master's standing duties: win elections, settle what an earlier master left, note what was lost, prune, resign.

Invariants:
- before it announces anything, a new master ends what an earlier one announced and never sealed;
- every write holds only while this relay's election does;
- only the newest sealed version can be lost: older ones retire by design.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from paramserver.core import view as keys
from paramserver.core.records import Ended, Epoch
from paramserver.drafts import Drafts
from paramserver.membership.registry import Absent, Delete, Put
from paramserver.relay import VERSIONS_KEPT, Relay
from paramserver.sealing import end_version
from paramserver.seat import RETRY_S
from protos.errors import StaleEpoch, Unavailable

log = logging.getLogger(__name__)

LOST_GRACE_S = 10.0  # holders whose lease lapsed in an outage get this long to register again


class Presiding:
    """What this relay does for the models of which it is, or may become, master."""

    def __init__(self, relay: Relay, drafts: Drafts) -> None:
        self._relay = relay
        self._drafts = drafts
        self._settled: dict[str, Epoch] = {}
        self._lost_since: dict[tuple[str, int], float] = {}

    async def preside(self) -> None:
        """Stands in elections, settles what an earlier master left, and records what was lost."""
        while True:
            await asyncio.sleep(RETRY_S / 2)
            try:
                for model in await self._relay.seat.stand(self._newest_holders(), time.monotonic()):
                    await self.settle(model)
                for model in self._mastered():
                    await self.settle(model)  # again, when an answer was lost in the election or in settling
                    await self._note_lost(model)
                    await self._prune(model)
            except Unavailable as error:
                log.debug("as master: %s", error)
            except StaleEpoch as error:
                log.info("%s", error)

    async def settle(self, model: str) -> None:
        """Once in each epoch: reads everything, then ends what an earlier master announced and never sealed."""
        epoch = self._relay.seat.epoch(model)
        if epoch is not None and self._settled.get(model) == epoch:
            return
        await self._relay.refresh()
        epoch = self._relay.seat.epoch(model)
        if epoch is None:
            return
        for version, state in self._relay.of(model).items():
            if state.announced is None or state.sealed is not None or state.ended is not None:
                continue
            begun = state.announced.manifest.epoch
            if begun.store_id == epoch.store_id and begun != epoch:  # nobody here knows what came of another store's
                await end_version(
                    self._relay.seat, model, version, epoch, Ended("aborted", "its master died before it was sealed")
                )
        await self._bring_along(model, epoch)
        self._settled[model] = epoch

    async def _note_lost(self, model: str) -> None:
        """Records sealed versions that nobody has held for a while. The newest decide; old ones retire by design."""
        epoch = self._relay.seat.epoch(model)
        newest = self._relay.of(model).newest_sealed
        if epoch is None or newest is None:
            return
        state = self._relay.of(model).get(newest)
        assert state is not None
        if state.holders or state.spilled or state.stage in ("complete", "shown"):
            self._lost_since.pop((model, newest), None)
            return
        since = self._lost_since.setdefault((model, newest), time.monotonic())
        if time.monotonic() - since > LOST_GRACE_S:
            await end_version(self._relay.seat, model, newest, epoch, Ended("lost", "no verified holder is left"))

    async def _prune(self, model: str) -> None:
        """Deletes the registry's records of versions long past, so that it does not grow without bound."""
        epoch = self._relay.seat.epoch(model)
        old = self._relay.of(model).forget(VERSIONS_KEPT, self._relay.view.pinned_versions(model))
        if epoch is None or not old:
            return
        writes = [Delete(keys.version_key(model, v, what)) for v in old for what in ("announced", "sealed", "ended")]
        await self._relay.seat.as_master(epoch, model, [], writes)

    # ---- leaving, and joining another registry

    async def resign(self, model: str) -> bool:
        """Gives the model to whoever is elected next; False while a version of it is being written or sealed."""
        epoch = self._relay.seat.epoch(model)
        busy = self._drafts.busy(model)
        if epoch is None or busy:
            return not busy
        await self._relay.seat.as_master(epoch, model, [], [Delete(keys.master_key(model))])
        return True

    async def _bring_along(self, model: str, epoch: Epoch) -> None:
        """Records what is held here and this registry does not know: it was replaced, and this relay adopted it."""
        for record in self._relay.of(model).shown():
            state = self._relay.of(model).get(record.version)
            seal_key = keys.version_key(model, record.version, "sealed")
            if state is None or state.announced is None or self._relay.view.knows(seal_key):
                continue
            writes = [
                Put(keys.version_key(model, record.version, "announced"), msgspec.json.encode(state.announced)),
                Put(seal_key, msgspec.json.encode(record)),
            ]
            await self._relay.seat.as_master(epoch, model, [Absent(seal_key)], writes)
            log.info("%s version %d is recorded in the new registry", model, record.version)

    def _newest_holders(self) -> dict[str, set[str]]:
        found = {}
        for model, versions in self._relay.models.items():
            newest = versions.newest_sealed
            state = versions.get(newest) if newest is not None else None
            found[model] = set(state.holders) if state is not None else set()
        return found

    def _mastered(self) -> list[str]:
        return sorted(model for model in self._relay.view.masters if self._relay.seat.is_master(model))
