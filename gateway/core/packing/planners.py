"""The planners of repack, by the names that `--planner` takes. Pure.

Another one is a function with the signature of `Planner`, in a file of its own, and a row of `PLANNERS`. Invariants of
any planner: source and destination serve the same version, every session of a freed engine moves, and the moves of a
part may begin before the next part is made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gateway.core.packing.engine_views import EngineView
from gateway.core.packing.plans import Plan, RepackConfig, whole
from gateway.core.packing.repack import plan_parts
from gateway.core.types import Version


class Planner(Protocol):
    """Plans for the engines of one version, part after part; at least one part, which may be empty."""

    def __call__(
        self, group: Sequence[EngineView], version: Version, config: RepackConfig, *, seed: int = 0
    ) -> Iterator[Plan]: ...


def unpriced(group: Sequence[EngineView], version: Version, config: RepackConfig, *, seed: int = 0) -> Iterator[Plan]:
    """Algorithm 1 of the Laminar paper, which asks no price: whatever fits elsewhere moves."""
    return plan_parts(group, version, replace(config, prefill_tokens_per_s=math.inf), seed=seed)


PLANNERS: Mapping[str, Planner] = {"priced": plan_parts, "unpriced": unpriced}


def behind(versions: Iterable[Version], newest: Version) -> list[Version]:
    """Of the versions of all engines, the older ones that more than one engine serves: those that can be packed."""
    return sorted(version for version, count in Counter(versions).items() if count > 1 and version < newest)


def plan_repack(
    engines: Sequence[EngineView],
    newest: Version,
    config: RepackConfig,
    planner: Planner = plan_parts,
    *,
    seed: int = 0,
) -> tuple[Plan, ...]:
    """One plan for each of the versions `behind`; may hold no moves, then says why."""
    groups = {v: [e for e in engines if e.version == v] for v in behind((e.version for e in engines), newest)}
    return tuple(whole(list(planner(group, v, config, seed=seed))) for v, group in groups.items())
