"""docs/reference/configuration.md: every option of every command, from click's own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click

import agents_env.cli
import gateway.cli
import paramserver.cli
from deploy.reference import markdown
from deploy.reference.markdown import code, link, number, prose, table

PROGRAMS: Mapping[str, click.Group] = {
    "paramserver": paramserver.cli.cli,
    "gateway": gateway.cli.cli,
    "agents-env": agents_env.cli.main,
}
FIRST = ("serve", "engine", "run")
"""Commands that stand first in their program's part, in this order."""
LONG = 20
"""Options: a table so long is not repeated for a command that has others besides."""
SHARED_BY = 3
"""Options that so many commands of a group all have stand once, under the group."""
HEAD = ("option", "value", "default", "environment", "what it is")
NAMES = {
    "text": "text",
    "integer": "integer",
    "float": "number",
    "size": "size",
    "host:port": "`HOST:PORT`",
    "cidr,...": "networks, as `10.0.0.0/8,...`",
}
"""Click's names of types in the words of the page; other types have their own."""
UNITS = {"-s": "seconds", "-mib": "MiB"}
"""By the end of an option's name: what its number counts."""

Rows = tuple[tuple[str, ...], ...]

INTRO = """
- A size is a number of bytes, or has a unit: `512MiB`, `4GiB`. An option whose name ends in `-s` is in seconds.
- A flag takes no value. One that is on by default has a `--no-` form, which switches it off.
- The command line goes before the environment. In a variable, a flag is `1` or `0`, and what may be repeated is
  separated by spaces. `paramserver` reads a variable for each of its options, `PARAMSERVER_COMMAND_OPTION`.
- `--help` of each command shows the same texts, with examples.
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command or group. `path`: the words that call it, such as `gateway serve`."""

    path: str
    command: click.Command
    context: click.Context

    def rows(self) -> list[tuple[str, ...]]:
        """A row of the table for each parameter, arguments first."""
        shown = [one for one in self.command.params if not _is_left_out(one)]
        shown.sort(key=lambda one: isinstance(one, click.Option))
        return [_row(one, self) for one in shown]

    def within(self) -> list[Command]:
        """The commands of a group: those of `FIRST`, then the others by name."""
        if not isinstance(self.command, click.Group):
            return []
        names = self.command.list_commands(self.context)
        return [
            self._child(name)
            for name in sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
        ]

    def _child(self, name: str) -> Command:
        assert isinstance(self.command, click.Group)
        found = self.command.get_command(self.context, name)
        assert found is not None
        return Command(f"{self.path} {name}", found, _context(found, name, self.context))


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, **command.context_settings)


def programs() -> list[Command]:
    return [Command(name, group, _context(group, name)) for name, group in PROGRAMS.items()]


def commands(top: Command) -> Iterator[Command]:
    """The command itself, then all within it."""
    yield top
    for command in top.within():
        yield from commands(command)


def page() -> str:
    tops = programs()
    contents = [
        f"- {link(code(top.path), top.path)}: "
        + ", ".join(link(_name(one, top), one.path) for one in commands(top) if one is not top)
        for top in tops
    ]
    parts = [part for top in tops for part in _Parts().of(top)]
    return markdown.page("Command-line options", INTRO, "\n".join(contents), *parts)


def _name(command: Command, top: Command) -> str:
    return command.path.removeprefix(f"{top.path} ")


class _Parts:
    """The parts of one program. Tables that were shown already are named, not shown again."""

    def __init__(self) -> None:
        self._shown: dict[Rows, str] = {}

    def of(self, command: Command, level: int = 2, shared: Rows = ()) -> Iterator[str]:
        """A heading, what the command does, its options, and the parts of the commands within. `shared`: rows that the
        group above has shown."""
        yield f"{'#' * level} {command.path}"
        yield _about(command)
        yield self._options(command, tuple(row for row in command.rows() if row not in shared))
        children = command.within()
        common = _common(children) if len(children) >= SHARED_BY else ()
        if common:
            yield f"Options of every command of `{command.path}`, besides its own:"
            yield table(HEAD, common)
        for child in children:
            yield from self.of(child, min(level + 1, 4), common)

    def _options(self, command: Command, rows: Rows) -> str:
        texts = tuple(map(_without_variable, rows))
        for shown, path in self._shown.items():
            own = [row for row, text in zip(rows, texts, strict=True) if text not in shown]
            shared = len(texts) - len(own)
            if shared > len(shown) / 2 and (not own or shared >= LONG):
                lacking = ", ".join(row[0] for row in shown if row not in texts)
                alike = f"Its options are those of {link(code(path), path)}{f', without {lacking}' if lacking else ''}"
                return f"{alike}, and its own:\n\n{table(HEAD, own)}" if own else f"{alike}."
        self._shown[texts] = command.path
        return table(HEAD, rows)


def _about(command: Command) -> str:
    """The first paragraph of its help."""
    text = inspect.cleandoc(command.command.help or "")
    return prose(text.partition("\n\n")[0])


def _without_variable(row: tuple[str, ...]) -> tuple[str, ...]:
    option, value, default, _, text = row
    return option, value, default, text


def _common(children: Sequence[Command]) -> Rows:
    """The rows that all of the commands have, in the order of the first."""
    first, *others = (child.rows() for child in children)
    return tuple(row for row in first if all(row in rows for rows in others))


# -- a parameter


def _is_left_out(parameter: click.Parameter) -> bool:
    """`--version`, which does something else than the command, and what `--help` does not show."""
    return getattr(parameter, "hidden", False) or (parameter.is_eager and not parameter.expose_value)


def _row(parameter: click.Parameter, command: Command) -> tuple[str, ...]:
    described = getattr(parameter, "help", None) or ""
    return (
        _names(parameter),
        _value(parameter, command.context),
        _default(parameter, command),
        ", ".join(code(name) for name in _variables(parameter, command.context)),
        prose(described),
    )


def _names(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return code((parameter.metavar or parameter.name or "").upper() + "..." * (parameter.nargs == -1))
    return " / ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))


def _value(parameter: click.Parameter, context: click.Context) -> str:
    kind, unit = parameter.type, _unit(parameter)
    repeated = "; may be repeated" if parameter.multiple or parameter.nargs == -1 else ""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return "flag"
    if isinstance(kind, click.Choice):
        return ", ".join(code(str(choice)) for choice in kind.choices) + repeated
    if isinstance(kind, click.IntRange | click.FloatRange):
        return _range(kind, unit) + repeated
    if isinstance(parameter, click.Option) and parameter.metavar is not None:
        return code(parameter.metavar) + repeated
    metavar = kind.get_metavar(param=parameter, ctx=context)
    return (unit or (code(metavar) if metavar else NAMES.get(kind.name, kind.name))) + repeated


def _unit(parameter: click.Parameter) -> str:
    name = parameter.opts[0]
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def _range(kind: click.IntRange | click.FloatRange, unit: str) -> str:
    noun = unit or ("integer" if isinstance(kind, click.IntRange) else "number")
    low, high = kind.min, kind.max
    if low is not None and high is not None and not kind.min_open and not kind.max_open:
        return f"{noun}, {number(low)} to {number(high)}"
    bounds = [noun]
    if low is not None:
        bounds.append(f"{'above' if kind.min_open else 'at least'} {number(low)}")
    if high is not None:
        bounds.append(f"{'below' if kind.max_open else 'at most'} {number(high)}")
    return ", ".join(bounds)


def _default(parameter: click.Parameter, command: Command) -> str:
    """As the command line takes it. Raises ValueError for one that is computed at the start and has no text."""
    if parameter.required:
        return "required"
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return prose(shown)
    value = parameter.to_info_dict()["default"]
    if callable(value):
        raise ValueError(f"{command.path} {parameter.opts[0]}: a computed default needs a text (`show_default`)")
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return "on" if value else "off"
    if value is None or value in ("", ()):
        return ""
    return code(str(int(value)) if isinstance(value, float) and value.is_integer() else str(value))


def _variables(parameter: click.Parameter, context: click.Context) -> list[str]:
    """The environment variables that it is read from, the first that is set."""
    named = [parameter.envvar] if isinstance(parameter.envvar, str) else [*(parameter.envvar or ())]
    if isinstance(parameter, click.Option) and parameter.allow_from_autoenv and context.auto_envvar_prefix:
        named.append(f"{context.auto_envvar_prefix}_{(parameter.name or '').upper()}")
    return named
