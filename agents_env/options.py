"""The options of `agents-env run` and `eval`, and what is made of them.

Each environment's command is written once, for `run`; `eval` and `tasks` have the same commands with other options.
"""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import click

from agents_env.environment import Environment
from agents_env.runner import Plan
from agents_env.runner.phases import PhaseLimits
from agents_env.runner.sources import PoolOptions
from agents_env.server import Sampling, Server, api_key

SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"]}
FILE: Any = click.Path(dir_okay=False, path_type=Path)
SECONDS = click.FloatRange(min=0, min_open=True)

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]


class Startable(Protocol):
    """What a command does with its environment."""

    def start(self, environment: Environment[Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the model is, how it samples, and what time each thing may take."""

    gateway: str
    model: str
    concurrency: int
    seed: int
    temperature: float
    top_p: float
    attempts: int
    failures_max: int
    patience_s: float
    timeout_s: float
    reset_timeout_s: float
    model_timeout_s: float
    tool_timeout_s: float
    score_timeout_s: float
    out: Path | None
    run_id: str | None
    log_level: str
    log_format: str = "text"

    def server(self, *, sessions: bool = True) -> Server:
        return Server(
            self.gateway,
            Sampling(self.model, self.temperature, self.top_p),
            sessions=sessions,
            api_key=api_key(sessions=sessions),
            patience_s=self.patience_s,
            timeout_s=self.timeout_s,
        )

    def limits(self) -> PhaseLimits:
        return PhaseLimits(self.reset_timeout_s, self.model_timeout_s, self.tool_timeout_s, self.score_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ServerOptions):
    sessions: bool
    groups: int
    group_size: int
    duration_s: float | None
    split: Literal["train", "eval"]
    pool: str | None
    follow: bool
    lease_s: float
    journal: Path | None
    ready_file: Path | None
    metrics_port: int | None = None

    def plan(self, run_id: str | None = None) -> Plan:
        return Plan(
            run_id=run_id or self.run_id or secrets.token_hex(3),
            groups=self.groups,
            group_size=self.group_size,
            concurrency=self.concurrency,
            seed=self.seed,
            attempts=self.attempts,
            duration_s=self.duration_s,
            split=self.split,
            failures_max=self.failures_max,
            limits=self.limits(),
        )

    def pool_options(self) -> PoolOptions | None:
        return None if self.pool is None else PoolOptions(self.pool, self.lease_s, self.follow)

    def start(self, environment: Environment[Any]) -> None:
        from agents_env.run import start

        start(environment, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions(ServerOptions):
    tasks: int
    samples: int
    version: int | None
    json: Path | None

    def plan(self) -> Plan:
        return Plan(
            run_id=self.run_id or f"eval-{secrets.token_hex(3)}",
            groups=self.tasks,
            group_size=self.samples,
            concurrency=self.concurrency,
            seed=self.seed,
            attempts=self.attempts,
            split="eval",
            failures_max=self.failures_max,
            limits=self.limits(),
            version=self.version,
        )

    def start(self, environment: Environment[Any]) -> None:
        from agents_env.evaluate import start

        start(environment, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksOptions:
    count: int
    seed: int

    def start(self, environment: Environment[Any]) -> None:
        from agents_env.run import print_tasks

        print_tasks(environment, count=self.count, seed=self.seed)


def url(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise click.BadParameter(f"{value!r} is not a URL; write http://{value}")
    return value


def _option(owner: Callable[..., object], flag: str, **attributes: Any) -> Option:
    """The option of a parameter of `owner`, with the parameter's default."""
    name = flag.partition("/")[0].removeprefix("--").replace("-", "_")
    return click.option(flag, default=inspect.signature(owner).parameters[name].default, **attributes)


def _limit(phase: str, what: str) -> Option:
    return click.option(
        f"--{phase}-timeout-s", default=getattr(PhaseLimits(), f"{phase}_s"), type=SECONDS, help=f"Limit of {what}."
    )


GATEWAY = click.option(
    "--gateway",
    required=True,
    metavar="URL",
    callback=url,
    help="Address of the gateway, as `gateway serve` prints it, or an OpenAI base_url.",
)
LOG_LEVEL = click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="The least severe messages that are logged.",
)
LOG_FORMAT = click.option(
    "--log-format",
    default="text",
    type=click.Choice(["text", "json"]),
    help="Log lines for people, or a JSON object each.",
)
_SEED = _option(Plan, "--seed", type=click.IntRange(min=0), help="Seed of the environment's stream of tasks.")

_SERVER: Sequence[Option] = [
    GATEWAY,
    click.option("--model", default="policy", help="The model's name at the gateway."),
    _option(Plan, "--concurrency", type=click.IntRange(min=1), help="Rollouts at once."),
    _SEED,
    _option(Sampling, "--temperature", type=click.FloatRange(min=0), help="Temperature of sampling; 0: greedy."),
    _option(
        Sampling,
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        help="Sample from the likeliest tokens that have this probability together; 1: from all.",
    ),
    _option(
        Plan, "--attempts", type=click.IntRange(min=1), help="Attempts for each sample, each in a session of its own."
    ),
    _option(Plan, "--failures-max", type=click.IntRange(min=1), help="Failures in a row that end the run."),
    _option(
        Server,
        "--patience-s",
        type=click.FloatRange(min=0),
        help="How long a request is repeated to a server that is away, or has no room for a session.",
    ),
    _option(Server, "--timeout-s", type=SECONDS, help="Limit of one request."),
    _limit("reset", "a rollout's beginning, up to its first model call"),
    _limit("model", "one model call, with its wait for a full server"),
    _limit("tool", "what happens between two model calls, or after the last"),
    _limit("score", "the scoring, in environments that mark it"),
    click.option("--out", default=None, type=FILE, help="File to which a JSON line is added for each rollout."),
    click.option("--run-id", default=None, show_default="random", help="Part of every group and session id."),
    LOG_LEVEL,
    LOG_FORMAT,
]
RUN: Sequence[Option] = [
    *_SERVER,
    _option(
        Server,
        "--sessions/--no-sessions",
        help="--no-sessions: the server is a plain OpenAI one, and nothing is recorded.",
    ),
    _option(
        Plan, "--groups", type=click.IntRange(min=0), help="The environment's own tasks to roll out; 0: until stopped."
    ),
    _option(Plan, "--group-size", type=click.IntRange(min=1), help="Samples of each of the environment's own tasks."),
    _option(
        Plan,
        "--duration-s",
        type=click.FloatRange(min=0),
        show_default="no end",
        help="Stop after so many seconds.",
    ),
    _option(Plan, "--split", type=click.Choice(["train", "eval"]), help="eval: scored, and not trained on."),
    click.option(
        "--pool",
        is_flag=False,
        flag_value=PoolOptions().name,
        default=None,
        metavar="[NAME]",
        help="Lease samples from this prompt pool of the gateway until it is drained; without NAME: from `default`.",
    ),
    click.option("--follow", is_flag=True, help="With --pool: wait for further tasks when it is drained."),
    click.option(
        "--lease-s",
        default=PoolOptions().lease_s,
        type=click.FloatRange(1, 86_400),
        help="With --pool: time after which other runners get the samples of this one, should it die.",
    ),
    click.option(
        "--journal", default=None, type=FILE, help="File with which the same command goes on where it was stopped."
    ),
    click.option("--ready-file", default=None, type=FILE, help="JSON file, written once it rolls out."),
    click.option(
        "--metrics-port",
        default=None,
        type=click.IntRange(0, 65535),
        show_default="none are served",
        help="Port of the Prometheus metrics, on loopback; 0: any free one.",
    ),
]
_OF_PROGRAMS = {
    "group_size": click.option(
        "--runs", "group_size", default=1, type=click.IntRange(min=1), help="Runs for each task, which are a group."
    ),
    "tool_timeout_s": click.option(
        "--time-limit-s", "tool_timeout_s", default=3600.0, type=SECONDS, help="Limit of one run of the program."
    ),
}
"""Options of `run` that `exec` has under other names."""
_NOT_OF_PROGRAMS = {"groups", "sessions", "temperature", "top_p", "reset_timeout_s", "model_timeout_s"}


def _of_programs(option: Option) -> Option:
    """An option of `run` as `exec` has it: those that a program decides by itself are not shown."""

    def add(command: Any) -> Any:
        found = option(lambda: None).__click_params__[0]
        added = _OF_PROGRAMS.get(found.name, option)(command)
        added.__click_params__[-1].hidden = found.name in _NOT_OF_PROGRAMS
        return added

    return add


EXEC: Sequence[Option] = [_of_programs(option) for option in RUN]
EVAL: Sequence[Option] = [
    *_SERVER,
    click.option(
        "--tasks",
        default=100,
        type=click.IntRange(min=1),
        help="How many tasks: the first ones of --seed, a fixed set.",
    ),
    click.option("--samples", default=1, type=click.IntRange(min=1), help="Samples of each task."),
    click.option(
        "--version",
        default=None,
        type=click.IntRange(min=0),
        show_default="none is pinned",
        help="Weight version that every sample is pinned to.",
    ),
    click.option("--json", default=None, type=FILE, help="File for the whole result."),
]
TASKS: Sequence[Option] = [
    click.option("--count", default=100, type=click.IntRange(min=1), help="How many tasks."),
    _SEED,
]


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of every environment to a command, which gets them as `options`."""
    return _with(command, RunOptions, RUN)


def exec_options(command: Callable[..., None]) -> Callable[..., None]:
    return _with(command, RunOptions, EXEC)


def _with(
    command: Callable[..., None], kind: Callable[..., Startable], options: Sequence[Option]
) -> Callable[..., None]:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # dataclasses, all of them

    @functools.wraps(command)
    def with_options(**arguments: Any) -> None:
        own = {name: value for name, value in arguments.items() if name not in names}
        command(options=kind(**{name: arguments[name] for name in names}), **own)

    for option in reversed(options):
        with_options = option(with_options)
    return with_options


def mirror(run: click.Group, group: click.Group, kind: Callable[..., Startable], options: Sequence[Option]) -> None:
    """Gives `group` every command of `run`, with the environment's own options and `options`."""
    common = {field.name for field in fields(RunOptions)}
    for name, command in run.commands.items():
        assert command.callback is not None
        bare = command.callback.__wrapped__  # type: ignore[attr-defined]  # by functools.wraps
        mirrored = click.command(name, help=command.help, context_settings=SETTINGS)(_with(bare, kind, options))
        mirrored.params[:0] = [parameter for parameter in command.params if parameter.name not in common]
        group.add_command(mirrored)
