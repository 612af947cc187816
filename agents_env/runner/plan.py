"""How much to roll out, and the samples of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal

from agents_env.environment import TaskT
from agents_env.runner.phases import PhaseLimits


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to roll out. `groups` 0: until stopped, or until the prompt pool is drained.

    `version`: the weight version that every session is pinned to; None: whatever serves.
    """

    run_id: str
    groups: int = 0
    group_size: int = 8
    concurrency: int = 16
    seed: int = 0
    attempts: int = 3
    duration_s: float | None = None
    split: Literal["train", "eval"] = "train"
    failures_max: int = 50  # in a row, over all samples: a cause that retries do not remove
    limits: PhaseLimits = field(default_factory=PhaseLimits)
    version: int | None = None


@dataclass(frozen=True, slots=True)
class UnfitTask:
    """Stands for a task of the prompt pool that the environment cannot read. `kind` and `why`: of its error."""

    task_id: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Sample(Generic[TaskT]):
    """One of the `group_size` rollouts of a task. `first_attempt` is more than 1 where an earlier runner, or an earlier
    life of this one, may have left a session. `lease_id`: of a sample from the prompt pool."""

    task: TaskT
    group_id: str
    sample_index: int
    group_size: int
    first_attempt: int = 1
    lease_id: str = ""

    def session_id(self, attempt: int) -> str:
        """Every runner gives the sessions of a sample the same names: so it finds those that others left."""
        return f"{self.group_id}-{self.sample_index}" + (f"-retry{attempt - 1}" if attempt > 1 else "")
