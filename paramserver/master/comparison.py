"""How an announced version differs from the one before, and what else its publisher is warned of."""

from __future__ import annotations

import asyncio
import logging

from paramserver.config import show_apart, show_bytes
from paramserver.core import architecture
from paramserver.core.layout import Layout
from paramserver.core.refused_loads import RefusedLoads
from paramserver.memory.store import Snapshot, Store
from paramserver.relay.models import ModelTable
from protos.errors import Conflict, Corrupt, NotFound

log = logging.getLogger(__name__)

WEIGHTS = ".safetensors"
OTHER = "publish another architecture under another model name, or allow it with allow_change=True"
UNTIED = (
    "tied weights that are converted one by one become tensors of their own: publish the state dict as it is, with "
    "dtype= for another dtype; or allow_change=True, once, where the tie is meant to change"
)


class Comparison:
    """Reads the versions held here, and the loads that engines refused."""

    def __init__(self, models: ModelTable, store: Store, refused_loads: RefusedLoads) -> None:
        self._models, self._store, self._refused_loads = models, store, refused_loads

    async def warnings(self, model: str, run: str, layout: Layout, *, refuse: bool) -> tuple[str, ...]:
        """For the publisher: how this differs from the version before, which engines refused that, what was lost.

        Conflict for another architecture, when that is to be refused. Versions that engines refused, and those that
        this relay does not hold, are not compared with.
        """
        shown = [record.version for record in self._models.of(model).shown()]
        warnings = [self._lost_before(model, run), "" if shown else self._room_for_one(layout)]
        warnings += [self._refused_loads.warning(model, version) for version in shown[-1:]]
        loadable = [version for version in shown if not self._refused_loads.of(model, version)]
        before = self._store.get(model, loadable[-1]) if loadable else None
        if before is not None:
            warnings += await self._differences(model, before, layout, refuse=refuse)
        return tuple(warning for warning in warnings if warning)

    def _room_for_one(self, layout: Layout) -> str:
        """For the first version: that the next will find no room beside it."""
        size_bytes, pool_bytes = sum(file.size_bytes for file in layout.files), self._store.pool.pool_bytes
        if 2 * size_bytes <= pool_bytes:
            return ""
        two, pool = show_apart(2 * size_bytes, pool_bytes)
        return (
            f"two versions of this size take {two}, the pool has {pool}: the next finds no room while this is held; "
            f"start the relays with --pool-bytes of at least {show_bytes(4 * size_bytes)}"
        )

    def _lost_before(self, model: str, run: str) -> str:
        """The end of what the run announced last, if it ended: its publisher may have dropped that ticket at copied."""
        for version, state in reversed(self._models.of(model).items()):
            if state.announced is not None and state.announced.manifest.run == run:
                return (
                    f"the run's version before, {version}, came to nothing: {state.ended.reason}" if state.ended else ""
                )
        return ""

    async def _differences(self, model: str, before: Snapshot, layout: Layout, *, refuse: bool) -> list[str]:
        found = await asyncio.to_thread(_compare, before, layout)
        warnings = []
        if found.changes:
            words = f"it differs from {before}: {architecture.some(found.changes)}"
            if refuse:
                hint = UNTIED if found.of_ties else OTHER
                raise Conflict(f"this is no next version of {model}: {words}", hint=hint)
            warnings.append(words)
        if found.conversions:
            warnings.append(f"its dtypes differ from {before}, engines convert: {architecture.some(found.conversions)}")
        return warnings


def _compare(before: Snapshot, layout: Layout) -> architecture.Differences:
    """A version held here with one that is announced. The headers of many tensors take a while to read."""
    after = [file.head for file in layout.files if file.name.endswith(WEIGHTS)]
    try:
        with before.reading():
            heads = [
                _head(file.view())
                for file, spec in zip(before.files, before.manifest.files, strict=True)
                if spec.name.endswith(WEIGHTS)
            ]
        if heads == after:
            return architecture.Differences()
        return architecture.compare(architecture.read_heads(heads), architecture.read_heads(after))
    except (NotFound, Corrupt) as error:
        log.warning("nothing is compared with %s: %s", before, error)
        return architecture.Differences()


def _head(file: memoryview) -> bytes:
    """The header of a safetensors file, with its length before it."""
    return bytes(file[: 8 + int.from_bytes(file[:8], "little")])
