"""Which sources a transfer leaves alone for a while, and whom each of its stripes asks.

Invariants:
- a source that failed is left alone for a while, longer each time, never for ever;
- the best tier that has anybody left is asked: bypass skips to the next one, it never reorders;
- stripes spread over the sources of one tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

BYPASS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # how long a source is left alone after its 1st, 2nd, ... failure
BUSY_S = 0.2  # a holder that serves as many late joiners as it will is asked again so soon


class Named(Protocol):
    """A source, as far as it matters here."""

    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=Named)


@dataclass(slots=True)
class _Left:
    num_failures: int = 0
    until: float = 0.0


class Bypasses:
    """Owned by one transfer, called under its lock. Bounded by the relays that it ever met."""

    def __init__(self) -> None:
        self._left: dict[str, _Left] = {}
        self.num_failures = 0

    def at(self, now: float) -> set[str]:
        """Who is left alone."""
        return {name for name, left in self._left.items() if left.until > now}

    def pick(self, tiers: Sequence[Sequence[S]], stripe: int, now: float) -> S | None:
        """Whom this stripe asks: its own among the best tier that has anybody left."""
        skipped = self.at(now)
        for tier in tiers:
            free = [source for source in tier if source.name not in skipped]
            if free:
                return free[stripe % len(free)]
        return None

    def busy(self, name: str, now: float) -> None:
        """The source has others to serve first: no failure of its own."""
        self._left.setdefault(name, _Left()).until = now + BUSY_S

    def failed(self, name: str, now: float) -> None:
        """The source broke, fell silent, refused, or sent wrong bytes."""
        left = self._left.setdefault(name, _Left())
        left.until = now + BYPASS_S[min(left.num_failures, len(BYPASS_S) - 1)]
        left.num_failures += 1
        self.num_failures += 1
