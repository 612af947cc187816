"""Reasons to keep a version on this relay beyond the newest `retain`, and copies that the fleet misses here."""

from __future__ import annotations

import time
from collections import Counter

from paramserver.core.copies import PinnedVersion
from paramserver.core.pins import keepers
from paramserver.core.records import Sealed
from paramserver.core.view import View
from paramserver.memory.store import Store
from paramserver.relay.models import ModelTable
from paramserver.relay.pins import RelayPins


class Retention:
    """Reads the state of others and owns none."""

    def __init__(self, relay: str, view: View, *, models: ModelTable, store: Store, pins: RelayPins) -> None:
        self._relay, self._view, self._models, self._store, self._pins = relay, view, models, store, pins

    def reasons(self, model: str, *, need_room: bool) -> Counter[int]:
        """The number of reasons to keep each version; 0: it may retire.

        With `need_room` pins alone count: peers that fetch a version, and pins for the fleet, find it on other relays.
        """
        reasons = self._pins.counts(model)
        if not need_room:
            for record in self._models.of(model).shown():
                reasons[record.version] += self._is_lent(record) + self._is_kept_for_the_fleet(record)
        return reasons

    def _is_lent(self, record: Sealed) -> bool:
        snapshot = self._store.get(record.model, record.version)
        return snapshot is not None and snapshot.num_links > 0

    def _is_kept_for_the_fleet(self, record: Sealed) -> bool:
        pinned = self._view.pinned(record.model, record.version)
        if not pinned:
            return False
        # This relay is a holder, whether or not the registry has its key yet.
        holders = self._models.holders(record.model, record.version) | {self._relay}
        return self._relay in keepers(pinned, holders & self._view.places().keys())

    def copies_due(self, model: str) -> set[int]:
        """Versions pinned for the fleet that this relay is to copy, since a holder of one died."""
        pinned = {}
        for version in self._view.pinned_versions(model):
            state = self._models.of(model).get(version)
            if state is not None and state.ended is None:
                copies = max(self._view.pinned(model, version).values())
                pinned[version] = PinnedVersion(copies, state.holders & self._view.members.keys())
        missing = self._models.missing_copies(model)
        return missing.due(self._relay, pinned, self._view.places().keys(), time.monotonic())
