"""Which relays pass a model's chunks on so slowly that the chain is better off with them at its tail.

Invariants:
- a hop's rate counts only time in which bytes were there and requested, so relays behind a slow one stay blameless;
- one slow version moves nobody, and who went to the tail comes back only after several good versions, each time
  more of them: the order never flaps;
- a slow hop speaks against its downstream first; against its upstream once two downstreams were slow behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from paramserver.core.chunk_size import HopCost

SLOW_SHARE = 0.5
"""A hop below this share of the median of the others is slow."""
GOOD_SHARE = 0.8
SLOW_AFTER = 2
"""Versions in a row."""
GOOD_AFTER = 3
GOOD_AFTER_MAX = 48
OTHERS_MIN = 2
"""Fewer other hops than this give nothing to compare with."""


@dataclass(frozen=True, slots=True)
class Hop:
    """How one version came to one relay: bytes per second of the time in which any of its stripes was active."""

    version: int
    upstream: str
    relay: str
    rate_bytes_s: float
    rtt_s: float = 0.0
    transport: str = ""


@dataclass(slots=True)
class _Relay:
    slow_in_row: int = 0
    good_in_row: int = 0
    good_after: int = GOOD_AFTER
    slow_behind: set[str] = field(default_factory=set)  # downstreams whose hops from here were slow


class Stragglers:
    """The judgement of one model's hops. Every relay keeps its own, from the same facts; the master's counts."""

    def __init__(self) -> None:
        self._version = 0
        self._hops: dict[str, Hop] = {}
        self._relays: dict[str, _Relay] = {}
        self._last: dict[str, Hop] = {}
        self._slow: dict[str, str] = {}

    @property
    def slow(self) -> frozenset[str]:
        return frozenset(self._slow)

    @property
    def reasons(self) -> dict[str, str]:
        """The relays at the tail, and why, for people."""
        return dict(self._slow)

    def observe(self, hop: Hop) -> None:
        """A relay has completed a version. The hops of one version are judged together when the next one's begin."""
        self._last[hop.relay] = hop
        if hop.version > self._version:
            self._judge()
            self._version, self._hops = hop.version, {}
        if hop.version == self._version:
            self._hops[hop.relay] = hop

    def last(self, relay: str) -> Hop | None:
        """How the newest version came to a relay, for people."""
        return self._last.get(relay)

    def costs(self) -> list[HopCost]:
        """The costs of the newest version's hops, for choosing the next one's chunks."""
        return [HopCost(hop.rate_bytes_s, hop.rtt_s) for hop in self._last.values()]

    def forget(self, members: frozenset[str]) -> None:
        """Relays that left take their record with them."""
        self._hops = {name: hop for name, hop in self._hops.items() if {name, hop.upstream} <= members}
        for name in (self._relays.keys() | self._last.keys()) - members:
            self._relays.pop(name, None)
            self._last.pop(name, None)
            self._slow.pop(name, None)

    def _judge(self) -> None:
        for hop in self._hops.values():
            others = [other.rate_bytes_s for other in self._hops.values() if other.relay != hop.relay]
            if len(others) >= OTHERS_MIN:
                self._judge_hop(hop, hop.rate_bytes_s / median(others))

    def _judge_hop(self, hop: Hop, share: float) -> None:
        relay = self._relays.setdefault(hop.relay, _Relay())
        if share < SLOW_SHARE:
            relay.slow_in_row, relay.good_in_row = relay.slow_in_row + 1, 0
            if relay.slow_in_row >= SLOW_AFTER:
                self._blame(hop, share)
        elif share >= GOOD_SHARE:
            relay.slow_in_row, relay.good_in_row = 0, relay.good_in_row + 1
            self._relays.setdefault(hop.upstream, _Relay()).slow_behind.discard(hop.relay)
            if hop.relay in self._slow and relay.good_in_row >= relay.good_after:
                self._to_tail_no_more(hop.relay)

    def _blame(self, hop: Hop, share: float) -> None:
        upstream = self._relays.setdefault(hop.upstream, _Relay())
        upstream.slow_behind.add(hop.relay)
        if len(upstream.slow_behind) >= 2 and hop.upstream not in self._slow:
            for name in upstream.slow_behind:
                self._slow.pop(name, None)
            self._slow[hop.upstream] = f"{len(upstream.slow_behind)} relays were slow behind it"
            upstream.slow_behind.clear()
            upstream.good_in_row = 0  # its own hops were good all the while
        elif hop.relay not in self._slow and hop.upstream not in self._slow:
            self._slow[hop.relay] = f"its hop ran at {share:.0%} of the others for {SLOW_AFTER} versions"

    def _to_tail_no_more(self, name: str) -> None:
        del self._slow[name]
        relay = self._relays[name]
        relay.good_in_row = 0
        relay.good_after = min(2 * relay.good_after, GOOD_AFTER_MAX)
