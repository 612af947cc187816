"""Which sources a transfer bypasses for a while, and which one each of its stripes uses.

Invariants:
- a source that failed is bypassed for a while, longer each time, never for ever;
- the best tier with any source left is used: a bypass skips upward in the chain and never reorders it. All relays
  follow one order, so none can wait for a relay that waits for it;
- stripes spread over the sources of one tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

BYPASS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # how long a source is bypassed after its 1st, 2nd, ... failure
BUSY_S = 0.2  # after which a holder that serves as many late joiners as it may is tried again


class Named(Protocol):
    """A source, as far as it matters here."""

    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=Named)


@dataclass(slots=True)
class _Bypass:
    num_failures: int = 0
    until: float = 0.0


class Bypasses:
    """Owned by one transfer, called under its lock. Bounded by the number of its sources."""

    def __init__(self) -> None:
        self._bypasses: dict[str, _Bypass] = {}
        self.num_failures = 0

    def at(self, now: float) -> set[str]:
        """Sources bypassed at that time."""
        return {name for name, bypass in self._bypasses.items() if bypass.until > now}

    def pick(self, tiers: Sequence[Sequence[S]], stripe: int, now: float) -> S | None:
        """The source for this stripe: its share of the best tier that has any left."""
        skipped = self.at(now)
        for tier in tiers:
            free = [source for source in tier if source.name not in skipped]
            if free:
                return free[stripe % len(free)]
        return None

    def busy(self, name: str, now: float) -> None:
        """The source has others to serve first: no failure of its own."""
        self._bypasses.setdefault(name, _Bypass()).until = now + BUSY_S

    def failed(self, name: str, now: float) -> None:
        """The source broke, fell silent, refused, or sent wrong bytes."""
        bypass = self._bypasses.setdefault(name, _Bypass())
        bypass.until = now + BYPASS_S[min(bypass.num_failures, len(BYPASS_S) - 1)]
        bypass.num_failures += 1
        self.num_failures += 1
