"""Command lines of `deploy/`, read by the commands' own parsers and by the rule for ports off loopback: a unit or
manifest that a daemon would refuse is refused here, without starting anything.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import click

import agents_env.cli
import gateway.app
import gateway.cli
import gateway.engines.embedded.cli
import paramserver.cli
from paramserver.daemon.process import check_open
from protos.access.credentials import CREDENTIALS_VARIABLE
from protos.access.listening import check_listening

COMMANDS: Mapping[str, click.Group] = {
    "paramserver": paramserver.cli.cli,
    "gateway": gateway.cli.cli,
    "agents-env": agents_env.cli.main,
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")


def env_file(path: Path) -> dict[str, str]:
    """The variables of an environment file: `NAME=value`, as systemd and kustomize read it."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {name: value.strip("\"'") for name, _, value in (line.partition("=") for line in lines)}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` with each `$NAME`, `${NAME}` and `$(NAME)` replaced, also within what came in. KeyError names one that
    nobody sets."""
    while _VARIABLE.search(text):
        text = _VARIABLE.sub(lambda found: variables[next(filter(None, found.groups()))], text)
    return text


def words(text: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a command line, as a shell or systemd makes them."""
    return shlex.split(expanded(text.replace("\\\n", " "), variables))


def check(command_line: Sequence[str], credentials: str = "") -> click.Context:
    """The parsed options, with `credentials` as LAMINAR_CREDENTIALS. Raises click.UsageError for what the command's
    parser refuses, and InvalidRequest for options that contradict each other, and for a port off loopback about which
    nobody has decided who may use it."""
    name, *rest = Path(command_line[0]).name, *command_line[1:]
    command: click.Command = COMMANDS[name]
    while isinstance(command, click.Group):
        name, *rest = rest
        found = command.get_command(click.Context(command), name)
        if found is None:
            raise click.UsageError(f"no command {name!r}")
        command = found
    with (
        mock.patch.object(click.Path, "convert", lambda self, value, parameter, context: Path(value)),
        mock.patch.dict(os.environ, {CREDENTIALS_VARIABLE: credentials}),
    ):
        context = command.make_context(name, list(rest), help_option_names=["-h", "--help"])  # which click caches
    _configure(command, context)
    return context


def _configure(command: click.Command, context: click.Context) -> None:
    """Makes the daemon's configuration, which checks what no single option shows."""
    if command is paramserver.cli.serve:
        assert command.callback is not None
        at_start = {"_serve": lambda config, ready_file: check_open(config), "_run": lambda checked: None}
        with mock.patch.multiple(paramserver.cli, setup_logging=lambda *_, **__: None, **at_start):
            command.callback(**context.params)
    if command is gateway.cli.serve:
        options = {
            name: value
            for name, value in context.params.items()
            if name not in ("log_level", "log_format", "ready_file")
        }
        with mock.patch.object(gateway.app, "KeyFile", return_value=()):  # it is on another machine
            gateway.app.open_keys(gateway.cli._config(options.pop("engines"), options))
    if command is gateway.engines.embedded.cli.engine:
        check_listening("gateway engine", context.params["host"], insecure=context.params["insecure"], mend="")


def each_command(chosen: Callable[[str], bool] = lambda name: True) -> Iterator[click.Command]:
    """All commands, those of groups included."""
    groups = [group for name, group in COMMANDS.items() if chosen(name)]
    while groups:
        group = groups.pop()
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            assert command is not None
            if isinstance(command, click.Group):
                groups.append(command)
            yield command


def options_of_all() -> set[str]:
    """Every option that any of the commands has."""
    return {
        option
        for command in each_command()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
