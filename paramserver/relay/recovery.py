"""Recovery of what a relay's earlier life left: snapshots are offered again, numbers are never given again.

Both run once, before this relay can be elected or fetches anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paramserver.core.records import Announced, Manifest, Plan
from paramserver.core.view import View
from paramserver.memory.store import Snapshot, Store
from paramserver.relay.elections import Elections
from paramserver.relay.models import ModelTable
from paramserver.relay.reconciler import Reconciler

log = logging.getLogger(__name__)


async def skip_earlier_numbers(
    manifests: Iterable[Manifest], view: View, elections: Elections, models: ModelTable
) -> None:
    """Versions left here may belong to a registry that was replaced: their numbers are not given again.

    Raises Unavailable.
    """
    newest: dict[str, Manifest] = {}
    for manifest in manifests:
        if manifest.epoch.store_id not in {view.store_id, *view.continues}:
            newest[manifest.model] = max(newest.get(manifest.model, manifest), manifest, key=lambda one: one.version)
    for model, manifest in sorted(newest.items()):
        old, number = manifest.epoch.store_id, manifest.version
        log.error(
            "the registry was replaced: it is %s, and version %d of %s, left here by an earlier life, is of %s; "
            "readers refuse this one until `paramserver adopt --continues %s --model %s --above %d`",
            *(view.store_id, number, model, old, old, model, number),
        )
        models.of(model).skip_to(number + 1)
        await elections.skip_numbers(model, number + 1)


def offer_again(found: Iterable[Snapshot], store: Store, models: ModelTable, reconciler: Reconciler) -> None:
    """Snapshots whose bytes were hashed: those that the registry has sealed count, the memory of others is free."""
    for snapshot in found:
        manifest = snapshot.manifest
        versions = models.of(manifest.model)
        state = versions.get(manifest.version)
        root = snapshot.root()
        if state is None or state.sealed is None or state.ended is not None or state.sealed.root_digest != root:
            log.info("%s, left by an earlier life, is not sealed as it is here", snapshot)
            store.remove(snapshot, "not sealed")
            continue
        store.open_again(snapshot)
        versions.opened(state.announced or Announced(manifest, Plan(manifest.epoch, 0, ())))
        reconciler.apply(manifest.model, versions.filled(manifest.version, root))
