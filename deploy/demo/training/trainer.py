"""The demo's trainer: GRPO on trajectories from the experience buffer, a new weight version after every step.

It waits for trajectories and for nothing else: engines load versions when it suits them, so a batch may come from
older versions. How old is measured per token, and the loss takes the recorded logprobs of whatever version it was.

    python -m deploy.demo.training.trainer --relay 127.0.0.1:7070 --gateway http://127.0.0.1:8080 \
        --model-dir ~/.cache/laminar-rl/models/smollm2-135m-instruct --steps 8 --out events.jsonl

Writes one JSON object a line to --out: `publish` (version, step, stall_s until the weights may change again,
sealed_s and broadcast_s until etcd knows it and until every relay holds it), `pace` (how many prompts the next step
takes, and when the last one will end), `progress` (within a step) and `step`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import torch
from msgspec import Meta

from deploy.demo.training.families import lay_out, micro_batches
from deploy.demo.training.grpo import Clip, group_advantages, token_loss
from deploy.demo.training.pace import Next, Pace, Taken
from deploy.demo.training.policy import Policy
from gateway.core.dtypes import Dtype
from protos.errors import LaminarError, NotFound, Unavailable
from protos.options import Flag, config_from, config_options
from protos.process import setup_logging, write_ready_file
from trainer_client import Batch, ExperienceReader, Packed, Publisher, Ticket, Trajectory, Wanted, pack

log = logging.getLogger("trainer")

GROUP_TOKENS = 850
"""Tokens of one prompt's eight trajectories, as the demo's environments give them at first."""
POLL_S = 2.0
"""How long one request for experience waits: also how long a SIGTERM may go unnoticed between steps."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of one training run: the options of the command, in the order of its help."""

    relay: Annotated[str, Flag(metavar="HOST:PORT"), "gRPC port of a relay; `paramserver serve` prints it"]
    gateway: Annotated[str, Flag(metavar="URL"), "the gateway; `gateway serve` prints it"]
    model_dir: Annotated[
        Path,
        click.Path(exists=True, file_okay=False, path_type=Path),
        "where to start from: a Llama or Qwen2 model as `transformers` saves it",
    ]
    _: KW_ONLY
    model: Annotated[str, "name under which versions are published"] = "policy"
    steps: Annotated[int, Meta(ge=0), "optimiser steps; each publishes a version"] = 8
    seed: Annotated[int, "of torch"] = 0
    out: Annotated[Path, click.Path(dir_okay=False, path_type=Path), "JSON lines are added here"]
    groups: Annotated[int, Meta(ge=1), "prompts per step"] = 4
    group_size: Annotated[int, Meta(ge=2), "samples per prompt"] = 8
    lr: Annotated[float, Meta(gt=0.0), "learning rate"] = 3e-5
    clip_low: Annotated[float, Meta(ge=0.0, le=1.0), "the ratio of probabilities is clipped below 1 minus this"] = 0.2
    clip_high: Annotated[float, Meta(ge=0.0), "the ratio of probabilities is clipped above 1 plus this"] = 0.28
    grad_norm_max: Annotated[float, Meta(gt=0.0), "gradients with a larger norm are scaled down to it"] = 1.0
    staleness_max: Annotated[int | None, Meta(ge=0), "leave out what is staler at use"] = None
    micro_tokens: Annotated[int, Meta(ge=1), "tokens per forward pass: bounds memory"] = 1536
    """About 1.5 GB of activations for SmolLM2-135M in bf16."""
    gateway_patience_s: Annotated[float, "how long a gateway may not answer before the run ends"] = 60.0
    dtype: Annotated[Dtype, "to compute in; masters are float32"] = "bfloat16"
    threads: Annotated[int, Meta(ge=1), "of torch"] = 1
    budget_s: Annotated[
        float,
        Meta(ge=0.0),
        "time for all steps: they take fewer prompts, or are fewer, so that they fit; one is always taken",
    ] = math.inf
    """From the first version on."""
    groups_min: Annotated[int, Meta(ge=1), "prompts that a step takes at least"] = 2
    tokens_per_s: Annotated[
        float, Meta(gt=0.0), "training's speed as measured beforehand: how many prompts the first step takes"
    ] = math.inf


class Events:
    """The JSON lines that the demo's report is made of."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def add(self, event: str, **fields: Any) -> None:
        line = json.dumps({"t": round(time.time(), 3), "event": event, **fields})
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


class Announcer:
    """Publishes versions, and reports their stages while training continues."""

    def __init__(self, settings: Settings, events: Events) -> None:
        self._publisher = Publisher(settings.relay, settings.model)
        self._events = events
        self._watchers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ticket")
        self._reports: list[Future[None]] = []

    def publish(self, policy: Policy, step: int) -> int:
        """Returns the new version at *copied*."""
        began = time.monotonic()
        ticket = self._publisher.publish(policy.state_dict(), step=step)
        stall_s = time.monotonic() - began
        self._reports.append(self._watchers.submit(self._follow, ticket, began, stall_s))
        log.info("version %d (step %d) copied to the relay in %.3f s", ticket.version, step, stall_s)
        return ticket.version

    def wait(self) -> None:
        """Until every version published was reported; raises when one was not sealed."""
        for report in self._reports:
            report.result()

    def close(self) -> None:
        self._publisher.close()  # ends the waits of the watchers
        self._watchers.shutdown()

    def _follow(self, ticket: Ticket, began: float, stall_s: float) -> None:
        ticket.wait_sealed()
        sealed_s = time.monotonic() - began
        report: dict[str, Any] = {"version": ticket.version, "step": ticket.step}
        report.update(stall_s=round(stall_s, 4), sealed_s=round(sealed_s, 4))
        try:
            ticket.wait_all()
            self._events.add("publish", **report, broadcast_s=round(time.monotonic() - began, 4))
        except LaminarError as error:  # a relay is away: the version is published all the same
            log.warning("version %d did not reach every relay: %s", ticket.version, error)
            self._events.add("publish", **report, broadcast_s=None, error=str(error))


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimiser step saw."""

    loss: float
    grad_norm: float
    kl: float
    clip_fraction: float
    live: int  # trajectories with an advantage
    loss_tokens: int


def train_step(
    policy: Policy,
    batch: Packed,
    settings: Settings,
    stop: threading.Event,
    progress: Callable[[float], None] = lambda _: None,
) -> StepStats | None:
    """One optimiser step on a batch. None, and no step, when `stop` was set meanwhile.

    `progress` is called with the share that is done, after each forward and backward pass.
    """
    data = batch.torch()
    advantages = group_advantages(data.rewards, data.group_index)
    sampled = torch.tensor([bool(batch.loss_mask[batch.row(i)].any()) for i in range(batch.num_trajectories)])
    live = torch.nonzero((advantages != 0.0) & sampled).flatten().tolist()
    advantage_of = advantages.repeat_interleave(data.cu_seqlens.diff())
    num_tokens = sum(int(batch.loss_mask[batch.row(row)].sum()) for row in live)
    clip = Clip(settings.clip_low, settings.clip_high)
    sums, rows_done = torch.zeros(3, dtype=torch.float64), 0
    for groups in micro_batches(batch, live, tokens_max=settings.micro_tokens):
        if stop.is_set():
            policy.drop_gradients()
            return None
        layout = lay_out(batch, groups)
        tokens = layout.tokens
        logprobs = policy.logprobs(layout, data.input_ids)
        loss = token_loss(logprobs, data.logprobs[tokens], advantage_of[tokens], clip)
        (loss.loss.sum() / num_tokens).backward()  # type: ignore[no-untyped-call]
        sums += torch.stack([part.detach().double().sum() for part in (loss.loss, loss.kl, loss.clipped)])
        rows_done += sum(map(len, groups))
        progress(rows_done / len(live))
    norm = policy.update(grad_norm_max=settings.grad_norm_max) if live else 0.0
    mean_loss, kl, clip_fraction = (sums / max(num_tokens, 1)).tolist()
    return StepStats(mean_loss, norm, kl, clip_fraction, len(live), num_tokens)


def next_batches(
    reader: ExperienceReader, settings: Settings, stop: threading.Event, groups: int | None = None
) -> list[Batch]:
    """Leases of `groups` (`settings.groups`) whole groups in all; fewer only when `stop` was set.

    Retries for `gateway_patience_s` while the gateway does not answer: it may start later, or restart.
    """
    bound = {} if settings.staleness_max is None else {"staleness_max": settings.staleness_max}
    batches: list[Batch] = []
    answered = time.monotonic()
    while not stop.is_set():
        missing = (groups or settings.groups) - len({t.group_id for t in _trajectories(batches)})
        if missing <= 0:
            break
        wanted = Wanted(groups=missing, group_size=settings.group_size, wait_s=POLL_S, **bound)  # type: ignore[typeddict-item]
        try:
            batch = reader.sample(**wanted)
        except Unavailable as error:
            if time.monotonic() - answered > settings.gateway_patience_s:
                raise
            log.warning("%s; sampling again", error)
            stop.wait(POLL_S)
            continue
        answered = time.monotonic()
        if batch.trajectories:
            batches.append(batch)
    return batches


def _trajectories(batches: list[Batch]) -> list[Trajectory]:
    return [trajectory for batch in batches for trajectory in batch.trajectories]


def _acknowledge(reader: ExperienceReader, batches: list[Batch]) -> None:
    for batch in batches:
        try:
            reader.ack(batch)
        except NotFound as error:
            log.warning("a lease ended before its step did; its trajectories may be used again: %s", error)


def describe(batch: Packed, trainer_version: int) -> dict[str, float | int]:
    """The fields of a step's event that describe its batch; staleness is at use, per sampled token."""
    staleness = batch.staleness(trainer_version)
    return {
        "reward_mean": float(batch.rewards.mean()),
        "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness_max": int(staleness.max(initial=0)),
        "tokens": batch.num_tokens,
        "trajectories": batch.num_trajectories,
    }


def train(settings: Settings, stop: threading.Event, ready_file: Path | None = None) -> None:
    """Trains until `settings.steps` steps are done, no further one fits the budget, or `stop`; publishes each step."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    policy = Policy(settings.model_dir, lr=settings.lr, dtype=getattr(torch, settings.dtype))
    with (
        closing(Events(settings.out)) as events,
        closing(Announcer(settings, events)) as announcer,
        ExperienceReader(settings.gateway) as reader,
    ):
        reader.trainer_version = announcer.publish(policy, step=0)
        write_ready_file(ready_file, {"model": settings.model, "version": str(reader.trainer_version)})
        training = Training(settings, policy, events, announcer, reader)
        while training.step(stop):
            pass
        announcer.wait()


class Training:
    """The steps of one run, and what they took."""

    def __init__(
        self, settings: Settings, policy: Policy, events: Events, announcer: Announcer, reader: ExperienceReader
    ) -> None:
        self._settings, self._policy = settings, policy
        self._events, self._announcer, self._reader = events, announcer, reader
        self._pace = pace_of(settings)
        self._taken: list[Taken] = []
        self._began = time.monotonic()

    def step(self, stop: threading.Event) -> bool:
        """One more step; False when there is none."""
        step, plan = len(self._taken) + 1, self._plan()
        if plan.groups == 0:
            return False
        requested = time.monotonic()
        batches = next_batches(self._reader, self._settings, stop, plan.groups)
        began = time.monotonic()
        batch = pack(_trajectories(batches))
        stats = None if stop.is_set() else train_step(self._policy, batch, self._settings, stop, self._progress(step))
        if stats is None:
            log.info("stopped before step %d; its trajectories return to the buffer", step)
            return False
        fields = {**describe(batch, self._reader.trainer_version), **asdict(stats)}
        self._reader.trainer_version = self._announcer.publish(self._policy, step)
        _acknowledge(self._reader, batches)
        times = {"wait_s": round(began - requested, 3), "seconds": round(time.monotonic() - began, 3)}
        self._events.add("step", step=step, version=self._reader.trainer_version, **fields, **times)
        log.info("step %d: %s", step, {**fields, **times})
        self._taken.append(Taken(plan.groups, **times))
        return True

    def _plan(self) -> Next:
        elapsed_s = time.monotonic() - self._began
        plan = self._pace.next(self._taken, elapsed_s)
        log.info("step %d: %s", len(self._taken) + 1, plan)
        left_s = round(max(plan.end_s - elapsed_s, 0.0), 1)
        self._events.add("pace", done=len(self._taken), **asdict(plan), left_s=left_s)
        return plan

    def _progress(self, step: int) -> Callable[[float], None]:
        return lambda share: self._events.add("progress", step=step, share=round(share, 3))


def pace_of(settings: Settings) -> Pace:
    return Pace(
        steps=settings.steps,
        budget_s=settings.budget_s,
        groups_max=settings.groups,
        groups_min=min(settings.groups_min, settings.groups),
        group_s=GROUP_TOKENS / settings.tokens_per_s,
    )


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@config_options(Settings)
@click.option(
    "--ready-file", default=None, type=click.Path(dir_okay=False, path_type=Path), help="written once version 1 is out"
)
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def main(ready_file: Path | None, log_level: str, **options: Any) -> None:
    """Trains a policy by GRPO on the gateway's experience, publishing a version after every step.

    Ends with status 0 after --steps or on SIGTERM; a step that SIGTERM interrupts is not taken, and its trajectories
    return to the buffer.
    """
    setup_logging(log_level)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at its first large tensor; steps 10 % faster
    settings = config_from(Settings, options)
    log.info("%s", settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        train(settings, stop, ready_file)
    except LaminarError as error:
        log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
