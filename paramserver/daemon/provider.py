"""The snapshots that the data port serves and lets publishers write; called from the port's threads."""

from __future__ import annotations

import asyncio
import logging
import time

from paramserver.daemon.parts import RelayParts
from paramserver.memory.store import Snapshot
from protos.errors import Corrupt, NotFound

log = logging.getLogger(__name__)


class SnapshotProvider:
    """`paramserver.data.server.Provider` over a relay. Made on the relay's event loop."""

    def __init__(self, parts: RelayParts) -> None:
        self._store, self._models, self._drafts = parts.store, parts.models, parts.drafts
        self._reconciler, self._notices = parts.reconciler, parts.notices
        self._loop = asyncio.get_running_loop()

    def find(self, model: str, version: int, timeout_s: float) -> Snapshot | None:
        snapshot = self._store.wait(model, version, timeout_s)
        if snapshot is None:
            versions = self._models.get(model)
            state = versions.get(version) if versions else None
            if state is not None and state.stage in ("skipped", "retired", "ended"):
                raise NotFound(f"version {version} of {model} is {state.stage} here")
            if self._reconciler.has_no_room(model, version):  # relays behind this one must not wait for it here
                raise NotFound(f"no room for version {version} of {model} here")
        return snapshot

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        return self._drafts.writable(model, version, token)

    def chunk_is_bad(self, snapshot: Snapshot, error: Corrupt) -> None:
        log.error("withdrawing as holder: %s", error)
        self._notices.add(f"{snapshot} is dropped here: {error.message}", time.time())
        manifest = snapshot.manifest
        self._loop.call_soon_threadsafe(self._reconciler.withdraw, manifest.model, manifest.version, str(error))
