"""Recovery of what a relay's earlier life left in memory and on disk.

It runs once, before this relay can be elected or fetches anything.

Invariants:
- a number that is carried here is never given again;
- versions sealed here that the registry does not have, since it was restored from a backup, are sealed here again; the
  master's duties record them there, as they do in a registry that was adopted;
- versions of another registry are not, since an operator decides which one is right; nor are those without which a
  restored registry has gone on. They are kept aside, until their room is needed or the registry has them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable

from paramserver.core.notices import Notices
from paramserver.core.records import Announced, Manifest, Plan, Sealed
from paramserver.core.versions import GoneBack
from paramserver.core.view import View
from paramserver.memory.store import Snapshot, Store
from paramserver.memory.stored import StoredSnapshot
from paramserver.relay.elections import Elections
from paramserver.relay.models import ModelTable
from paramserver.relay.reconciler import Reconciler

log = logging.getLogger(__name__)

NUMBERS_SKIPPED = 1000
"""Versions that a relay may have missed of its registry; numbers cost nothing, and the missed ones are in use."""

Left = tuple[Manifest, Sealed]
"""A version that was whole and sealed, by its record beside its bytes."""


class Recovery:
    """Owned by the relay's start."""

    def __init__(
        self, view: View, elections: Elections, models: ModelTable, reconciler: Reconciler, notices: Notices
    ) -> None:
        self._view, self._elections, self._models = view, elections, models
        self._reconciler, self._notices = reconciler, notices

    async def know_again(self, stored: Iterable[StoredSnapshot], whole: Iterable[StoredSnapshot]) -> None:
        """Skips the numbers of all that is stored here, and knows again what the registry lost of it, as far as that
        is whole. Raises Unavailable."""
        mine: dict[str, dict[int, Left]] = {}
        for one in whole:
            was_dropped = one.manifest.version < self._view.dropped.get(one.manifest.model, 0)
            if not self._is_foreign(one.manifest) and not was_dropped:
                mine.setdefault(one.manifest.model, {})[one.manifest.version] = (one.manifest, one.sealed)
        newest: dict[str, Manifest] = {}
        for manifest in (one.manifest for one in stored):
            newest[manifest.model] = max(newest.get(manifest.model, manifest), manifest, key=lambda one: one.version)
        for model, manifest in sorted(newest.items()):
            versions = self._models.of(model)
            left = [one for _, one in sorted(mine.get(model, {}).items())]
            gone = versions.gone_back(left, self._view.store_id)
            skipped, next_number = NUMBERS_SKIPPED if gone.lost or gone.apart or gone.twice else 1, versions.next_number
            skip_to = manifest.version + skipped
            if self._is_foreign(manifest):
                self._note_foreign(manifest)
            self._note_gone_back(model, gone, skip_to)
            if gone.lost:
                await self._elections.want(model)
            if skip_to > next_number:
                versions.skip_to(skip_to)
                await self._elections.skip_numbers(model, skip_to)
            for of, sealed in gone.lost:
                self._reconciler.record(model, of.version, Announced(of, Plan(of.epoch, 0, ()), sealed.labels))
                self._reconciler.record(model, of.version, sealed)

    def offer_again(self, found: Iterable[Snapshot], store: Store) -> None:
        """Snapshots whose bytes were hashed: those that are sealed as they are count, the memory of others is free."""
        for snapshot in found:
            manifest = snapshot.manifest
            versions = self._models.of(manifest.model)
            state = versions.get(manifest.version)
            root = snapshot.root()
            oldest_kept = max((versions.newest_sealed or 0) + 1, self._view.dropped.get(manifest.model, 0))
            if state is None and (self._is_foreign(manifest) or manifest.version >= oldest_kept):
                store.keep_aside(snapshot)
                continue
            if state is None or state.sealed is None or state.ended is not None or state.sealed.root_digest != root:
                why = state.ended.reason if state and state.ended else "the registry has another, or none of its number"
                level = logging.INFO if state is None else logging.WARNING  # it is long past, or was dropped
                self._note(level, f"{snapshot}, left by an earlier life, is dropped: {why}")
                store.remove(snapshot, "not sealed")
                continue
            self._reconciler.offer_again(snapshot, state.announced or Announced(manifest, Plan(manifest.epoch, 0, ())))

    def _is_foreign(self, manifest: Manifest) -> bool:
        return manifest.epoch.store_id not in {self._view.store_id, *self._view.continues}

    def _note_foreign(self, newest: Manifest) -> None:
        model, old, number = newest.model, newest.epoch.store_id, newest.version
        self._note(
            logging.ERROR,
            f"the registry was replaced: it is {self._view.store_id}, and version {number} of {model}, left here by an "
            f"earlier life, is of {old}; readers refuse this one until `paramserver adopt --continues {old} --model "
            f"{model} --above {number}`. What is left is kept aside until its room is needed; a start after that "
            "command offers it again",
        )

    def _note_gone_back(self, model: str, gone: GoneBack, skip_to: int) -> None:
        back, then = "the registry went back (was it restored from a backup?)", f"the next number is {skip_to} at least"
        if gone.lost:
            lost = _list([sealed.version for _, sealed in gone.lost])
            what = f"it does not know {lost} of {model}, sealed before and found here. They are offered again"
            self._note(logging.WARNING, f"{back}: {what}, and {then}")
        if gone.twice:
            what = f"gave {_list(gone.twice)} of {model} again. What it has of that number counts, what was found here"
            self._note(logging.ERROR, f"{back} and {what} does not, and {then}")
        if gone.apart:
            what = f"has gone on without {_list(gone.apart)} of {model}, sealed before and found here"
            why = "now kept aside, since readers would go back to other weights"
            self._note(logging.ERROR, f"{back} and {what}, {why}, and {then}")

    def _note(self, level: int, text: str) -> None:
        log.log(level, "%s", text)
        if level >= logging.WARNING:
            self._notices.add(text, time.time())


def _list(numbers: Collection[int]) -> str:
    return f"version{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
