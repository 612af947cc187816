"""What is recorded of rollouts: a line for each attempt, and the counts of a run."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Literal

RECENT_MAX = 64
"""Rewards that the progress display averages over."""

Status = Literal["completed", "truncated", "failed", "abandoned"]


@dataclass(frozen=True, slots=True)
class Failure:
    """`boundary`: whose fault (`failures.Boundary`); `phase`: when: reset, model, tool, score, or session."""

    boundary: str
    kind: str
    message: str
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.boundary} ({self.kind}): {self.message}"


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt at a sample; a line of `--out`. `recovered`: its session had been finished by a runner that died
    before it could report it. `prompt_tokens` is null where the calls did not go through the runner."""

    t_unix_s: float
    run_id: str
    environment: str
    task_id: str
    group_id: str
    sample_index: int
    group_size: int
    attempt: int
    session_id: str
    status: Status
    reward: float | None
    metrics: dict[str, float]
    turns: int
    prompt_tokens: int | None
    completion_tokens: int
    retries: int
    seconds: float
    error: Failure | None
    recovered: bool = False

    def line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Statistics:
    """The counts of a run so far."""

    running: int
    rollouts: int
    groups_completed: int
    failed: int
    given_up: int
    abandoned: int
    turns: int
    completion_tokens: int
    retries: int
    reward_mean: float | None
    reward_recent: float | None
    seconds: float
    last_error: str
    waits_for: str = ""  # why the server told a request to wait lately


@dataclass(slots=True)
class Tally:
    """The counts of a run while it runs."""

    running: int = 0
    rollouts: int = 0
    groups_completed: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    given_up: int = 0
    abandoned: int = 0
    turns: int = 0
    completion_tokens: int = 0
    retries: int = 0
    reward_sum: float = 0.0
    last_error: str = ""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))
    open_groups: dict[str, int] = field(default_factory=dict)  # completed samples of groups that are under way
    began: float = field(default_factory=time.monotonic)

    def add(self, record: Record) -> None:
        self.turns += record.turns
        self.completion_tokens += record.completion_tokens
        self.retries += record.retries
        if record.reward is not None:
            self.add_reward(record.group_id, record.group_size, record.reward)
        elif record.error is not None:
            self.failed += 1
            self.failed_in_a_row += 1
            self.last_error = str(record.error)
        else:
            self.abandoned += 1

    def add_reward(self, group_id: str, group_size: int, reward: float) -> None:
        self.rollouts += 1
        self.failed_in_a_row = 0
        self.reward_sum += reward
        self.recent.append(reward)
        self.open_groups[group_id] = self.open_groups.get(group_id, 0) + 1
        if self.open_groups[group_id] == group_size:
            del self.open_groups[group_id]
            self.groups_completed += 1

    def give_up(self, group_id: str) -> None:
        self.given_up += 1
        self.open_groups.pop(group_id, None)

    def statistics(self) -> Statistics:
        return Statistics(
            running=self.running,
            rollouts=self.rollouts,
            groups_completed=self.groups_completed,
            failed=self.failed,
            given_up=self.given_up,
            abandoned=self.abandoned,
            turns=self.turns,
            completion_tokens=self.completion_tokens,
            retries=self.retries,
            reward_mean=self.reward_sum / self.rollouts if self.rollouts else None,
            reward_recent=sum(self.recent) / len(self.recent) if self.recent else None,
            seconds=time.monotonic() - self.began,
            last_error=self.last_error,
        )
