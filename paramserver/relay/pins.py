"""Pins of versions on this relay, and the keys in the registry by which a pin makes several relays keep a version.

Invariants:
- a pin's key stands on a lease of its own, as long as the pin's: when this relay dies, the other copies stay until the
  holder has had the time to pin elsewhere;
- one registry call about a pin at a time: a pin that ends while its key is written is written first, and removed then;
- the pin on this relay holds whether or not the registry can be reached; the key follows with the next renewal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection
from weakref import WeakValueDictionary

import msgspec

from paramserver.core import view as keys
from paramserver.core.pins import Pin, Pins
from paramserver.core.records import FleetPin, Sealed
from paramserver.membership.registry import Put, Registry
from paramserver.memory.store import Store
from paramserver.relay.models import ModelTable
from protos.errors import NotFound, Unavailable
from protos.tasks import Tasks

log = logging.getLogger(__name__)


class FleetPinKeys:
    """The registry keys of one relay's pins with `copies`. Pins without copies have no key."""

    def __init__(self, registry: Registry, relay: str) -> None:
        self._registry, self._relay = registry, relay
        self._leases: dict[str, int] = {}  # the registry's, by the pin's lease id
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of pins with a call under way

    def _lock(self, pin: Pin) -> asyncio.Lock:
        return self._locks.setdefault(pin.lease_id, asyncio.Lock())

    async def write(self, pin: Pin) -> None:
        """Writes the key of a new pin; keeps that of a renewed one alive."""
        if not pin.copies:
            return
        async with self._lock(pin):
            await self._write(pin)

    async def _write(self, pin: Pin) -> None:
        try:
            lease = self._leases.get(pin.lease_id)
            if lease is not None and await self._registry.keep_alive(lease):
                return
            lease = await self._registry.grant(pin.ttl_s)
            value = msgspec.json.encode(FleetPin(self._relay, pin.copies))
            await self._registry.transact([], [Put(keys.pin_key(pin.model, pin.version, pin.lease_id), value, lease)])
            self._leases[pin.lease_id] = lease
        except Unavailable as error:
            log.warning("version %d of %s is pinned here alone for now: %s", pin.version, pin.model, error)

    async def abandon(self, pin: Pin) -> None:
        """The version left this relay. The key stays until its lease expires, for the holder to pin another copy."""
        if pin.copies:
            async with self._lock(pin):
                self._leases.pop(pin.lease_id, None)

    async def remove(self, pin: Pin) -> None:
        """The pin was released, lapsed, or gave way."""
        if not pin.copies:
            return
        async with self._lock(pin):
            lease = self._leases.pop(pin.lease_id, None)
        if lease is None:
            return
        try:
            await self._registry.revoke(lease)
        except Unavailable as error:
            log.info("the key of %s's pin stays until its lease expires: %s", pin.holder, error)


class RelayPins:
    """The pins on versions of this relay; owned by its event loop."""

    def __init__(self, registry: Registry, relay: str, *, models: ModelTable, store: Store, tasks: Tasks) -> None:
        self._relay, self._models, self._store, self._tasks = relay, models, store, tasks
        self._pins = Pins()
        self._keys = FleetPinKeys(registry, relay)

    async def acquire(
        self, lease_id: str, model: str, version: int | None, holder: str, ttl_s: float, copies: int = 0
    ) -> tuple[Pin, Sealed, str]:
        """Pins a shown version (None: the newest); its record, and its directory. NotFound names what is here."""
        shown = {record.version: record for record in self._models.shown(model)}
        wanted = max(shown, default=None) if version is None else version
        if wanted is None or wanted not in shown:
            raise NotFound(
                f"relay {self._relay} holds no sealed version {version or ''} of {model}".replace("  ", " "),
                hint=f"held here: {', '.join(map(str, sorted(shown))) or 'none yet'}",
            )
        pin = self._pins.add(lease_id, model, wanted, holder, ttl_s, time.monotonic(), copies)
        await self._keys.write(pin)
        # While the key was written, the version may have gone all the same: its bytes turned out bad, or it was lost.
        snapshot = self._store.get(model, wanted)
        if snapshot is None or not self._pins.holds(lease_id):
            raise NotFound(f"the pin on version {wanted} of {model} is not held: it is here no more")
        return pin, shown[wanted], str(snapshot.directory)

    async def renew(self, lease_id: str) -> None:
        await self._keys.write(self._pins.renew(lease_id, time.monotonic()))

    async def release(self, lease_id: str) -> Pin:
        """The pin that ended; whoever releases it then retires what it kept."""
        pin = self._pins.release(lease_id, time.monotonic())
        await self._keys.remove(pin)
        return pin

    def expire(self) -> None:
        for pin in self._pins.expire(time.monotonic()):
            log.warning("pin of %s on %s version %d lapsed", pin.holder, pin.model, pin.version)
            self._tasks.start(self._keys.remove(pin))

    def drop(self, model: str, version: int, why: str) -> None:
        """Ends the pins of a version that leaves this relay all the same."""
        for pin in self._pins.dropped(model, version):
            log.warning("pin of %s on %s version %d ends with it: %s", pin.holder, model, version, why)
            self._tasks.start(self._keys.abandon(pin))

    def give_way(self, retained: Collection[tuple[str, int]]) -> set[str]:
        """Ends the pins for the fleet on one version outside `retained`, the oldest first; the models concerned."""
        ended = self._pins.give_way(retained)
        for pin in ended:
            log.warning("pin of %s on %s version %d gives way: its room is needed", pin.holder, pin.model, pin.version)
            self._tasks.start(self._keys.remove(pin))
        return {pin.model for pin in ended}

    def counts(self, model: str) -> Counter[int]:
        """Pins per version of one model."""
        return self._pins.counts(model)

    def all(self) -> list[Pin]:
        return self._pins.all()
