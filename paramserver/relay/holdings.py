"""The registry keys of what a relay has: versions held and spilled, engines beside it.

Invariants:
- every key stands on the relay's present lease, and vanishes with it; on a new lease all are written again;
- a write holds only for the registration in which it was made: another relay may take the name of one that lost its
  lease;
- what the registry shows follows what is held: a write that fails, that is overtaken by a new lease, or that the
  registry carries out after a later one, is made again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

import msgspec

from paramserver.core import view as keys
from paramserver.core.records import Holding, RegisteredEngine
from paramserver.membership.registry import RETRY_S, Created, Delete, Put, Registry, Write, parts
from protos.failures import FailureLog

log = logging.getLogger(__name__)


class Holdings:
    """Owned by the relay's event loop; `run` writes."""

    def __init__(self, registry: Registry, relay: str) -> None:
        self._registry, self._relay = registry, relay
        self._lease_id = 0
        self._registered: Created | None = None  # this relay's own registration, for as long as its lease is kept
        self._held: dict[str, bytes] = {}
        self._written: dict[str, bytes | None] = {}  # what the registry has on this lease; None: a write in doubt
        self._differing: set[str] = set()  # keys that the registry showed with another value than they are held with
        self._changed = asyncio.Event()
        self._failures = FailureLog(log)

    def write_on(self, lease_id: int, registered: Created) -> None:
        """The relay registered on a new lease: all is written again, on that one."""
        self._lease_id, self._registered = lease_id, registered
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

    def compare(self, key: str, found: bytes | None) -> None:
        """Has a key written again that the registry shows with another value than it is held with; None: no such key.

        The registry may carry out a write that it did not respond to after later ones that it did respond to: only
        what the watch shows is certain. An event older than the newest write costs one write that changes nothing.
        """
        if keys.is_own_copy(key, self._relay) and self._held.get(key) != found:
            self._differing.add(key)
            self._changed.set()

    def compare_all(self, found: Mapping[str, bytes]) -> None:
        """As `compare`, for all keys that the registry has."""
        for key in found.keys() | self._held.keys():
            self.compare(key, found.get(key))

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
        lease, registered = self._lease_id, self._registered
        if registered is None:
            return
        self._written |= dict.fromkeys(self._differing)
        self._differing.clear()
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
            outcome = await self._registry.transact([registered], part)
            # Without the lease another relay may have taken the name, and these keys are that one's: the guard fails.
            # A new lease while this part was on its way: its keys may stand on the old one, and go with it. `_written`
            # was cleared for the new lease, so they must not count as written.
            if not outcome.succeeded or self._lease_id != lease:
                return
            for write in part:
                if isinstance(write, Put):
                    self._written[write.key] = write.value
                else:
                    self._written.pop(write.key, None)
