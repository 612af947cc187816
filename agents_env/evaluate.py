"""`agents-env eval`: a fixed set of tasks, scored and never trained on.

The error of the mean reward is that of the tasks' means: samples of one task are not independent of each other.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from agents_env.environment import Environment
from agents_env.failures import RunFailed
from agents_env.options import EvalOptions
from agents_env.run import opened, run_to_end, shown, stop_on_signals, until
from agents_env.runner import Plan, Record, Runner
from protos import terminal
from protos.terminal import add_row, line


@dataclass(frozen=True, slots=True)
class TaskScore:
    """`rewards`: of the samples that came to one, in the order of their indexes; `failed`: of the others."""

    task_id: str
    rewards: Sequence[float]
    failed: int
    turns: int
    completion_tokens: int

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`reward_error`: the standard error of `reward_mean`; None with fewer than two tasks. Tasks without any reward are
    left out of both."""

    environment: str
    model: str
    version: int | None
    seed: int
    samples: int
    temperature: float
    top_p: float
    reward_mean: float | None
    reward_error: float | None
    tasks: Sequence[TaskScore]


def start(environment: Environment[Any], options: EvalOptions) -> None:
    run_to_end(_evaluate(environment, options), options.log_level, options.log_format)


async def _evaluate(environment: Environment[Any], options: EvalOptions) -> None:
    stop, plan, records = stop_on_signals(), options.plan(), list[Record]()
    with opened(options.out) as out:
        async with options.server() as server:
            if not await until(stop, server.check()):
                return
            runner = Runner(environment, server, plan, out=out, on_record=records.append)
            await shown(runner, stop, f"agents-env eval {environment.name}")
    if stop.is_set():
        raise RunFailed(f"stopped after {len(records)} rollouts: an evaluation of a part would mislead")
    found = evaluation(environment.name, options, plan, records)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    _print(found)
    if found.reward_mean is None:
        raise RunFailed(f"no rollout came to a reward; the last failure: {runner.statistics().last_error}")


def evaluation(name: str, options: EvalOptions, plan: Plan, records: Sequence[Record]) -> Evaluation:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group_id, []).append(record)
    in_order = sorted(groups, key=lambda group_id: int(group_id.rpartition("-")[2]))  # of the stream of tasks
    scores = [_score(plan, groups[group_id]) for group_id in in_order]
    means = [score.mean for score in scores if score.mean is not None]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Evaluation(
        environment=name,
        model=options.sampling.model,
        version=options.version,
        seed=options.seed,
        samples=options.samples,
        temperature=options.sampling.temperature,
        top_p=options.sampling.top_p,
        reward_mean=statistics.fmean(means) if means else None,
        reward_error=error,
        tasks=scores,
    )


def _score(plan: Plan, records: Sequence[Record]) -> TaskScore:
    rewarded = sorted((r for r in records if r.reward is not None), key=lambda record: record.sample_index)
    return TaskScore(
        records[0].task_id,
        [record.reward for record in rewarded if record.reward is not None],
        plan.group_size - len(rewarded),
        sum(record.turns for record in records),
        sum(record.completion_tokens for record in records),
    )


def _print(found: Evaluation) -> None:
    table = Table(title=line(f"{found.environment}, seed {found.seed}"), title_justify="left")
    table.add_column("task")
    for column in ("reward", "samples", "failed", "turns", "tokens"):
        table.add_column(column, justify="right")
    for score in found.tasks:
        reward = "none" if score.mean is None else f"{score.mean:.3f}"
        counts = (len(score.rewards), score.failed, score.turns, score.completion_tokens)
        add_row(table, score.task_id, reward, *map(str, counts))
    console = terminal.console()
    console.print(table)
    if found.reward_mean is not None:
        error = "" if found.reward_error is None else f" +- {found.reward_error:.4f}"
        console.print(
            f"mean reward {found.reward_mean:.4f}{error} (standard error over {len(found.tasks)} tasks of "
            f"{found.samples} samples), {sum(score.failed for score in found.tasks)} failed",
            soft_wrap=True,
        )
