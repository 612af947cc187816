"""The modes of a fleet: how its engines come to newer versions. Pure.

| mode | intake closes for a newer version | an engine loads it |
|---|---|---|
| `drain`, `repack` | after `intake_min_batch` sessions | when it is empty |
| `inflight` | never | at once: its turns pause, and go on under the new version |
| `barrier` | at once | when every engine that has it at hand is empty |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from gateway.core.fleet.config import FleetConfig, Mode


class Drain:
    """Engines empty by themselves. The other modes differ from it in what they answer."""

    packs: ClassVar[bool] = False
    """The repack loop moves turns, so that engines empty sooner."""
    mixes: ClassVar[bool] = False
    """A turn goes on under the version that its engine loads meanwhile."""
    together: ClassVar[bool] = False
    """An engine loads a newer version only when no engine that could runs a turn or takes sessions."""

    def intake_min(self, config: FleetConfig) -> int:
        """Sessions that an intake admits before a newer version closes it."""
        return config.intake_min_batch

    def patience_s(self, config: FleetConfig) -> float:
        """How long few turns may keep an engine from a newer version."""
        return config.drain_max_s


class Repack(Drain):
    packs = True


class Inflight(Drain):
    mixes = True


class Barrier(Drain):
    together = True

    def intake_min(self, config: FleetConfig) -> int:
        return 0

    def patience_s(self, config: FleetConfig) -> float:
        return math.inf


MODES: Mapping[Mode, Drain] = {"barrier": Barrier(), "drain": Drain(), "repack": Repack(), "inflight": Inflight()}


def mode_of(config: FleetConfig) -> Drain:
    return MODES[config.mode]
