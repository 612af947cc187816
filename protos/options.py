"""Command-line options that are made from the fields of a configuration, and the types of options.

A configuration is a dataclass, or a TypedDict of which every key may be absent. The annotation of a field holds what
`--help` shows of its option and what the command line checks, and the field's default is the option's, so that each
stands in one place:

    port: Annotated[int, msgspec.Meta(ge=0, le=65535), "Port to listen on."] = 8080

makes `--port INTEGER RANGE  Port to listen on.  [default: 8080; 0<=x<=65535]`. After the type stand, in any order, the
help as a string, a range as `msgspec.Meta`, a type of click's where the range says too little, and a `Flag` for
whatever else differs from the rule. A configuration within the configuration adds its fields in its place. The
length of a text (`msgspec.Meta(max_length=...)`) is checked by whoever takes the text, not by the command line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

import click
import msgspec

from protos.engines import is_host_port
from protos.errors import InvalidRequest
from protos.process import LOG_FORMS, LOG_LEVELS

ConfigT = TypeVar("ConfigT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

SENTENCE_CHARS = 400
"""More than any command's first sentence has."""

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?", re.IGNORECASE)


class Group(click.Group):
    """A group whose list has the whole first sentence of each command's help; click's own breaks it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=SENTENCE_CHARS))
            for name, command in found
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class HostPort(click.ParamType[str]):
    """HOST:PORT."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        if not is_host_port(str(value)):
            self.fail(f"{value!r} is not HOST:PORT, like 127.0.0.1:7000", param, context)
        return str(value)


class Name(click.ParamType[str]):
    """Not empty: a shell variable that is not set names nothing."""

    name = "name"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        if not str(value).strip():
            self.fail("it is empty", param, context)
        return str(value)


class Number(click.FloatRange):
    """A number in a range: `nan` is in none, though it is neither below nor above it."""

    def convert(self, value: float, param: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, param, context))
        if math.isnan(number):
            self.fail(f"{value} is no number", param, context)
        return number


class Size(click.ParamType[int]):
    """Bytes, as "512MiB" or a plain number."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return parse_bytes(str(value))
        except InvalidRequest as error:
            self.fail(str(error), param, context)


def parse_bytes(text: str) -> int:
    """ "4GiB", "512MiB" or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size", hint='write bytes, or "512MiB", "4GiB"')
    return int(float(match[1]) * _UNITS[(match[2] or "").upper().replace("I", "i")])


DIRECTORY = click.Path(file_okay=False, path_type=Path)
DISTRIBUTION = "laminar-rl"
LOG_LEVEL = click.Choice(LOG_LEVELS)
log_format_option = click.option(
    "--log-format",
    type=click.Choice(LOG_FORMS),
    default="text",
    show_default=True,
    help="Log lines for people, or JSON with the fields of docs/telemetry.md.",
)

PORT_MAX = 65535
PORT = click.IntRange(0, PORT_MAX)
"""To listen on; 0 takes a free one."""


def version_option(command: CommandT) -> CommandT:
    """Adds `--version`: the version of the installed distribution, which all commands share."""
    # Not from the environment: a PARAMSERVER_VERSION that means something else would end each command with the version.
    option = click.version_option(package_name=DISTRIBUTION, allow_from_autoenv=False)
    return option(command)


class Flag:
    """Arguments of `click.option` for a field whose option differs from what its annotation and default imply."""

    def __init__(self, *names: str, **attributes: Any) -> None:
        self.names = names
        self.attributes = attributes


def config_options(config: type, **differing: Mapping[str, Any]) -> Callable[[CommandT], CommandT]:
    """A decorator that adds the options of all fields to a command. `differing`: by field, attributes of `click.option`
    that the configuration cannot know, such as a type that takes what a room above it has."""

    def add(command: CommandT) -> CommandT:
        for field in reversed([*_fields(config)]):
            of_field = differing.get(field.name, {})
            within = _is_config(field.hint)
            command = (config_options(field.hint, **differing) if within else _option(field, **of_field))(command)
        return command

    return add


def config_option(config: type, name: str, **attributes: Any) -> Callable[[CommandT], CommandT]:
    """The option of one field; `attributes` of `click.option`, such as a help of its own, differ in this command."""
    return next(_option(field, **attributes) for field in _fields(config) if field.name == name)


def config_from(config: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """The configuration by the command line's `values`; a field without one, or with None, has its default."""
    given: dict[str, Any] = {}
    for field in _fields(config):
        value = config_from(field.hint, values) if _is_config(field.hint) else values.get(field.name)
        if value is not None:
            given[field.name] = value
    return config(**given)


def config_names(config: type) -> Iterator[str]:
    """The names by which the command line's values have the options of `config_options`."""
    for field in _fields(config):
        yield from config_names(field.hint) if _is_config(field.hint) else (field.name,)


def _is_config(hint: Any) -> bool:
    return is_dataclass(hint)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    hint: Any
    default: Any


def _fields(config: type) -> Iterator[_Field]:
    hints = get_type_hints(config, include_extras=True)
    if is_typeddict(config):
        yield from (_Field(name, hint, None) for name, hint in hints.items())
    else:
        yield from (_Field(field.name, hints[field.name], field.default) for field in fields(config))


def _option(field: _Field, **attributes: Any) -> Callable[[CommandT], CommandT]:
    hint, *notes = get_args(field.hint) if get_origin(field.hint) is Annotated else (field.hint,)
    if NoneType in get_args(hint):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    kind, default = _type(hint, notes), field.default
    derived: dict[str, Any] = {"type": kind, "help": next((note for note in notes if isinstance(note, str)), None)}
    names = (f"--{field.name.replace('_', '-')}",)
    if get_origin(hint) is tuple:
        derived["multiple"] = True
    elif default is MISSING:
        derived["required"] = True
    elif hint is bool:
        derived |= {"is_flag": True, "default": default}
        names = (f"{names[0]}/--no-{names[0][2:]}" if default else names[0],)
    else:
        derived["default"] = _size_text(default) if isinstance(kind, Size) and default is not None else default
    flag = next((note for note in notes if isinstance(note, Flag)), Flag())
    return click.option(field.name, *(flag.names or names), **{**derived, **flag.attributes, **attributes})


def _type(hint: Any, notes: list[Any]) -> Any:
    for note in notes:
        if isinstance(note, click.ParamType):
            return note
        if isinstance(note, msgspec.Meta) and hint is not str:
            return _range(hint, note)
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    return str if get_origin(hint) is tuple else hint


def _range(kind: type, meta: msgspec.Meta) -> Any:
    low, high = meta.ge if meta.gt is None else meta.gt, meta.le if meta.lt is None else meta.lt
    make: Any = click.IntRange if kind is int else Number
    return make(low, high, min_open=meta.gt is not None, max_open=meta.lt is not None)


def _size_text(num: int) -> str:
    """As `Size` reads it, in the largest unit of which it is a whole number."""
    unit, size = next((unit, size) for unit, size in reversed(_UNITS.items()) if num % size == 0)
    return f"{num // size}{unit}"
