"""Options made from configurations: what a field becomes, and that every field of a daemon's has its option, once."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

import click
import pytest
from click.testing import CliRunner
from msgspec import Meta

import gateway.cli
import gateway.engines.embedded.cli
import paramserver.cli
from gateway.config import GatewayConfig
from gateway.engines.embedded.config import EngineConfig
from paramserver.config import RelayConfig
from protos.options import Flag, Size, config_from, config_option, config_options


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, Meta(gt=0, le=1), "Of it."] = 0.5


@dataclass(frozen=True)
class Example:
    title: Annotated[str, "What it is called."]
    inner: Inner = field(default_factory=Inner)
    retries: Annotated[int, Meta(ge=0, le=3), "Tried again."] = 2
    size_bytes: Annotated[int, Size(), "Large."] = 3 << 30
    limit: Annotated[int | None, Meta(ge=1), "None: no limit."] = None
    kind: Annotated[Literal["a", "b"], "One of them."] = "b"
    loud: Annotated[bool, "Off by default."] = False
    quick: Annotated[bool, "On by default."] = True
    parts: Annotated[tuple[str, ...], Flag("--part", metavar="PART"), "Many."] = ()


def example(*arguments: str) -> Any:
    """The configuration that a command has made of `arguments`."""

    @click.command(context_settings={"show_default": True})
    @config_options(Example)
    def command(**options: object) -> None:
        made.append(config_from(Example, options))

    made: list[Example] = []
    result = CliRunner().invoke(command, arguments)
    return made[0] if result.exit_code == 0 and made else result.output


def test_what_is_not_given_has_the_fields_default() -> None:
    assert example("--title=x") == Example("x")


def test_what_is_given_is_converted() -> None:
    flags = ["--title=x", "--share=1", "--retries=0", "--size-bytes=64KiB", "--limit=7", "--kind=a", "--loud"]
    expected = Example("x", Inner(1.0), 0, 64 << 10, 7, "a", loud=True, quick=False, parts=("p", "q"))
    assert example(*flags, "--no-quick", "--part=p", "--part=q") == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "Missing option '--title'"),
        (["--share=0"], "0.0 is not in the range 0<x<=1"),
        (["--share=nan"], "nan is no number"),
        (["--retries=4"], "4 is not in the range 0<=x<=3"),
        (["--limit=0"], "0 is not in the range x>=1"),
        (["--size-bytes=much"], "'much' is not a size"),
        (["--kind=c"], "'c' is not one of 'a', 'b'"),
        (["--no-loud"], "No such option '--no-loud'"),
    ],
)
def test_what_a_field_does_not_allow_is_refused(wrong: list[str], message: str) -> None:
    assert message in example(*([*wrong, "--title=x"] if wrong else []))


def test_help_shows_fields_in_their_order() -> None:
    shown = [" ".join(line.split()) for line in example("--help").splitlines()]
    assert shown[3:-1] == [
        "--title TEXT What it is called. [required]",
        "--share FLOAT RANGE Of it. [default: 0.5; 0<x<=1]",
        "--retries INTEGER RANGE Tried again. [default: 2; 0<=x<=3]",
        "--size-bytes SIZE Large. [default: 3GiB]",
        "--limit INTEGER RANGE None: no limit. [x>=1]",
        "--kind [a|b] One of them. [default: b]",
        "--loud Off by default.",
        "--quick / --no-quick On by default. [default: quick]",
        "--part PART Many.",
    ]


def test_another_command_may_have_the_option_of_one_field() -> None:
    @click.command()
    @config_option(Example, "retries", help="Of the other.")
    def other(retries: int) -> None:
        click.echo(str(retries))

    assert CliRunner().invoke(other).output == "2\n"
    assert "Of the other." in CliRunner().invoke(other, ["--help"]).output


class Some(TypedDict, total=False):
    text: Annotated[str, Meta(max_length=3), "Some text."]
    number: Annotated[int, Meta(ge=1), "Some number."]


def test_of_a_typed_dict_only_what_is_given_is_there() -> None:
    @click.command()
    @config_options(Some)
    def command(**options: object) -> None:
        click.echo(repr(config_from(Some, options)))

    assert CliRunner().invoke(command).output == "{}\n"
    assert CliRunner().invoke(command, ["--text=longer", "--number=2"]).output == "{'text': 'longer', 'number': 2}\n"
    assert "0 is not in the range x>=1" in CliRunner().invoke(command, ["--number=0"]).output
    assert "--text TEXT             Some text." in CliRunner().invoke(command, ["--help"]).output


def test_a_command_may_know_of_a_field_what_its_configuration_cannot() -> None:
    @click.command(context_settings={"show_default": True})
    @config_options(Example, kind={"type": click.Choice(["b", "c"])}, share={"help": "Of the whole."})
    def command(**options: object) -> None:
        click.echo(config_from(Example, options).kind)

    assert CliRunner().invoke(command, ["--title=x", "--kind=c"]).output == "c\n"
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "[b|c]" in shown
    assert "Of the whole." in shown, "also of a configuration within"


# -- the daemons' own

SERVING: dict[str, tuple[type, click.Command, dict[str, str]]] = {
    "gateway serve": (GatewayConfig, gateway.cli.serve, {"model": "m", "tokenizer": "."}),
    "paramserver serve": (RelayConfig, paramserver.cli.serve, {"name": "r", "etcd": "h:1", "pool_dir": "/dev/shm/x"}),
    "gateway engine": (EngineConfig, gateway.engines.embedded.cli.engine, {"model": "."}),
}
BESIDES = {"log_level", "log_format", "ready_file", "host", "port"}
"""Options that are of the process, not of its configuration: an engine's address is one of them."""


def leaves(config: type) -> list[str]:
    """The fields of a configuration and of those within it."""
    hints = get_type_hints(config)
    return [
        name
        for found in fields(config)
        for name in (leaves(hints[found.name]) if is_dataclass(hints[found.name]) else [found.name])
    ]


@pytest.mark.parametrize(("config", "command", "needed"), SERVING.values(), ids=SERVING)
def test_every_field_has_its_option_with_help(config: type, command: click.Command, needed: dict[str, str]) -> None:
    options = [option for option in command.params if isinstance(option, click.Option)]
    named = [str(option.name) for option in options]
    assert [name for name in named if name not in BESIDES - set(leaves(config))] == leaves(config)
    assert [option.name for option in options if option.name in leaves(config) and not option.help] == []


@pytest.mark.parametrize(("config", "command", "needed"), SERVING.values(), ids=SERVING)
def test_a_default_is_the_configs_own(config: type, command: click.Command, needed: dict[str, str]) -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in needed.items()]
    given = command.make_context("serve", arguments, help_option_names=["-h", "--help"]).params  # which click caches
    assert config_from(config, given) == config(**{name: given[name] for name in needed})


@pytest.mark.parametrize("command", [command for _, command, _ in SERVING.values()], ids=SERVING)
def test_no_option_of_a_field_is_written_by_hand(command: click.Command) -> None:
    callback: Callable[..., Any] | None = command.callback
    assert callback is not None
    module = ast.parse(Path(inspect.getsourcefile(callback) or "").read_text())
    (function,) = [
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == callback.__name__
    ]
    by_hand = {
        ast.literal_eval(call.args[0])
        for call in function.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "click.option"
    }
    assert by_hand <= {f"--{name.replace('_', '-')}" for name in BESIDES}
