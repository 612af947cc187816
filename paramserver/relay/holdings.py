"""The registry keys of what a relay has: versions held and spilled, engines beside it.

Invariants:
- every key stands on the relay's present lease, and vanishes with it; on a new lease all are written again;
- what is written follows what is held: a write that fails, or is overtaken by a new lease, is made again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

import msgspec

from paramserver.background import FailureLog
from paramserver.core import view as keys
from paramserver.core.records import Holding, RegisteredEngine
from paramserver.membership.registry import RETRY_S, Delete, Put, Registry, Write, parts

log = logging.getLogger(__name__)


class Holdings:
    """Owned by the relay's event loop; `run` writes."""

    def __init__(self, registry: Registry, relay: str) -> None:
        self._registry, self._relay = registry, relay
        self._lease_id = 0
        self._held: dict[str, bytes] = {}
        self._written: dict[str, bytes | None] = {}  # what the registry has on this lease; None: a write in doubt
        self._changed = asyncio.Event()
        self._failures = FailureLog(log)

    def write_on(self, lease_id: int) -> None:
        """The relay has a new lease: all is written again, on that one."""
        self._lease_id = lease_id
        self._written.clear()
        self._changed.set()

    def hold(self, model: str, version: int, holding: Holding) -> None:
        """This relay holds the version complete, verified and sealed."""
        self._set(keys.holder_key(model, version, self._relay), msgspec.json.encode(holding))

    def unhold(self, model: str, version: int) -> None:
        self._set(keys.holder_key(model, version, self._relay), None)

    def register(self, engines: Sequence[RegisteredEngine]) -> None:
        """Engines beside this relay; gateways see them as long as its lease holds."""
        for engine in engines:
            self._set(keys.engine_key(engine.name), msgspec.json.encode(engine))

    def spilled(self, versions: Collection[tuple[str, int]]) -> None:
        """Replaces the set of (model, version) that this relay can read back from its disk."""
        wanted = {keys.spilled_key(model, version, self._relay) for model, version in versions}
        for key in [key for key in self._held if keys.is_spilled(key) and key not in wanted]:
            self._set(key, None)
        for key in wanted:
            self._set(key, b"")

    def _set(self, key: str, value: bytes | None) -> None:
        if self._held.get(key) == value:
            return
        if value is None:
            del self._held[key]
        else:
            self._held[key] = value
        self._changed.set()

    async def run(self) -> None:
        """Writes what comes and goes, for ever."""
        what = "the registry does not have all that is held here"
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._failures.contained(what):
                await self._write()
            if self._failures.is_failing(what):
                self._changed.set()
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        """In parts, since after a lost lease all of it is written again; the newest versions first."""
        lease = self._lease_id
        writes: list[Write] = [
            Put(key, value, lease)
            for key, value in sorted(self._held.items(), reverse=True)
            if self._written.get(key) != value
        ]
        writes += [Delete(key) for key in sorted(self._written.keys() - self._held.keys())]
        for part in parts(writes):
            # Until the registry responds, each of these keys may be there or not. A key whose write was carried out
            # without a response, and that is not wanted any more, would claim for as long as the lease that it is held.
            self._written |= {write.key: None for write in part}
            await self._registry.transact([], part)
            # A new lease while this part was on its way: its keys may stand on the old one, and go with it. `_written`
            # was cleared for the new lease, so they must not count as written.
            if self._lease_id != lease:
                return
            for write in part:
                if isinstance(write, Put):
                    self._written[write.key] = write.value
                else:
                    self._written.pop(write.key, None)
