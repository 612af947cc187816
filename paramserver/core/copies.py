"""Copies of versions pinned for the fleet that are missing, and which relay makes them.

Invariants:
- a version is copied here only while fewer relays than its pins want hold it and stay, and only from one that does;
- all relays with the same view agree on which one copies, without a message; one that cannot is passed over in time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

COPY_AFTER_S = 5.0
"""A relay that was only started again offers what it held by then."""
NEXT_AFTER_S = 60.0
"""Relays before this one may have no room. Where their copy only takes longer, one too many is made, and not kept."""


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """`copies`: relays that are to keep it. `holders`: live relays that have it, those included that leave soon."""

    copies: int
    holders: Collection[str]


class MissingCopies:
    """The missing copies of one model, as one relay sees them; `now` is its monotonic clock. Bounded by the pins."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def due(self, me: str, pinned: Mapping[int, PinnedVersion], staying: Collection[str], now: float) -> set[int]:
        """The versions that this relay is to copy. `staying`: live relays that take more, this one maybe among them."""
        able = {version: sorted(set(staying) - set(pin.holders)) for version, pin in pinned.items()}
        missing = {version: _missing(pin, staying) for version, pin in pinned.items()}
        self._since = {
            version: self._since.get(version, now)
            for version, pin in pinned.items()
            if missing[version] > 0 and pin.holders and me in able[version]
        }
        return {
            version
            for version, since in self._since.items()
            if able[version].index(me) < _num_copying(missing[version], now - since)
        }


def _missing(pin: PinnedVersion, staying: Collection[str]) -> int:
    return pin.copies - len(set(pin.holders) & set(staying))


def _num_copying(missing: int, waited_s: float) -> int:
    """How many of the relays that could copy the version are to do it by now."""
    return 0 if waited_s < COPY_AFTER_S else missing + int((waited_s - COPY_AFTER_S) // NEXT_AFTER_S)
