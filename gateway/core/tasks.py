"""The rules of the prompt pool: what a task is, how often it is rolled out, and what a lease's end means. Pure.

A *task* is rolled out in *rounds*. Each round is one group: `group_size` samples under one group id, each leased to a
runner. Samples of groups that have begun go first, the oldest group first, so that groups become whole; then the ready
task of the highest priority begins its next round; among equals the one with fewer rounds, and then the older one.

Invariants:
- a sample is free, or leased to one runner, or has ended: finished with a reward, or given up;
- a sample that failed, or whose lease expired, is leased again, at most `attempts_max` times in all; one that was given
  back is leased again without being counted;
- a task is *drained* when it has had all its rounds and each of their samples has ended. It stays known, so that adding
  it once more changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TASKS_MAX = 1_000_000
"""Tasks in all pools of one gateway, drained ones included: a row of some hundred bytes and the task's own data."""
DATA_BYTES_MAX = 1 << 20
"""Of one task, as JSON."""
TASKS_PER_REQUEST_MAX = 10_000
LEASES_PER_REQUEST_MAX = 256
GROUP_SIZE_MAX = 4096
WAIT_S_MAX = 60.0
LEASE_S = 600.0
ATTEMPTS_MAX = 3
ENDS_KEPT = 65_536
"""Ended leases remembered: a finish that is sent again finds its own."""
RESTART_GRACE_S = 60.0
"""What a lease has left at least when the gateway starts: its runner could not renew it while the gateway was away."""
ERROR_CHARS_MAX = 1000

ENDLESS = 0
"""`repeats` of a task that is rolled out again and again."""

LeaseEnd = Literal["finished", "failed", "released", "expired"]


@dataclass(frozen=True, slots=True)
class NewTask:
    """`data`: a JSON object, which only the task's environment reads. `repeats`: rounds; 0: endless."""

    task_id: str
    data: bytes
    priority: float = 0.0
    group_size: int = 1
    repeats: int = 1
    attempts_max: int = ATTEMPTS_MAX


@dataclass(frozen=True, slots=True)
class TaskLease:
    """One sample, leased. `attempt` counts from 1; no two leases of a sample have the same.
    `round` counts from 0."""

    lease_id: str
    task_id: str
    data: bytes
    group_id: str
    group_size: int
    sample_index: int
    round: int
    attempt: int
    until_unix_s: float


@dataclass(frozen=True, slots=True)
class Leased:
    """`drained`: nothing is left and nothing can come back, unless tasks are added. `next_expiry_unix_s`: when a sample
    may be free at the latest; None if none is leased. Both only of a request that got nothing."""

    leases: Sequence[TaskLease]
    drained: bool = False
    next_expiry_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a lease. `retried`: its sample will be leased again. `group_ended`: it was its group's last.
    `repeated`: the same request had ended it before."""

    retried: bool = False
    group_ended: bool = False
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The rewards of a task's newest ended round, by sample; None for one that was given up, whose last error stands at
    its place in `errors`. `number` grows with each ended group of the gateway."""

    number: int
    task_id: str
    group_id: str
    round: int
    priority: float
    rewards: Sequence[float | None]
    errors: Sequence[str]


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Of one pool. `ready`: tasks that can begin a round; `open_groups`: rounds that have not ended; `free` and
    `leased`: samples of those."""

    tasks: int
    ready: int
    drained: int
    open_groups: int
    free: int
    leased: int


def is_ready(repeats: int, rounds: int) -> bool:
    """Whether a task that began so many rounds may begin another one."""
    return repeats == ENDLESS or rounds < repeats


def is_given_up(failures: int, attempts_max: int) -> bool:
    return failures >= attempts_max
