"""Engines in the order of their load, by version and intake: the least loaded is found without a look at each. Pure.

Invariants:
- an engine stands in each of its pools once, with the load that it had when it was last put there;
- between two puts turns do not come or go, and tokens only grow: so a kept load is a lower bound of the true one, and
  the first engine of a pool whose kept load is its true one is the least loaded. One that has more by now is put in
  anew, further behind; so tokens that come need no notification;
- `free` of a pool is no less than the KV tokens that any engine in it has left: a prompt that needs more is refused
  without a look at each. A look that finds no room makes it exact.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.core.types import EngineName, Version


class Load(NamedTuple):
    """The least comes first. Idle engines take sessions in turn, by how many they were given: else the first would hold
    all that come one by one, and stay with it."""

    turns: int
    tokens: int
    admitted: int
    name: EngineName


class Pool(NamedTuple):
    """Engines that serve `version`; `opened`: of them those whose intake is open."""

    version: Version
    opened: bool = False


@dataclass(slots=True)
class LoadOrder:
    _loads: dict[Pool, list[Load]] = field(default_factory=dict)
    _of: dict[EngineName, tuple[Load, Sequence[Pool]]] = field(default_factory=dict)
    free: dict[Pool, float] = field(default_factory=dict)

    def pools(self) -> list[Pool]:
        """Those that have engines, the newest version first."""
        return sorted(self._loads, reverse=True)

    def loads(self, pool: Pool) -> Sequence[Load]:
        """As they were last put in, in order."""
        return self._loads.get(pool, ())

    def kept(self, name: EngineName) -> Load | None:
        """The load with which the engine was last put in; None if it is in no pool."""
        found = self._of.get(name)
        return None if found is None else found[0]

    def put(self, load: Load, pools: Sequence[Pool], free: float = 0.0) -> None:
        """The engine is in these pools, with this load, and nowhere else; in no pool: it is forgotten. `free`: KV
        tokens that it has left."""
        old, left = self._of.pop(load.name, (load, ()))
        stays = left if load == old else ()  # where it stands already, and rightly
        for pool in left:
            if pool not in pools or pool not in stays:
                loads = self._loads[pool]
                del loads[bisect.bisect_left(loads, old)]
                if not loads:
                    del self._loads[pool], self.free[pool]
        for pool in pools:
            self.free[pool] = max(free, self.free.get(pool, 0.0))
            if pool not in stays:
                bisect.insort(self._loads.setdefault(pool, []), load)
        if pools:
            self._of[load.name] = load, pools
