"""Updates for engines that live outside verl: the trainer publishes, and the fleet loads by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.ray_utils import auto_await


class LaminarCheckpointEngineManager(CheckpointEngineManager):  # type: ignore[misc]
    """verl's manager, for which an update without replicas is an error, and not so here.

    Without replicas an update is a publish: no request is aborted, no cache is released, and no engine is waited for.
    With replicas (engines that verl started) it is verl's own update.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Any] = ()) -> None:
        super().__init__(config, actor_wg, list(replicas))

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Returns the sender's metrics once the version is sealed."""
        if self.replicas:
            found: dict[str, Any] = await super().update_weights(global_steps)
            return found
        sent = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        metrics: dict[str, Any] = {}
        for result in ray.get(sent):
            metrics.update(result or {})
        return metrics
