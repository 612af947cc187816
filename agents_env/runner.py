"""Rolls out an environment: groups of samples of one task, `concurrency` at once, until a number, a time or a signal.

Invariants:
- at most `concurrency` rollouts run; tasks are drawn in order, a whole group before the next one;
- every attempt at a sample ends in exactly one `Record`: completed, failed, or abandoned because the run ended;
- a sample that fails is retried in a new session, up to `attempts` times; then its group stays incomplete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TextIO

from agents_env.environment import Environment, Outcome, TaskT
from agents_env.failures import RolloutFailed, RunFailed
from agents_env.server import Server, Session, SessionSpec, Usage

log = logging.getLogger("agents-env")

ATTEMPT_PAUSE_S = 0.25
"""The pause before a retry, times the attempts made: a server that fails fast is not flooded."""
RECENT_MAX = 64
"""Rewards that the progress display averages over."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to roll out. `groups` 0: until stopped."""

    run_id: str
    groups: int = 0
    group_size: int = 8
    concurrency: int = 16
    seed: int = 0
    attempts: int = 3
    duration_s: float | None = None
    split: Literal["train", "eval"] = "train"
    failures_max: int = 50  # in a row, over all samples: a cause that retries do not remove


@dataclass(frozen=True, slots=True)
class Sample(Generic[TaskT]):
    """One of the `group_size` rollouts of a task."""

    task: TaskT
    group_id: str
    sample_index: int


@dataclass(frozen=True, slots=True)
class Failure:
    boundary: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt at a sample; a line of `--out`."""

    t_unix_s: float
    run_id: str
    environment: str
    task_id: str
    group_id: str
    sample_index: int
    group_size: int
    attempt: int
    session_id: str
    status: Literal["completed", "truncated", "failed", "abandoned"]
    reward: float | None
    metrics: dict[str, float]
    turns: int
    prompt_tokens: int
    completion_tokens: int
    retries: int
    seconds: float
    error: Failure | None

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


@dataclass(slots=True)
class _Counts:
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


class Runner(Generic[TaskT]):
    """One run of one environment against one server."""

    def __init__(
        self, environment: Environment[TaskT], server: Server, plan: Plan, *, out: TextIO | None = None
    ) -> None:
        self.plan = plan
        self._environment = environment
        self._server = server
        self._out = out
        self._samples = self._all_samples()
        self._counts = _Counts()
        self._began = time.monotonic()

    async def run(self, stop: asyncio.Event) -> Statistics:
        """Runs until the plan is done, its time is over or `stop` is set; RunFailed after too many failures."""
        self._began = time.monotonic()
        rolling = asyncio.create_task(self._roll_out(), name="rollouts")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({rolling, stopping}, timeout=self.plan.duration_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            rolling.cancel()  # each rollout that still runs abandons its session
            await asyncio.wait({rolling, stopping})
        if not rolling.cancelled():
            rolling.result()
        return self.statistics()

    def statistics(self) -> Statistics:
        counts = self._counts
        return Statistics(
            running=counts.running,
            rollouts=counts.rollouts,
            groups_completed=counts.groups_completed,
            failed=counts.failed,
            given_up=counts.given_up,
            abandoned=counts.abandoned,
            turns=counts.turns,
            completion_tokens=counts.completion_tokens,
            retries=counts.retries,
            reward_mean=counts.reward_sum / counts.rollouts if counts.rollouts else None,
            reward_recent=sum(counts.recent) / len(counts.recent) if counts.recent else None,
            seconds=time.monotonic() - self._began,
            last_error=counts.last_error,
        )

    def _all_samples(self) -> Iterator[Sample[TaskT]]:
        for index, task in enumerate(self._environment.tasks(self.plan.seed)):
            if self.plan.groups and index >= self.plan.groups:
                return
            group_id = f"{self._environment.name}-{self.plan.run_id}-{index}"
            for sample_index in range(self.plan.group_size):
                yield Sample(task, group_id, sample_index)

    async def _roll_out(self) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for number in range(self.plan.concurrency):
                    workers.create_task(self._work(), name=f"worker-{number}")
        except* RunFailed as failures:
            raise failures.exceptions[0] from None

    async def _work(self) -> None:
        while (sample := next(self._samples, None)) is not None:
            await self._play(sample)

    async def _play(self, sample: Sample[TaskT]) -> None:
        for attempt in range(1, self.plan.attempts + 1):
            if await self._attempt(sample, attempt):
                return
            if self._counts.failed_in_a_row >= self.plan.failures_max:
                raise RunFailed(f"{self._counts.failed_in_a_row} rollouts in a row failed: {self._counts.last_error}")
            if attempt < self.plan.attempts:
                await asyncio.sleep(ATTEMPT_PAUSE_S * attempt)
        self._counts.given_up += 1
        self._counts.open_groups.pop(sample.group_id, None)
        log.warning("sample %d of %s given up after %d attempts", sample.sample_index, sample.group_id, attempt)

    async def _attempt(self, sample: Sample[TaskT], attempt: int) -> bool:
        """Plays `sample` once and records its end; returns whether it got a reward."""
        spec = self._session_spec(sample, attempt)
        record = self._recorder(sample, spec, attempt)
        usage = Usage()
        self._counts.running += 1
        try:
            session = await self._server.open(spec)
            usage = session.usage
            outcome = await self._judge(sample, session)
            await self._server.finish(session, outcome)
        except asyncio.CancelledError:
            await self._server.abandon(spec.session_id, "the run was stopped")
            record(usage, status="abandoned")
            raise
        except RolloutFailed as error:
            await self._server.abandon(spec.session_id, str(error))
            record(usage, status="failed", error=Failure(error.boundary, error.kind, error.message))
            return False
        finally:
            self._counts.running -= 1
        record(usage, status=outcome.status, reward=outcome.reward, metrics=dict(outcome.metrics))
        return True

    async def _judge(self, sample: Sample[TaskT], session: Session) -> Outcome:
        """The environment's outcome; other exceptions than RolloutFailed are attributed to the environment."""
        try:
            return await self._environment.rollout(sample.task, self._server.chat(session))
        except RolloutFailed:
            raise
        except Exception as error:
            log.exception("environment %s failed on task %s", self._environment.name, sample.task.task_id)
            raise RolloutFailed("environment", type(error).__name__, str(error)) from error

    def _session_spec(self, sample: Sample[TaskT], attempt: int) -> SessionSpec:
        tags = {"environment": self._environment.name, "task_id": sample.task.task_id, "run_id": self.plan.run_id}
        session_id = f"{sample.group_id}-{sample.sample_index}" + (f"-retry{attempt - 1}" if attempt > 1 else "")
        return SessionSpec(
            session_id, sample.group_id, sample.sample_index, self.plan.group_size, self.plan.split, tags
        )

    def _recorder(self, sample: Sample[TaskT], spec: SessionSpec, attempt: int) -> Callable[..., None]:
        """The function that records the end of this attempt."""
        began = time.monotonic()

        def record(
            usage: Usage,
            *,
            status: Literal["completed", "truncated", "failed", "abandoned"],
            reward: float | None = None,
            metrics: dict[str, float] | None = None,
            error: Failure | None = None,
        ) -> None:
            fields: dict[str, Any] = asdict(usage)
            self._add(
                Record(
                    t_unix_s=round(time.time(), 3),
                    run_id=self.plan.run_id,
                    environment=self._environment.name,
                    task_id=sample.task.task_id,
                    group_id=spec.group_id,
                    sample_index=spec.sample_index,
                    group_size=spec.group_size,
                    attempt=attempt,
                    session_id=spec.session_id,
                    status=status,
                    reward=reward,
                    metrics=metrics or {},
                    seconds=round(time.monotonic() - began, 3),
                    error=error,
                    **fields,
                )
            )

        return record

    def _add(self, record: Record) -> None:
        counts = self._counts
        counts.turns += record.turns
        counts.completion_tokens += record.completion_tokens
        counts.retries += record.retries
        if record.reward is not None:
            self._add_reward(record.group_id, record.reward)
        elif record.error is not None:
            counts.failed += 1
            counts.failed_in_a_row += 1
            counts.last_error = f"{record.error.boundary} ({record.error.kind}): {record.error.message}"
            log.warning("rollout %s failed: %s", record.session_id, counts.last_error)
        else:
            counts.abandoned += 1
        if self._out is not None:
            self._out.write(record.line() + "\n")

    def _add_reward(self, group_id: str, reward: float) -> None:
        counts = self._counts
        counts.rollouts += 1
        counts.failed_in_a_row = 0
        counts.reward_sum += reward
        counts.recent.append(reward)
        counts.open_groups[group_id] = counts.open_groups.get(group_id, 0) + 1
        if counts.open_groups[group_id] == self.plan.group_size:
            del counts.open_groups[group_id]
            counts.groups_completed += 1
