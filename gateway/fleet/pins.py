"""Pins on relays for versions that may have to be loaded again: those that sessions insist on, and those that engines
fall back to when newer ones do not load.

Invariants:
- one pin for each version that sessions insist on, for the whole fleet: its relay and one more keep the version beyond
  their retention count;
- one fallback pin at each relay, for the newest version that an engine beside it has held, until one of them holds a
  newer one: however many bad versions are published meanwhile, one remains that loads;
- no version or relay waits for another: each has one call at a time, and a relay that does not answer holds up its own;
- pins are leases: they expire some time after the gateway, and a publication that finds no other room evicts them. A
  version whose pin was lost is pinned again as soon as some relay holds it; the timeline records both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Hashable, Mapping
from dataclasses import dataclass

from gateway.core.fleet.state import FleetState
from gateway.core.types import Version
from gateway.fleet.relays import Relays
from gateway.runtime.supervisor import rpc_result
from gateway.store import Timeline
from paramserver.client import Lease, RelayClient
from protos.errors import LaminarError, NotFound

log = logging.getLogger(__name__)

HOLDER = "gateway/sessions"
FALLBACK_HOLDER = "gateway/fallback"
COPIES = 2
"""Relays that keep a pinned version: one more than may die."""
TTL_S = 60.0
"""A gateway that is started again within it finds the versions of its sessions where they were."""
UPDATE_S = 0.5
"""How soon a version is pinned after its first session, or released after its last."""


@dataclass(slots=True)
class _Pin:
    relay: str
    lease: Lease
    renew_at: float


class VersionPins:
    """Owner of the pins. Which there should be is decided in `FleetState`."""

    def __init__(self, model: str, fleet: FleetState, relays: Relays, timeline: Timeline) -> None:
        self._model, self._fleet, self._relays, self._timeline = model, fleet, relays, timeline
        self._fallback_pins: dict[str, _Pin] = {}  # by relay
        self._pins: dict[Version, _Pin] = {}
        self._under_way: set[Hashable] = set()  # versions and relays that an update is at
        self._logged: dict[Hashable, str] = {}  # by version or relay, the failure that was last logged

    @property
    def pinned(self) -> Mapping[Version, str]:
        """By version, the relay that has its pin."""
        return {version: pin.relay for version, pin in sorted(self._pins.items())}

    @property
    def fallbacks(self) -> Mapping[str, Version]:
        """By relay, the version that is pinned there for its engines to fall back to."""
        return {relay: Version(pin.lease.version) for relay, pin in sorted(self._fallback_pins.items())}

    async def run(self) -> None:
        """Until cancelled; pins then last for `TTL_S`, for the next life of this gateway."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self.update(time.monotonic()))  # it has an end, or something that no other is at
                await asyncio.sleep(UPDATE_S)

    async def update(self, now: float) -> None:
        """Pins, renews and releases what is due, but for what an earlier call is still at. A failure costs its version
        or relay alone, and is retried by the next call."""
        wanted, fallbacks = self._fleet.pinned.versions(), self._fleet.fallbacks()
        self._logged = {of: failure for of, failure in self._logged.items() if of in wanted or of in fallbacks}
        async with asyncio.TaskGroup() as group:
            for version in {*self._pins, *wanted} - self._under_way:
                work = self._update_pin(version, now, wanted=version in wanted)
                group.create_task(self._contain(version, f"version {version}", work))
            for relay in (self._fallback_pins.keys() | fallbacks.keys()) - self._under_way:
                work = self._update_fallback(relay, fallbacks.get(relay), now)
                group.create_task(self._contain(relay, f"relay {relay}: the version to fall back to", work))

    async def _contain(self, of: Hashable, what: str, work: Awaitable[None]) -> None:
        """Logs a failure once for as long as it stays the same."""
        self._under_way.add(of)
        try:
            await work
        except LaminarError as e:  # such as a relay that does not respond
            if self._logged.get(of) != type(e).__name__:
                self._logged[of] = type(e).__name__
                log.warning("%s is not pinned or released yet, and is tried again: %s", what, e)
        except Exception as e:
            if self._logged.get(of) != repr(e):
                self._logged[of] = repr(e)
                log.error("%s is not pinned or released as it should be: %r", what, e, exc_info=e)
        else:
            self._logged.pop(of, None)
        finally:
            self._under_way.discard(of)

    async def _update_fallback(self, relay: str, version: Version | None, now: float) -> None:
        pin = self._fallback_pins.get(relay)
        if pin is not None and relay not in self._relays.addresses():
            del self._fallback_pins[relay]  # the last engine beside it left: the lease expires by itself
            return
        if pin is not None and pin.lease.version == version:
            if now >= pin.renew_at:
                await self._renew_fallback(relay, pin, now)
            return
        if version is not None and version in (self._relays.held(relay) or ()):
            client = self._client(relay)
            lease = await rpc_result(
                client.acquire(self._model, version, holder=FALLBACK_HOLDER, ttl_s=TTL_S, copies=1)
            )
            self._fallback_pins[relay] = _Pin(relay, lease, now + TTL_S / 3)
        elif pin is not None:
            del self._fallback_pins[relay]
        if pin is not None:  # only now: between a release and the next pin there would be no version to fall back to
            await rpc_result(self._client(relay).release(pin.lease))

    async def _renew_fallback(self, relay: str, pin: _Pin, now: float) -> None:
        try:
            await rpc_result(self._client(relay).renew(pin.lease))
            pin.renew_at = now + TTL_S / 3
        except LaminarError as e:
            del self._fallback_pins[relay]  # the next update pins it again, if the relay still holds it
            log.warning("the fallback pin of version %d at relay %s is lost: %s", pin.lease.version, relay, e)

    async def _update_pin(self, version: Version, now: float, *, wanted: bool) -> None:
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
                lease = await rpc_result(relay.acquire(self._model, version, holder=HOLDER, ttl_s=TTL_S, copies=COPIES))
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
            await rpc_result(self._client(pin.relay).renew(pin.lease))
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
            await rpc_result(self._client(pin.relay).release(pin.lease))
        except LaminarError as e:
            log.info("the pin of version %d at relay %s had ended: %s", version, pin.relay, e)

    def _client(self, address: str) -> RelayClient:
        if address not in self._relays.addresses():
            raise NotFound(f"relay {address} is not followed any more")
        return self._relays.client(address)
