"""Pins: who uses which version here, until when.

Invariants:
- a pin that lapsed stays lapsed; it can be neither renewed nor released as if it had held;
- a pin of a version that is dropped all the same (its bytes turned out bad, it was lost) ends with it: it held nothing;
- a pin for the fleet (`copies`) gives way to a version that finds no other room, the oldest first; no other does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from paramserver.core.records import check_words
from protos.errors import InvalidRequest, NotFound, OutOfCapacity

TTL_MAX_S = 3600.0
PINS_MAX = 4096  # bounds what careless holders can leave behind
COPIES_MAX = 64  # of one version, kept for the fleet: more relays than any fleet needs to lose at once


@dataclass(frozen=True, slots=True)
class Pin:
    """`expires_at` is on the relay's monotonic clock."""

    lease_id: str
    model: str
    version: int
    holder: str
    ttl_s: float
    expires_at: float
    copies: int = 0  # for the fleet: so many relays keep the version, this one among them


class Pins:
    """All pins of one relay; owned by its event loop."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}

    def add(
        self, lease_id: str, model: str, version: int, holder: str, ttl_s: float, now: float, copies: int = 0
    ) -> Pin:
        if not 0 < ttl_s <= TTL_MAX_S:
            raise InvalidRequest(f"ttl_s is {ttl_s}", hint=f"give more than 0 and at most {TTL_MAX_S:g} seconds")
        if not 0 <= copies <= COPIES_MAX:
            raise InvalidRequest(f"copies is {copies}", hint=f"give 0 to {COPIES_MAX}")
        check_words("the holder of a pin", holder)
        if len(self._pins) >= PINS_MAX:
            raise OutOfCapacity(f"{PINS_MAX} pins are held on this relay", hint="release what is no longer used")
        pin = Pin(lease_id, model, version, holder, ttl_s, now + ttl_s, copies)
        self._pins[lease_id] = pin
        return pin

    def renew(self, lease_id: str, now: float) -> Pin:
        pin = self._live(lease_id, now)
        self._pins[lease_id] = replace(pin, expires_at=now + pin.ttl_s)
        return pin

    def release(self, lease_id: str, now: float) -> Pin:
        pin = self._live(lease_id, now)
        del self._pins[lease_id]
        return pin

    def holds(self, lease_id: str) -> bool:
        return lease_id in self._pins

    def _live(self, lease_id: str, now: float) -> Pin:
        pin = self._pins.get(lease_id)
        if pin is None or pin.expires_at <= now:
            raise NotFound(
                f"lease {lease_id} is not held: it lapsed or was released, or its version is here no more",
                hint="what was loaded under it does not count; acquire again and renew within ttl_s",
            )
        return pin

    def expire(self, now: float) -> list[Pin]:
        """Removes and returns the pins whose time is over."""
        over = [pin for pin in self._pins.values() if pin.expires_at <= now]
        for pin in over:
            del self._pins[pin.lease_id]
        return over

    def dropped(self, model: str, version: int) -> list[Pin]:
        """Removes and returns the pins of a version that is no longer here."""
        gone = [pin for pin in self._pins.values() if (pin.model, pin.version) == (model, version)]
        for pin in gone:
            del self._pins[pin.lease_id]
        return gone

    def counts(self, model: str) -> Counter[int]:
        """Pins per version of one model."""
        return Counter(pin.version for pin in self._pins.values() if pin.model == model)

    def give_way(self, retained: Collection[tuple[str, int]]) -> list[Pin]:
        """Removes and returns the pins of one version that only pins for the fleet keep here; the oldest first.

        `retained`: versions that would be kept without any pin.
        """
        hard = {(pin.model, pin.version) for pin in self._pins.values() if not pin.copies}
        for pin in self._pins.values():
            of = (pin.model, pin.version)
            if pin.copies and of not in hard and of not in retained:
                return self.dropped(*of)
        return []

    def all(self) -> list[Pin]:
        return sorted(self._pins.values(), key=lambda pin: (pin.model, pin.version, pin.holder))


def keepers(pinned: Mapping[str, int], holders: Collection[str]) -> list[str]:
    """Which of a version's `holders` keep it for the fleet: those with a pin of their own, then others by name, up to
    the largest number of copies that a pin wants. `pinned`: copies by the relay that has the pin, which may have
    died."""
    own = sorted(holder for holder in holders if holder in pinned)
    others = sorted(holder for holder in holders if holder not in pinned)
    return [*own, *others[: max(0, max(pinned.values(), default=0) - len(own))]]
