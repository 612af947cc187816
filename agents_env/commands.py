"""The commands of the environments with tools, tasks of one's own, or a scoring that takes processes.

`cli.py` adds them to `agents-env run`, and with it to `eval` and `tasks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import msgspec

from agents_env.environment import Environment, MatchEnvironment, SelfCallingEnvironment
from agents_env.environments import code, mathematics, nim, text_games, tool_calls
from agents_env.environments.task_files import BadTaskFile, read_tasks
from agents_env.failures import RunFailed
from agents_env.openenv import environment as openenv
from agents_env.openenv.serving import served
from agents_env.options import SETTINGS, JsonObject, Start, Url
from agents_env.run import run_options
from agents_env.sandbox.client import Sandbox, SandboxFailed
from agents_env.sandbox.limits import Limits, SandboxRefused
from protos.terminal import Failed

PLAIN = {int, float, bool, str, NoneType}
"""Kinds of arguments that --set is checked against."""

_task_file = click.option(
    "--task-file",
    default=None,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    show_default="a small set of the package",
    help="Tasks as JSON lines; docs/environments.md has their fields.",
)


def _max_tokens(default: int) -> Callable[[Any], Any]:
    return click.option("--max-tokens", default=default, type=click.IntRange(min=1), help="Tokens of a reply at most.")


@click.command("code", context_settings=SETTINGS)
@_task_file
@_max_tokens(code.MAX_TOKENS)
@click.option(
    "--sandbox", default="auto", type=click.Choice(["auto", "sandlock", "bubblewrap"]), help="What runs the code."
)
@click.option(
    "--run-s",
    default=5.0,
    type=click.FloatRange(min=0, min_open=True),
    help="Limit of all cases of a function together.",
)
@click.option("--memory-mib", default=256, type=click.IntRange(min=32), help="Memory of a run, in MiB.")
@click.option(
    "--disk-mib", default=16, type=click.IntRange(min=0), help="Size of a run's /tmp, in MiB; 0: it can write nowhere."
)
@run_options
def code_command(
    start: Start,
    task_file: Path | None,
    max_tokens: int,
    sandbox: Literal["auto", "sandlock", "bubblewrap"],
    run_s: float,
    memory_mib: int,
    disk_mib: int,
) -> None:
    """Single-turn: write a Python function, which is tested in a sandbox."""
    limits = Limits(time_s=run_s, memory_bytes=memory_mib << 20, disk_bytes=disk_mib << 20)
    try:
        box = Sandbox(None if sandbox == "auto" else sandbox, limits)
        asyncio.run(box.check())
    except (SandboxRefused, SandboxFailed) as error:
        raise Failed(f"no sandbox for the code that the model writes: {error}") from error
    start(code.Code(_tasks(task_file, code.OWN_TASKS, code.function_task), box, max_tokens=max_tokens))


@click.command("math", context_settings=SETTINGS)
@_task_file
@_max_tokens(mathematics.MAX_TOKENS)
@click.option("--judges", default=2, type=click.IntRange(min=1), help="Processes that score.")
@run_options
def math_command(start: Start, task_file: Path | None, max_tokens: int, judges: int) -> None:
    """Single-turn: problems of mathematics, scored by math-verify."""
    scorer = mathematics.Scorer(judges)
    tasks = _tasks(task_file, mathematics.OWN_TASKS, mathematics.math_task)
    try:
        start(mathematics.Mathematics(tasks, scorer, max_tokens=max_tokens))
    finally:
        scorer.close()


@click.command("tool-calls", context_settings=SETTINGS)
@_max_tokens(tool_calls.MAX_TOKENS)
@run_options
def tool_calls_command(start: Start, max_tokens: int) -> None:
    """Multi-turn: arithmetic with a calculator, called by the chat template's own format of tools."""
    start(tool_calls.ToolCalls(max_tokens=max_tokens))


@click.command("nim", context_settings=SETTINGS)
@click.option(
    "--opponent",
    default="self",
    type=click.Choice(["self", "random", "perfect"]),
    help="Who plays against the model; self: the model.",
)
@click.option(
    "--opponent-version",
    default=None,
    type=click.IntRange(min=0),
    help="Weight version of the opponent, which is not trained on.",
    show_default="the model's own",
)
@click.option("--heaps", default=3, type=click.IntRange(1, len(nim.NAMES)), help="Heaps at the beginning.")
@_max_tokens(nim.MAX_TOKENS)
@run_options
def nim_command(
    start: Start,
    opponent: Literal["self", "random", "perfect"],
    opponent_version: int | None,
    heaps: int,
    max_tokens: int,
) -> None:
    """Two players: a game of Nim, each player a session of its own."""
    try:
        game = nim.Nim(opponent=opponent, version=opponent_version, num_heaps=heaps, max_tokens=max_tokens)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    start(game)


@click.command("textarena", context_settings=SETTINGS)
@click.option(
    "--game",
    default=text_games.DEFAULT_GAME,
    help=f"One of {', '.join(text_games.GAMES)}; with -v0, or another variant.",
)
@click.option(
    "--opponent-version",
    default=None,
    type=click.IntRange(min=0),
    help="Weight version of the opponent, which is not trained on.",
    show_default="the model's own",
)
@_max_tokens(text_games.MAX_TOKENS)
@run_options
def textarena_command(start: Start, game: str, opponent_version: int | None, max_tokens: int) -> None:
    """One or two players: a game of the textarena library (extra `games`)."""
    try:
        environment = text_games.TextGames(game, version=opponent_version, max_tokens=max_tokens)
    except text_games.UnknownGame as error:
        raise click.UsageError(str(error)) from error
    start(environment)


@click.command("openenv", context_settings=SETTINGS)
@click.option("--server", default=None, metavar="URL", type=Url(), help="Address of an OpenEnv environment that runs.")
@click.option(
    "--serve",
    default=None,
    metavar="COMMAND",
    help="Starts an environment for this run, on the port that is put for {port}.",
)
@click.option("--reset", default=None, metavar="JSON", type=JsonObject(), help="Arguments of every reset.")
@click.option(
    "--observe", multiple=True, metavar="FIELD", show_default="all", help="Field of observations that the model reads."
)
@click.option("--system", default=None, metavar="TEXT", show_default="none", help="The system message.")
@click.option(
    "--reward",
    default="sum",
    type=click.Choice(["sum", "last"]),
    help="How the rewards of the steps become the episode's.",
)
@click.option(
    "--turns-max", default=openenv.TURNS_MAX, type=click.IntRange(min=1), help="Replies in an episode at most."
)
@_max_tokens(openenv.MAX_TOKENS)
@run_options
def openenv_command(
    start: Start,
    server: str | None,
    serve: str | None,
    reset: Mapping[str, Any] | None,
    observe: tuple[str, ...],
    system: str | None,
    reward: Literal["sum", "last"],
    turns_max: int,
    max_tokens: int,
) -> None:
    """Multi-turn: an environment of OpenEnv, behind its own server (docs/openenv.md)."""
    if (server is None) == (serve is None):
        raise click.UsageError("name the environment's server by --server URL, or let --serve COMMAND start one")
    try:
        with contextlib.nullcontext(server) if serve is None else served(serve) as at:
            assert at is not None
            start(
                openenv.OpenEnv(
                    at,
                    reset=reset or {},
                    observe=observe,
                    system=system,
                    reward=reward,
                    turns_max=turns_max,
                    max_tokens=max_tokens,
                )
            )
    except RunFailed as error:
        raise Failed(str(error)) from error


def _setting(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> Mapping[str, Any]:
    """Values are JSON, or else text as it stands."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


@click.command("module", context_settings=SETTINGS)
@click.argument("where", metavar="MODULE:CLASS")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_setting,
    help="An argument of the class: JSON, or text.",
)
@run_options
def module_command(start: Start, where: str, settings: Mapping[str, Any]) -> None:
    """An environment of your own: CLASS of MODULE, which Python finds from this folder (docs/environments.md)."""
    start(_own(where, settings))


def _typed(made_by: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with a path where the argument's annotation has one. TypeError for a value that is of another kind
    than its annotation, where that is a plain one."""
    found = dict(settings)
    try:
        hints = get_type_hints(made_by.__init__)
    except NameError:  # an annotation that cannot be evaluated says nothing
        return found
    for name, value in settings.items():
        kind = hints.get(name)
        if isinstance(value, str) and _is_path(kind):
            found[name] = Path(value)
        elif kind is not None and set(get_args(kind) or (kind,)) <= PLAIN:
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise TypeError(f"--set {name}={json.dumps(value)}: {error}") from error
    return found


def _is_path(kind: Any) -> bool:
    """Whether it is a path's, such as `os.PathLike[str] | None`, that is no text."""
    of = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    kinds = [get_origin(one) or one for one in of]
    return str not in kinds and any(isinstance(one, type) and issubclass(one, os.PathLike) for one in kinds)


def _own(where: str, settings: Mapping[str, Any]) -> Environment[Any]:
    module, _, name = where.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made_by = getattr(importlib.import_module(module), name)
        environment = made_by(**_typed(made_by, settings))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise click.UsageError(
            f"{where} makes no environment: {error}; it is MODULE:CLASS, such as my_package.my_module:MyEnvironment, "
            "and --set NAME=VALUE gives its arguments"
        ) from error
    plays = isinstance(environment, SelfCallingEnvironment | MatchEnvironment) or hasattr(environment, "rollout")
    lacking = [what for what in ("name", "tasks") if not hasattr(environment, what)] + ([] if plays else ["rollout"])
    if lacking:
        raise click.UsageError(f"{where} is no environment: it has no {', '.join(lacking)} (agents_env/environment.py)")
    made: Environment[Any] = environment
    return made


def add_to(run: click.Group) -> None:
    for command in (
        code_command,
        math_command,
        module_command,
        tool_calls_command,
        nim_command,
        textarena_command,
        openenv_command,
    ):
        run.add_command(command)


def _tasks(path: Path | None, own: str, task_of: Callable[[str, Mapping[str, Any]], Any]) -> list[Any]:
    try:
        return read_tasks(path, own, task_of)
    except BadTaskFile as error:
        raise click.UsageError(str(error)) from error
