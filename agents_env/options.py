"""The options of `agents-env run`, `eval`, `tasks` and `exec`, and what is made of them.

Each environment's command is written once, for `run`; `eval` and `tasks` have the same commands with other options.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import click
from msgspec import Meta

from agents_env.environment import Environment
from agents_env.runner import Plan
from agents_env.runner.phases import PhaseLimits
from agents_env.runner.sources import PoolOptions
from agents_env.server import Sampling, Server, api_key
from protos.options import LOG_LEVEL, PORT_MAX, Flag, config_from, config_names, config_options
from protos.process import LOG_FORMS

SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"]}
FILE = click.Path(dir_okay=False, path_type=Path)
_PLAN, _POOL = Plan(""), PoolOptions()

Command = Callable[..., None]


class Url(click.ParamType[str]):
    """An address that begins with http:// or https://."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        if not str(value).startswith(("http://", "https://")):
            self.fail(f"{value!r} is not a URL; write http://{value}", param, context)
        return str(value)


class JsonObject(click.ParamType[Mapping[str, Any]]):
    name = "json"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> Mapping[str, Any]:
        try:
            found = json.loads(str(value))
        except json.JSONDecodeError as error:
            self.fail(f"not JSON: {error}", param, context)
        if not isinstance(found, dict):
            self.fail("not a JSON object", param, context)
        return found


class Start(Protocol):
    """What a command does with its environment."""

    def __call__(self, environment: Environment[Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the model is, how it samples, and what time each thing may take."""

    gateway: Annotated[
        str, Url(), Flag(metavar="URL"), "Address of the gateway, as `gateway serve` prints it, or an OpenAI base_url."
    ]
    sampling: Sampling = field(default_factory=Sampling)
    concurrency: Annotated[int, Meta(ge=1), "Rollouts at once."] = _PLAN.concurrency
    seed: Annotated[int, Meta(ge=0), "Seed of the environment's stream of tasks."] = _PLAN.seed
    attempts: Annotated[int, Meta(ge=1), "Attempts for each sample, each in a session of its own."] = _PLAN.attempts
    failures_max: Annotated[int, Meta(ge=1), "Failures in a row that end the run."] = _PLAN.failures_max
    patience_s: Annotated[
        float, Meta(ge=0), "How long a request is repeated to a server that is away, or has no room for a session."
    ] = 60.0
    timeout_s: Annotated[float, Meta(gt=0), "Limit of one request."] = 600.0
    limits: PhaseLimits = field(default_factory=PhaseLimits)
    out: Annotated[Path | None, FILE, "File to which a JSON line is added for each rollout."] = None
    run_id: Annotated[str | None, Flag(show_default="random"), "Part of every group and session id."] = None
    log_level: Annotated[str, LOG_LEVEL, "The least severe messages that are logged."] = "info"
    log_format: Annotated[str, click.Choice(LOG_FORMS), "Log lines for people, or a JSON object each."] = "text"

    def server(self, *, sessions: bool = True) -> Server:
        return Server(
            self.gateway,
            self.sampling,
            sessions=sessions,
            api_key=api_key(sessions=sessions),
            patience_s=self.patience_s,
            timeout_s=self.timeout_s,
        )

    def _plan(self, run_id: str, groups: int, group_size: int, **others: Any) -> Plan:
        return Plan(
            run_id,
            groups,
            group_size,
            concurrency=self.concurrency,
            seed=self.seed,
            attempts=self.attempts,
            failures_max=self.failures_max,
            limits=self.limits,
            **others,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ServerOptions):
    sessions: Annotated[bool, "--no-sessions: the server is a plain OpenAI one, and nothing is recorded."] = True
    groups: Annotated[int, Meta(ge=0), "The environment's own tasks to roll out; 0: until stopped."] = _PLAN.groups
    group_size: Annotated[int, Meta(ge=1), "Samples of each of the environment's own tasks."] = _PLAN.group_size
    duration_s: Annotated[float | None, Meta(ge=0), Flag(show_default="no end"), "Stop after so many seconds."] = None
    split: Annotated[Literal["train", "eval"], "eval: scored, and not trained on."] = _PLAN.split
    pool: Annotated[
        str | None,
        Flag(is_flag=False, flag_value=_POOL.name, metavar="[NAME]"),
        "Lease samples from this prompt pool of the gateway until it is drained; without NAME: from `default`.",
    ] = None
    follow: Annotated[bool, "With --pool: wait for further tasks when it is drained."] = _POOL.follow
    lease_s: Annotated[
        float,
        Meta(ge=1, le=86_400),
        "With --pool: time after which other runners get the samples of this one, should it die.",
    ] = _POOL.lease_s
    journal: Annotated[Path | None, FILE, "File with which the same command goes on where it was stopped."] = None
    ready_file: Annotated[Path | None, FILE, "JSON file, written once it rolls out."] = None
    metrics_port: Annotated[
        int | None,
        Meta(ge=0, le=PORT_MAX),
        Flag(show_default="none are served"),
        "Port of the Prometheus metrics, on loopback; 0: any free one.",
    ] = None

    def plan(self, run_id: str | None = None) -> Plan:
        run_id = run_id or self.run_id or secrets.token_hex(3)
        return self._plan(run_id, self.groups, self.group_size, duration_s=self.duration_s, split=self.split)

    def pool_options(self) -> PoolOptions | None:
        return None if self.pool is None else PoolOptions(self.pool, self.lease_s, self.follow)


@dataclass(frozen=True, slots=True)
class ProgramLimits(PhaseLimits):
    tool_s: Annotated[float, Meta(gt=0), Flag("--time-limit-s"), "Limit of one run of the program."] = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecOptions(RunOptions):
    """Those of `run`, some under other names."""

    limits: ProgramLimits = field(default_factory=ProgramLimits)
    group_size: Annotated[int, Meta(ge=1), Flag("--runs"), "Runs for each task, which are a group."] = 1


NOT_OF_PROGRAMS = ("groups", "sessions", "temperature", "top_p", "reset_s", "model_s")
"""What a program decides by itself: `exec` does not show these options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions(ServerOptions):
    tasks: Annotated[int, Meta(ge=1), "How many tasks: the first ones of --seed, a fixed set."] = 100
    samples: Annotated[int, Meta(ge=1), "Samples of each task."] = 1
    version: Annotated[
        int | None, Meta(ge=0), Flag(show_default="none is pinned"), "Weight version that every sample is pinned to."
    ] = None
    json: Annotated[Path | None, FILE, "File for the whole result."] = None

    def plan(self) -> Plan:
        run_id = self.run_id or f"eval-{secrets.token_hex(3)}"
        return self._plan(run_id, self.tasks, self.samples, split="eval", version=self.version)


@dataclass(frozen=True, slots=True)
class TasksOptions:
    count: Annotated[int, Meta(ge=1), "How many tasks."] = 100
    seed: Annotated[int, Meta(ge=0), "Seed of the environment's stream of tasks."] = _PLAN.seed


def starting(kind: type, start: Callable[..., None], **differing: Any) -> Callable[[Command], Command]:
    """Adds the options of `kind` to a command, which gets `start` for them: it calls that with its environment.
    `differing`: by field, as `config_options` has it."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_options(**arguments: Any) -> None:
            options: Any = config_from(kind, {name: arguments.pop(name) for name in config_names(kind)})
            command(start=functools.partial(start, options=options), **arguments)

        return config_options(kind, **differing)(with_options)

    return decorate


def mirror(run: click.Group, group: click.Group, kind: type, start: Callable[..., None]) -> None:
    """Gives `group` every command of `run`, with the environment's own options and those of `kind`."""
    common = {*config_names(RunOptions)}
    for name, command in run.commands.items():
        assert command.callback is not None
        bare = command.callback.__wrapped__  # type: ignore[attr-defined]  # by functools.wraps
        mirrored = click.command(name, help=command.help, context_settings=SETTINGS)(starting(kind, start)(bare))
        mirrored.params[:0] = [parameter for parameter in command.params if parameter.name not in common]
        group.add_command(mirrored)
