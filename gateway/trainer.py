"""The trainer, as the gateway knows it: what it takes, how far behind that is, and what may be admitted for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.core.scheduler import Admission
from gateway.core.types import Trajectory
from gateway.core.waiting import Pace, retry_for_a_batch
from gateway.data import ExperienceBuffer
from gateway.live import LiveSessions


@dataclass(slots=True)
class Staleness:
    """Tokens (generation) and trajectories (finish, use) by how many versions they were behind."""

    generation: dict[int, int] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    use: dict[int, int] = field(default_factory=dict)


class Trainer:
    """`version` is the newest that it said it has; `batch` and its bound None until it said any."""

    def __init__(self, config: GatewayConfig, live: LiveSessions, buffer: ExperienceBuffer) -> None:
        self.staleness = Staleness()
        self.version = 0
        self._config, self._live, self._buffer = config, live, buffer
        self._batch: int | None = None
        self._staleness_max: int | None = None
        self._took = Pace()

    def asked(self, batch: int, version: int, staleness_max: int | None) -> None:
        """It asks for a batch of trajectories."""
        self._batch, self._staleness_max = batch, staleness_max
        self.version = max(self.version, version)

    def took(self, version: int, trajectories: Sequence[Trajectory]) -> None:
        """It got them: staleness at use, by each one's oldest version."""
        if trajectories:
            self._took.happened(time.monotonic())
        for trajectory in trajectories:
            oldest = min((v for v in trajectory.versions if v >= 0), default=version)
            count(self.staleness.use, version - oldest)

    def admission(self) -> Admission:
        """What runs and waits for it, against what it will use. What runs is counted only for one that has asked: with
        a thousand sessions the count is what a placement costs."""
        bound = self._staleness_max
        return Admission(
            0 if self._batch is None else self._running(),
            self._buffer.statistics().trajectories,
            self._batch,
            self._config.fleet.staleness_max if bound is None else bound,
            retry_for_a_batch(self._took, time.monotonic()),
        )

    def _running(self) -> int:
        return sum(1 for s in self._live if s.version is not None and s.spec.train and s.spec.split == "train")


def count(histogram: dict[int, int], behind: int, by: int = 1) -> None:
    behind = max(0, behind)
    histogram[behind] = histogram.get(behind, 0) + by
