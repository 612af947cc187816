"""How the numbers of a sample are spread: mean, bounds and quantiles. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Quantiles by the nearest rank; all zero without numbers."""

    count: int = 0
    mean: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def spread_of(numbers: Iterable[float]) -> Spread:
    found = sorted(numbers)
    if not found:
        return Spread()

    def quantile(share: float) -> float:
        return float(found[min(len(found) - 1, int(share * len(found)))])

    mean = sum(found) / len(found)
    return Spread(len(found), mean, float(found[0]), quantile(0.5), quantile(0.9), quantile(0.99), float(found[-1]))
