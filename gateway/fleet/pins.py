"""Pins on relays for versions that may have to be loaded again: those that sessions insist on, and those that engines
go back to when newer ones do not load.

Invariants:
- one pin for each version that sessions insist on, for the fleet: its relay and one more keep it, whatever their
  retention says;
- one at each relay for the newest version that an engine beside it has held, until one holds a newer one: however many
  bad versions are published meanwhile, there is one to go back to;
- the pins are leases: they end by themselves some time after the gateway, and give way to a version that finds no other
  room; what was taken away is pinned again as soon as some relay holds it, and the timeline tells of both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass

from gateway.core.pinned import PinnedVersions
from gateway.core.types import Version
from gateway.fleet.relays import Relays
from gateway.runtime.standing import own
from gateway.store import Timeline
from paramserver.client import Lease, RelayClient
from protos.errors import LaminarError, NotFound

log = logging.getLogger(__name__)

HOLDER = "gateway/sessions"
FALLBACK_HOLDER = "gateway/fallback"
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


class VersionPins:
    """Owner of the pins; `kept` says which there are to be."""

    def __init__(
        self,
        model: str,
        kept: PinnedVersions,
        relays: Relays,
        timeline: Timeline,
        fallbacks: Callable[[], Mapping[str, Version]],
    ) -> None:
        self._model, self._kept, self._relays, self._timeline = model, kept, relays, timeline
        self._fallbacks = fallbacks
        self._fallback_pins: dict[str, _Pin] = {}  # by relay
        self._pins: dict[Version, _Pin] = {}
        self._said: dict[Hashable, str] = {}  # what went wrong with it, as it was last logged

    @property
    def pinned(self) -> Mapping[Version, str]:
        """By version, the relay that has its pin."""
        return {version: pin.relay for version, pin in sorted(self._pins.items())}

    @property
    def fallbacks(self) -> Mapping[str, Version]:
        """By relay, the version that is pinned there for its engines to go back to."""
        return {relay: Version(pin.lease.version) for relay, pin in sorted(self._fallback_pins.items())}

    async def run(self) -> None:
        """Until cancelled; what is pinned then stays so for `TTL_S`, for the next life of this gateway."""
        while True:
            await self.look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def look(self, now: float) -> None:
        """Each version by itself: what goes wrong with one holds up no other, and is tried again with the next look."""
        wanted, fallbacks = self._kept.versions(), self._fallbacks()
        for version in [*(v for v in self._pins if v not in wanted), *wanted]:
            await self._alone(version, f"version {version}", self._settle(version, now, wanted=version in wanted))
        for relay in sorted(self._fallback_pins.keys() | fallbacks.keys()):
            work = self._settle_fallback(relay, fallbacks.get(relay), now)
            await self._alone(relay, f"relay {relay}: the version to go back to", work)
        self._said = {of: said for of, said in self._said.items() if of in wanted or of in fallbacks}

    async def _alone(self, of: Hashable, what: str, work: Awaitable[None]) -> None:
        try:
            await work
        except LaminarError as e:  # as when the relay does not answer
            if self._said.get(of) != type(e).__name__:
                self._said[of] = type(e).__name__
                log.warning("%s is not pinned or released yet, and is tried again: %s", what, e)
        except Exception as e:
            if self._said.get(of) != repr(e):  # once, as long as it stays the same
                self._said[of] = repr(e)
                log.error("%s is not pinned or released as it should be: %r", what, e, exc_info=e)
        else:
            self._said.pop(of, None)

    async def _settle_fallback(self, relay: str, version: Version | None, now: float) -> None:
        pin = self._fallback_pins.get(relay)
        if pin is not None and relay not in self._relays.addresses():
            del self._fallback_pins[relay]  # its last engine left: it ends by itself
            return
        if pin is not None and pin.lease.version == version:
            if now >= pin.renew_at:
                await self._renew_fallback(relay, pin, now)
            return
        if version is not None and version in (self._relays.held(relay) or ()):
            client = self._client(relay)
            lease = await own(client.acquire(self._model, version, holder=FALLBACK_HOLDER, ttl_s=TTL_S, copies=1))
            self._fallback_pins[relay] = _Pin(relay, lease, now + TTL_S / 3)
        elif pin is not None:
            del self._fallback_pins[relay]
        if pin is not None:  # the newer one is pinned before the older one is let go
            await own(self._client(relay).release(pin.lease))

    async def _renew_fallback(self, relay: str, pin: _Pin, now: float) -> None:
        try:
            await own(self._client(relay).renew(pin.lease))
            pin.renew_at = now + TTL_S / 3
        except LaminarError as e:
            del self._fallback_pins[relay]  # it is pinned anew with the next look, if it is still there
            log.warning("version %d is pinned no more at relay %s to go back to: %s", pin.lease.version, relay, e)

    async def _settle(self, version: Version, now: float, *, wanted: bool) -> None:
        pin = self._pins.get(version)
        if not wanted:
            await self._release(version)
        elif pin is None:
            await self._pin(version, now)
        elif now >= pin.renew_at:
            await self._renew(version, pin, now)

    async def _pin(self, version: Version, now: float) -> None:
        for address in self._relays.holders(version):
            try:
                relay = self._client(address)
                lease = await own(relay.acquire(self._model, version, holder=HOLDER, ttl_s=TTL_S, copies=COPIES))
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
            await own(self._client(pin.relay).renew(pin.lease))
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
            await own(self._client(pin.relay).release(pin.lease))
        except LaminarError as e:
            log.info("the pin of version %d at relay %s ended before: %s", version, pin.relay, e)

    def _client(self, address: str) -> RelayClient:
        if address not in self._relays.addresses():
            raise NotFound(f"relay {address} was let go")
        return self._relays.client(address)
