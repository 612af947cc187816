"""Which connections a port takes, and which make way: bounds on what whoever reaches it can hold open. Pure.

A connection is a stranger's until its first request has passed access control (at a gateway without API keys: until its
first head is whole). Invariants:
- there are never more than `total` connections, nor more than `per_address` of one address that is not this host's;
- a stranger makes way for a newcomer once it had `stranger_s`, where there are `STRANGERS_MAX`, or no room is left:
  connections that say nothing keep nobody out for longer;
- one that is not a stranger's never makes way: what exceeds the bounds is refused.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

STRANGERS_MAX = 1024
STRANGER_S = 5.0
"""Far longer than an honest client takes for its first request, also while a thousand others begin."""
V6_PREFIX = 64
"""Bits of an IPv6 address that count: whoever has one address of such a network has all of them."""

C = TypeVar("C", bound=Hashable)
Bound = Literal["total", "per_address"]


@dataclass(frozen=True, slots=True)
class Opened(Generic[C]):
    """What became of a new connection. `refused`: by which bound; None: it is taken. `leaves`: a stranger's, which is
    to be closed for it."""

    refused: Bound | None = None
    leaves: C | None = None


@dataclass(frozen=True, slots=True)
class ConnectionCounts:
    """`refused` and `made_way` since the start."""

    open: int
    strangers: int
    refused: int
    made_way: int


@dataclass(slots=True)
class Connections(Generic[C]):
    """`now` is in seconds of any one clock. `stranger_s`: how long a stranger keeps its place at least."""

    total: int
    per_address: int
    stranger_s: float
    _address_of: dict[C, str] = field(default_factory=dict)
    _of_address: Counter[str] = field(default_factory=Counter)
    _strangers: dict[C, float] = field(default_factory=dict)  # since when; the oldest first
    _refused: int = 0
    _made_way: int = 0

    def opened(self, connection: C, address: str, now: float) -> Opened[C]:
        """`address`: of the peer; "" for a unix socket."""
        counted = _counted(address)
        if counted and self._of_address[counted] >= self.per_address:
            self._refused += 1
            return Opened(refused="per_address")
        leaves = self._who_leaves(now)
        if leaves is not None:
            self._made_way += 1
            self.closed(leaves)
        if len(self._address_of) >= self.total:
            self._refused += 1
            return Opened(refused="total", leaves=leaves)
        self._address_of[connection] = counted
        self._of_address[counted] += 1
        self._strangers[connection] = now
        return Opened(leaves=leaves)

    def _who_leaves(self, now: float) -> C | None:
        if len(self._strangers) < STRANGERS_MAX and len(self._address_of) < self.total:
            return None
        oldest = next(iter(self._strangers), None)
        return oldest if oldest is not None and now - self._strangers[oldest] >= self.stranger_s else None

    def known(self, connection: C) -> None:
        """A request of it was let through."""
        self._strangers.pop(connection, None)

    def closed(self, connection: C) -> None:
        """Also for one that was refused, or closed before."""
        self._strangers.pop(connection, None)
        address = self._address_of.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def counts(self) -> ConnectionCounts:
        return ConnectionCounts(len(self._address_of), len(self._strangers), self._refused, self._made_way)


def _counted(address: str) -> str:
    """The address, or its network, that connections are counted of; "" where they are not: a proxy of this host has
    those of all its clients."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a unix socket
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    if parsed.is_loopback:
        return ""
    return str(ipaddress.ip_network((parsed, V6_PREFIX), strict=False)) if parsed.version == 6 else str(parsed)
