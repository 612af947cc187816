"""Pins on relays for versions that sessions insist on, so that they can be loaded again when no engine serves them.

Invariants:
- one pin for each version, for the fleet: its relay and one more keep it, whatever their retention says;
- the pins are leases: they end by themselves some time after the gateway, and give way to a version that finds no other
  room; what was taken away is pinned again as soon as some relay holds it, and the timeline tells of both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gateway.core.keeping import KeptVersions
from gateway.core.types import Version
from gateway.data import Timeline
from gateway.relays import Relays
from paramserver.client import Lease, RelayClient
from protos.errors import LaminarError, NotFound, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

HOLDER = "gateway/sessions"
COPIES = 2
"""Of a version: one more relay than may die."""
TTL_S = 60.0
"""A gateway that is started again within it finds the versions of its sessions where they were."""
LOOK_S = 0.5
"""How soon a version is pinned after its first session, or released after its last."""


@dataclass(slots=True)
class _Pin:
    relay: str
    lease: Lease
    renew_at: float


class Pinning:
    """Owner of the pins; `kept` says which there are to be."""

    def __init__(self, model: str, kept: KeptVersions, relays: Relays, timeline: Timeline) -> None:
        self._model, self._kept, self._relays, self._timeline = model, kept, relays, timeline
        self._pins: dict[Version, _Pin] = {}

    @property
    def pinned(self) -> Mapping[Version, str]:
        """By version, the relay that has its pin."""
        return {version: pin.relay for version, pin in sorted(self._pins.items())}

    async def run(self) -> None:
        """Until cancelled; what is pinned then stays so for `TTL_S`, for the next life of this gateway."""
        while True:
            await self.look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def look(self, now: float) -> None:
        wanted = self._kept.versions()
        for version in [v for v in self._pins if v not in wanted]:
            await self._release(version)
        for version in wanted:
            pin = self._pins.get(version)
            if pin is None:
                await self._pin(version, now)
            elif now >= pin.renew_at:
                await self._renew(version, pin, now)

    async def _pin(self, version: Version, now: float) -> None:
        for address in self._relays.holders(version):
            try:
                relay = self._client(address)
                lease = await _told(relay.acquire(self._model, version, holder=HOLDER, ttl_s=TTL_S, copies=COPIES))
            except NotFound:
                self._relays.gone(address, version)
            except LaminarError as e:
                log.warning("version %d is not pinned at relay %s: %s", version, address, e)
            else:
                self._pins[version] = _Pin(address, lease, now + TTL_S / 3)
                self._timeline.add("pin", version=version, relay=address, state="pinned")
                return

    async def _renew(self, version: Version, pin: _Pin, now: float) -> None:
        try:
            await _told(self._client(pin.relay).renew(pin.lease))
            pin.renew_at = now + TTL_S / 3
        except LaminarError as e:
            log.warning("the pin of version %d at relay %s is lost: %s", version, pin.relay, e)
            self._timeline.add("pin", version=version, relay=pin.relay, state="lost", reason=str(e))
            del self._pins[version]
            await self._pin(version, now)

    async def _release(self, version: Version) -> None:
        pin = self._pins.pop(version)
        self._timeline.add("pin", version=version, relay=pin.relay, state="released")
        try:
            await _told(self._client(pin.relay).release(pin.lease))
        except LaminarError as e:
            log.info("the pin of version %d at relay %s ended before: %s", version, pin.relay, e)

    def _client(self, address: str) -> RelayClient:
        if address not in self._relays.addresses():
            raise NotFound(f"relay {address} was let go")
        return self._relays.client(address)


async def _told(call: Awaitable[T]) -> T:
    """gRPC cancels a call whose channel is closed under it, as happens when the last engine of a relay leaves."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("its relay was let go meanwhile") from None
