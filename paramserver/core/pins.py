"""Pins: who uses which version here, until when.

Invariants: a pin that lapsed stays lapsed; it can be neither renewed nor released as if it had held.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from protos.errors import InvalidRequest, NotFound, OutOfCapacity

TTL_MAX_S = 3600.0
PINS_MAX = 4096  # bounds what careless holders can leave behind


@dataclass(frozen=True, slots=True)
class Pin:
    """`expires_at` is on the relay's monotonic clock."""

    lease_id: str
    model: str
    version: int
    holder: str
    ttl_s: float
    expires_at: float


class Pins:
    """All pins of one relay; owned by its event loop."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}

    def add(self, lease_id: str, model: str, version: int, holder: str, ttl_s: float, now: float) -> Pin:
        if not 0 < ttl_s <= TTL_MAX_S:
            raise InvalidRequest(f"ttl_s is {ttl_s}", hint=f"give more than 0 and at most {TTL_MAX_S:g} seconds")
        if not holder:
            raise InvalidRequest("a pin without a holder", hint="say who acquires, as status pages show it")
        if len(self._pins) >= PINS_MAX:
            raise OutOfCapacity(f"{PINS_MAX} pins are held on this relay", hint="release what is no longer used")
        pin = Pin(lease_id, model, version, holder, ttl_s, now + ttl_s)
        self._pins[lease_id] = pin
        return pin

    def renew(self, lease_id: str, now: float) -> None:
        pin = self._live(lease_id, now)
        self._pins[lease_id] = replace(pin, expires_at=now + pin.ttl_s)

    def release(self, lease_id: str, now: float) -> Pin:
        pin = self._live(lease_id, now)
        del self._pins[lease_id]
        return pin

    def _live(self, lease_id: str, now: float) -> Pin:
        self.expire(now)
        if lease_id not in self._pins:
            raise NotFound(
                f"lease {lease_id} is not held: it lapsed or was released",
                hint="what was loaded under it does not count; acquire again and renew within ttl_s",
            )
        return self._pins[lease_id]

    def expire(self, now: float) -> list[Pin]:
        """Removes and returns the pins whose time is over."""
        over = [pin for pin in self._pins.values() if pin.expires_at <= now]
        for pin in over:
            del self._pins[pin.lease_id]
        return over

    def counts(self, model: str) -> Counter[int]:
        """Pins per version of one model."""
        return Counter(pin.version for pin in self._pins.values() if pin.model == model)

    def all(self) -> list[Pin]:
        return sorted(self._pins.values(), key=lambda pin: (pin.model, pin.version, pin.holder))
