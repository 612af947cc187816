"""The demo's processes as command lines. Pure: settings and the addresses known so far in, commands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from deploy.demo.processes import Command
from gateway.core.dtypes import Choice, Dtype
from protos.options import Flag

MODEL = "policy"
RELAYS = ("relay-1", "relay-2", "relay-3")
ENGINES = ("engine-1", "engine-2", "engine-3")
ENVIRONMENTS = ("tool-chain", "reasoning")


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of the demo. The machine has two cores, so everything here is small."""

    model_dir: Path
    report_dir: Path
    data_dir: Path  # the gateway's store; gone after the run
    pool_dir: Path  # the relays' memory; gone after the run
    seed: Annotated[int, "of the tasks, of sampling and of training"] = 1
    steps: Annotated[int, Meta(ge=1), "of the trainer; each publishes a version"] = 10
    groups: int = 4  # prompts per step
    group_size: int = 8
    dtype: Dtype = "bfloat16"  # of the trainer and of every engine; what travels is bf16 in any case
    trainer_threads: int = 2  # engines are nice to it, and idle when it has enough
    engine_threads: int = 1
    train_tokens_per_s: float = 1000.0  # as measured
    budget_s: Annotated[
        float,
        Meta(ge=1.0),
        Flag("--budget-s", "--deadline-s"),
        "time for the training steps, after the set-up: on a slow processor they take fewer prompts, or are fewer",
    ] = 240.0
    slots: int = 8  # sequences an engine runs at once
    kv_tokens: int = 4096
    max_model_len: int = 1024
    pool_bytes_min: ClassVar[int] = 1152 << 20
    pool_bytes: int = pool_bytes_min  # per relay: four times the 269 MB of a version, and some room
    concurrency: Mapping[str, int] = field(default_factory=lambda: {"tool-chain": 24, "reasoning": 6})
    log_level: str = "info"

    @property
    def micro_tokens(self) -> int:
        """Tokens of a forward pass: some 1.5 GB of activations in either dtype."""
        return 1536 if self.dtype == "bfloat16" else 768

    @property
    def memory_bytes(self) -> int:
        """Memory of all processes, as measured with SmolLM2-135M: trainer 5.4 GB, pools 3, an engine 1.3 or 2.2."""
        return (15 if self.dtype == "float32" else 12) << 30

    @property
    def logs(self) -> Path:
        return self.report_dir / "logs"

    @property
    def trainer_events(self) -> Path:
        return self.logs / "trainer.events.jsonl"


def settle(settings: Settings, choice: Choice, *, cores: int, dtype: Dtype | None = None) -> Settings:
    """The settings by what was measured of the processor; `dtype` where the user wants another one than the fastest.

    An engine has one thread, unless the trainer and all engines have cores of their own for more.
    """
    other = next((figure for figure in choice.figures if figure.dtype == dtype), choice.chosen)
    figure = other if dtype not in (None, choice.dtype) else choice.chosen
    enough = cores >= (len(ENGINES) + 1) * figure.threads
    return replace(
        settings,
        dtype=figure.dtype,
        trainer_threads=figure.threads,
        engine_threads=figure.threads if enough else 1,
        train_tokens_per_s=round(figure.train, 1),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """The command of every process."""

    settings: Settings

    def etcd(self) -> Command:
        return Command("etcd", _module("paramserver", "etcd", port=0))

    def relay(self, name: str, etcd_address: str) -> Command:
        """The first relay takes the trainer's versions, the others follow it in the chain."""
        options = {"name": name, "etcd": etcd_address, "port": 0, "data_port": 0, "log_level": self.settings.log_level}
        pool = {"pool_dir": self.settings.pool_dir / name, "pool_bytes": self.settings.pool_bytes}
        publish = "--publish-host" if name == RELAYS[0] else "--no-publish-host"
        return Command(name, (*_module("paramserver", "serve", **options, **pool), publish))

    def engine(self, name: str, port: int = 0) -> Command:
        """`port` is 0 but for an engine that comes back: the gateway knows it by its address."""
        argv = _module(
            "gateway",
            "engine",
            model=self.settings.model_dir,
            served_model_name=MODEL,
            dtype=self.settings.dtype,
            max_num_seqs=self.settings.slots,
            kv_cache_tokens=self.settings.kv_tokens,
            max_model_len=self.settings.max_model_len,
            threads=self.settings.engine_threads,
            weight_version=0,
            logprobs_mode="processed_logprobs",
            port=port,
            log_level=self.settings.log_level,
        )
        # Nice: the processes that control the engines come before the engines' computation.
        return Command(name, argv, ready_timeout_s=120.0, niceness=5)

    def gateway(self, engines: Mapping[str, str], relays: Sequence[str]) -> Command:
        """Engine n loads from relay n, as if each pair shared a host."""
        argv = _module(
            "gateway",
            "serve",
            model=MODEL,
            tokenizer=self.settings.model_dir,
            engine=[f"{name}=vllm={url}@{relay}" for (name, url), relay in zip(engines.items(), relays, strict=True)],
            data=self.settings.data_dir,
            mode="repack",
            intake_batch=16,
            intake_age_s=25,
            intake_min_batch=8,
            max_running=self.settings.slots,
            kv_max=0.9,
            repack_interval_s=1,
            staleness_max=1,
            port=0,
            log_level=self.settings.log_level,
        )
        return Command("gateway", argv)

    def trainer(self, relay_address: str, gateway_url: str) -> Command:
        """Ready once version 1 is out; ends by itself after the steps that fit its budget."""
        argv = _module(
            "deploy.demo.training.trainer",
            relay=relay_address,
            gateway=gateway_url,
            model=MODEL,
            model_dir=self.settings.model_dir,
            steps=self.settings.steps,
            seed=self.settings.seed,
            groups=self.settings.groups,
            group_size=self.settings.group_size,
            dtype=self.settings.dtype,
            threads=self.settings.trainer_threads,
            micro_tokens=self.settings.micro_tokens,
            tokens_per_s=self.settings.train_tokens_per_s,
            budget_s=self.settings.budget_s,
            out=self.settings.trainer_events,
            log_level=self.settings.log_level,
        )
        return Command("trainer", argv, ready_timeout_s=120.0, ends_by_itself=True)

    def runner(self, environment: str, gateway_url: str) -> Command:
        """Rolls out until SIGTERM."""
        argv = _module(
            "agents_env",
            "run",
            environment,
            gateway=gateway_url,
            model=MODEL,
            concurrency=self.settings.concurrency[environment],
            group_size=self.settings.group_size,
            seed=self.settings.seed,
            out=self.settings.logs / f"agents-{environment}.rollouts.jsonl",
            log_level=self.settings.log_level,
        )
        return Command(f"agents-{environment}", argv)


def _module(*arguments: str, **options: object) -> tuple[str, ...]:
    """`python -m <arguments> --option value ...`; a list repeats its option."""
    argv = ["-m", *arguments]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            argv += [f"--{name.replace('_', '-')}", str(one)]
    return tuple(argv)
