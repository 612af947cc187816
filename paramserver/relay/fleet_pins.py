"""Pins for the whole fleet: keys in the registry that make so many relays keep a version.

Invariants:
- a pin's key stands on a lease of its own, as long as the pin's: when this relay dies, the other copies stay until the
  holder has had the time to pin elsewhere;
- one call about a pin at a time goes to the registry: what ends while it is told is told first, and then ended;
- the pin on this relay holds whether or not the registry can be reached; the key follows with the next renewal.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakValueDictionary

import msgspec

from paramserver.core import view as keys
from paramserver.core.pins import Pin
from paramserver.core.records import FleetPin
from paramserver.membership.registry import Put, Registry
from protos.errors import Unavailable

log = logging.getLogger(__name__)


class FleetPins:
    """The keys of one relay's pins with `copies`; others are none of its business."""

    def __init__(self, registry: Registry, relay: str) -> None:
        self._registry, self._relay = registry, relay
        self._leases: dict[str, int] = {}  # of the registry, by the pin's
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of pins that are told right now

    def _turn(self, pin: Pin) -> asyncio.Lock:
        return self._turns.setdefault(pin.lease_id, asyncio.Lock())

    async def tell(self, pin: Pin) -> None:
        """The pin was made or renewed."""
        if not pin.copies:
            return
        async with self._turn(pin):
            await self._tell(pin)

    async def _tell(self, pin: Pin) -> None:
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

    async def leave(self, pin: Pin) -> None:
        """Its version is here no more: the key stays until its time is over, for the holder to pin another copy."""
        if pin.copies:
            async with self._turn(pin):
                self._leases.pop(pin.lease_id, None)

    async def end(self, pin: Pin) -> None:
        """The pin is no more: released, lapsed, or taken away."""
        if not pin.copies:
            return
        async with self._turn(pin):
            lease = self._leases.pop(pin.lease_id, None)
        if lease is None:
            return
        try:
            await self._registry.revoke(lease)
        except Unavailable as error:
            log.info("the key of %s's pin runs out by itself: %s", pin.holder, error)
