"""The chain: in which order relays pass chunks on, and from which relays each one may fetch.

Invariants:
- within the plan under which a version began, a relay fetches only from relays before it: no cycle can form;
- from a complete holder any relay may fetch: it needs nothing from anyone;
- relays of one zone are neighbours, and so are those of one rack: a slow link is crossed once;
- relays keep their places from plan to plan; newcomers join at the tail of their rack, zone, or the chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from paramserver.core.records import Epoch, Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a relay's host is, by its labels; "" is a place like any other."""

    zone: str = ""
    rack: str = ""


def next_plan(
    previous: Plan | None,
    epoch: Epoch,
    master: str,
    places: Mapping[str, Place],
    slow: Collection[str] = (),
) -> Plan:
    """The plan for the next version: `previous` itself when nothing changed, else a new one with its reason.

    `places`: of the live relays that stay. `slow` relays go to the tail, where none waits behind them.
    """
    kept = [name for name in (previous.order if previous else ()) if name in places and name != master]
    joined = sorted(set(places) - set(kept) - {master})
    wanted = [master, *kept, *joined]
    quick = [name for name in wanted if name not in slow or name == master]
    order = (*_neighbours(quick, places), *(name for name in wanted if name not in quick))
    if previous is not None and previous.order == order and previous.epoch == epoch:
        return previous
    number = previous.number + 1 if previous is not None and previous.epoch == epoch else 1
    return Plan(epoch, number, order, _reason(previous, epoch, order, slow))


def _neighbours(names: Sequence[str], places: Mapping[str, Place]) -> list[str]:
    """Zones, and racks within them, in the order in which `names` has them first; stable within a rack."""
    found = [places.get(name, Place()) for name in names]
    zones = _ranks(place.zone for place in found)
    racks = _ranks(found)
    return sorted(names, key=lambda name: _rank(places.get(name, Place()), zones, racks))


def _rank(place: Place, zones: Mapping[str, int], racks: Mapping[Place, int]) -> tuple[int, int]:
    return zones[place.zone], racks[place]


def _ranks(found: Iterable[T]) -> dict[T, int]:
    ranks: dict[T, int] = {}
    for one in found:
        ranks.setdefault(one, len(ranks))
    return ranks


def _reason(previous: Plan | None, epoch: Epoch, order: Sequence[str], slow: Collection[str]) -> str:
    if previous is None:
        return "first plan"
    left = [name for name in previous.order if name not in order]
    joined = [name for name in order if name not in previous.order]
    parts = [f"left: {', '.join(left)}"] if left else []
    parts += [f"joined: {', '.join(joined)}"] if joined else []
    parts += ["new master"] if previous.epoch != epoch else []
    stay = [name for name in previous.order if name in order]
    if stay != [name for name in order if name in stay]:
        behind = [name for name in order if name in slow]
        parts += [f"at the tail for their slow hops: {', '.join(behind)}" if behind else "back from the tail"]
    return "; ".join(parts) or "new order"


def is_late(me: str, plan: Plan) -> bool:
    """Whether this relay joined after the version began, and so is in nobody's chain."""
    return me not in plan.order


def sources(me: str, plan: Plan, holders: Collection[str], places: Mapping[str, Place]) -> tuple[tuple[str, ...], ...]:
    """The relays to fetch from, in tiers, best first; those of one tier are equally good, and stripes spread over them.

    In the chain: the nearest upstream, then each further up, then complete holders. A late joiner uses complete
    holders, those of its own zone first, then the chain from its tail up. Each relay begins with other holders
    (rendezvous hashing), so that many that join together do not load one of them. `places`: of all live relays.
    """
    here = places.get(me, Place()).zone
    complete = sorted((set(holders) & set(places)) - {me}, key=lambda name: _affinity(me, name))
    near = tuple(name for name in complete if places[name].zone == here)
    far = tuple(name for name in complete if places[name].zone != here)
    if is_late(me, plan):
        chain = [(name,) for name in reversed(plan.order) if name in places and name not in complete]
        tiers = [near, far, *chain]
    else:
        before = [name for name in reversed(plan.order[: plan.order.index(me)]) if name in places]
        others = [tuple(name for name in tier if name not in before) for tier in (near, far)]
        tiers = [*((name,) for name in before), *others]
    return tuple(tier for tier in tiers if tier)


def _affinity(one: str, other: str) -> bytes:
    return xxhash.xxh3_64_digest(f"{one} {other}".encode())
