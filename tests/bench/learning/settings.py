"""What is run: one training run in one mode, and the command lines of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.bench.learning.task import ANSWER_MAX

Mode = Literal["barrier", "repack", "inflight"]
MODES: tuple[Mode, ...] = ("barrier", "repack", "inflight")
MODEL = "policy"
PROMPT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. All but mode and seed is the same for every run that is compared."""

    mode: Mode
    seed: int = 1
    steps: int = 100  # of the optimiser; each publishes a version
    groups: int = 16  # prompts of a step
    group_size: int = 4
    lr: float = 1e-3
    engines: int = 4
    slots: int = 16  # of an engine: all engines have room for one batch at once
    step_ms: float = 8.0  # of an engine's decode step; see `engine`
    staleness_max: int = 4  # versions that a trajectory may be behind when it is trained on; as in the paper's runs
    eval_every: int = 2  # steps between two versions whose expected reward is computed, after the run

    @property
    def batch(self) -> int:
        return self.groups * self.group_size

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.seed}"

    @property
    def shared(self) -> dict[str, Any]:
        """What runs must have in common to be compared."""
        return {key: value for key, value in asdict(self).items() if key not in ("mode", "seed")}

    @property
    def bound(self) -> int:
        """A barrier trains each version on its own trajectories alone."""
        return 0 if self.mode == "barrier" else self.staleness_max


def relay_command(name: str, etcd: str, pool: Path, *, publishes: bool) -> list[str]:
    """The trainer's relay `publishes`; the engines load from the other, as if they were on another host."""
    flags: dict[str, object] = {
        "name": name,
        "etcd": etcd,
        "pool-dir": pool,
        "pool-bytes": "64MiB",
        "port": 0,
        "data-port": 0,
        "log-level": "warning",
    }
    return ["paramserver", "serve", *_options(flags), "--publish-host" if publishes else "--no-publish-host"]


def engine_command(settings: Settings, model: Path) -> list[str]:
    flags: dict[str, object] = {
        "model": model,
        "served-model-name": MODEL,
        "dtype": "float32",
        "weight-version": 0,
        "max-num-seqs": settings.slots,
        "max-model-len": PROMPT_TOKENS + ANSWER_MAX,
        "kv-cache-tokens": settings.slots * 320,  # every sequence fits at full length: KV is never what is short
        "log-level": "warning",
        "port": 0,
    }
    return ["tests.bench.learning.engine", str(settings.step_ms), *_options(flags)]


def gateway_command(settings: Settings, model: Path, engines: Mapping[str, str], relay: str) -> list[str]:
    """`--mode` is the one flag in which runs differ; --intake-* and --repack-* matter in mode `repack` alone.

    Times are those of a task whose longest answer takes some two seconds, where the defaults are for minutes.
    """
    flags: dict[str, object] = {
        "model": MODEL,
        "tokenizer": model,
        "mode": settings.mode,
        "relay": relay,
        "max-running": settings.slots,
        "staleness-max": settings.bound,
        "intake-batch": settings.slots,  # an engine's share of a batch, then it loads what is newest
        "intake-min-batch": settings.slots // 2,
        "intake-age-s": 10,
        "drain-max-s": 5,
        "repack-interval-s": 0.25,
        "prefill-tokens-per-s": 20_000,
        "poll-interval-s": 0.5,
        "queue-timeout-s": 600,
        "log-level": "warning",
        "port": 0,
    }
    named = [f"--engine={name}=vllm={url}" for name, url in engines.items()]
    return ["gateway", "serve", *_options(flags), *named]


def trainer_command(settings: Settings, model: Path, relay: str, gateway: str, out: Path) -> list[str]:
    flags: dict[str, object] = {
        "relay": relay,
        "gateway": gateway,
        "model-dir": model,
        "out": out,
        "steps": settings.steps,
        "groups": settings.groups,
        "group-size": settings.group_size,
        "lr": settings.lr,
        "staleness-max": settings.bound,
        "eval-every": settings.eval_every,
        "seed": settings.seed,
    }
    return ["tests.bench.learning.trainer", *_options(flags)]


def _options(flags: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
