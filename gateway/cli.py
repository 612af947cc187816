"""Commands of the gateway: `serve`, `doctor`, `backup`, `status`, `sessions`, `top`, `repack`; `LAZY` has others."""

from __future__ import annotations

import asyncio
import importlib
import json
import keyword
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import uvloop

from gateway.config import GatewayConfig, parse_engine
from gateway.core.addresses import StoreAddress
from protos.errors import InvalidRequest, LaminarError, UnsupportedField
from protos.findings import report_findings
from protos.imports import uncollected
from protos.options import (
    DIRECTORY,
    LOG_LEVEL,
    Group,
    Number,
    config_from,
    config_option,
    config_options,
    log_format_option,
    version_option,
)
from protos.process import setup_logging, write_ready_file
from protos.terminal import Failed, say

if TYPE_CHECKING:
    from gateway.experience.stores import StoreKind

log = logging.getLogger("gateway")

LAZY = {
    "engine": ("gateway.engines.embedded.cli", "The embedded inference engine (needs torch)."),
    "engine-dtype": (
        "gateway.engines.embedded.cli",
        "Which dtype the embedded engine is fastest in here (needs torch).",
    ),
    "export": ("gateway.tables.cli", "Writes finished trajectories to a Parquet file."),
    "import": ("gateway.tables.cli", "Adds the trajectories of an exported Parquet file to a store."),
    "keys": ("gateway.operate.keys", "The API keys of `gateway serve --api-keys FILE`."),
    "faultkit": ("gateway.faultkit.cli", "Scripted engines that die, hang, repeat, shorten, abort."),
}


class LazyGroup(Group):
    """Imports a command's module only when it is called: `serve` must start without torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY:
            return super().get_command(ctx, cmd_name)
        module, _ = LAZY[cmd_name]
        name = cmd_name.replace("-", "_") + ("_" if keyword.iskeyword(cmd_name) else "")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


def _stores() -> Mapping[str, StoreKind]:
    """Imported only when the option is read or shown: most commands need neither SQLite nor numpy."""
    from gateway.experience.stores import STORES

    return STORES


class ExperienceStore(click.ParamType[str | StoreAddress]):
    """The name of a store that a gateway has alone, or the address of one that gateways share."""

    name = "store"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        from gateway.log.stores import SHARED

        return "|".join([*_stores(), *dict.fromkeys(kind.ADDRESS.FORM for kind in SHARED.values())])

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> str | StoreAddress:
        from gateway.log.stores import SHARED, parse

        if str(value) in _stores():
            return str(value)
        try:
            return parse(str(value))
        except InvalidRequest as error:
            names = ", ".join(map(repr, _stores()))
            shared = " or a ".join(dict.fromkeys(kind.ADDRESS.KIND for kind in SHARED.values()))
            self.fail(f"it is none of {names}, or the address of a {shared}: {error}", param, context)


class StoreOption(click.Option):
    """`--experience-store`: its help has each store's own words, which are read only when it is shown."""

    @property
    def help(self) -> str | None:
        return " ".join([self._help or "", *(f"`{name}`: {kind.help}." for name, kind in _stores().items())])

    @help.setter
    def help(self, text: str | None) -> None:
        self._help = text


class PlannerName(click.ParamType[str]):
    """A planner of repack. The table of them, which needs numpy, is read only with the option."""

    name = "planner"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        from gateway.core.packing.planners import PLANNERS

        return "|".join(PLANNERS)

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        from gateway.core.packing.planners import PLANNERS

        return str(click.Choice(list(PLANNERS)).convert(value, param, context))


GATEWAY_VARIABLE = "LAMINAR_GATEWAY"
gateway_url = click.option(
    "--url",
    default="http://127.0.0.1:8080",
    envvar=GATEWAY_VARIABLE,
    show_envvar=True,
    help="Address of a running gateway, or unix:PATH of its admin listener.",
)
gateway_options = config_options(
    GatewayConfig, experience_store={"cls": StoreOption, "type": ExperienceStore()}, planner={"type": PlannerName()}
)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@version_option
def cli() -> None:
    """One OpenAI-compatible door to many inference engines, for reinforcement learning.

    \b
    Start one engine and the gateway:
      gateway engine --model DIR --served-model-name policy --port 8000
      gateway serve --model policy --tokenizer DIR --engine e0=embedded=http://127.0.0.1:8000 --port 8080
    Then point an OpenAI client at http://127.0.0.1:8080/v1.
    """


@cli.command()
@gateway_options
@click.option("--log-level", type=LOG_LEVEL, default="info", help="The least severe messages that are logged.")
@log_format_option
@click.option("--ready-file", type=click.Path(dir_okay=False, path_type=Path), help="JSON with the addresses, once up.")
def serve(engines: tuple[str, ...], log_level: str, log_format: str, ready_file: Path | None, **options: Any) -> None:
    """Serves the OpenAI API over the engines named."""
    setup_logging(log_level, log_format, model=options["model"])
    try:
        uvloop.run(_serve(_config(engines, options), ready_file))
    except LaminarError as e:
        log.error("%s", e)
        sys.exit(1)


def _config(engines: tuple[str, ...], options: dict[str, Any]) -> GatewayConfig:
    try:
        specs = tuple(map(parse_engine, engines))
    except (InvalidRequest, UnsupportedField) as e:
        raise click.UsageError(str(e)) from e  # status 2: a supervisor need not try it again
    return config_from(GatewayConfig, {**options, "engines": specs})


@cli.command()
@gateway_options
@click.option(
    "--wait-s", type=Number(min=0), default=0.0, help="Look again for so long while anything is wrong: engines load."
)
def doctor(engines: tuple[str, ...], wait_s: float, **options: Any) -> None:
    """Checks what a gateway with the same options needs, and starts nothing.

    Looks at this host, the keys, the tokenizer, the data directory, the ports, etcd, the relays, and each engine: what
    is wrong, and how to mend it. Exit status 1 if anything is.

    \b
    Example: gateway doctor --model policy --tokenizer DIR --engine e0=vllm=http://10.0.0.1:8000@10.0.0.1:7070
    """
    from gateway.operate.doctor import examine_patiently

    try:
        findings = asyncio.run(examine_patiently(_config(engines, options), wait_s))
    except LaminarError as e:
        raise Failed(str(e)) from e
    report_findings(findings)


@cli.command()
@config_option(GatewayConfig, "data", required=True, help="The gateway's directory; the gateway may run meanwhile.")
@click.argument("out", type=DIRECTORY)
def backup(data: Path, out: Path) -> None:
    """Copies the database of a gateway into the directory OUT, as of one instant.

    A gateway goes on from the copy: gateway serve --data OUT. Never run it beside the gateway that was copied: both
    would continue the same turns.

    \b
    Example: gateway backup --data ./gateway-data ./backups/monday
    """
    from gateway.store.backup import back_up

    try:
        click.echo(back_up(data, out).described())
    except LaminarError as e:
        raise Failed(str(e)) from e


def _tell(answer: Mapping[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=1))
    else:
        say(*lines)


@cli.command()
@gateway_url
@click.option("--dry-run", is_flag=True, help="Show what would move now, with the reasons; nothing moves.")
@click.option("--json", "as_json", is_flag=True, help="The gateway's response as JSON.")
def repack(url: str, dry_run: bool, as_json: bool) -> None:
    """Packs the long tail of a running gateway now, or shows the plan."""
    from gateway.operate.repack_view import describe, request_plans

    try:
        answer = asyncio.run(request_plans(url, dry_run=dry_run))
    except LaminarError as e:
        raise Failed(str(e)) from e
    _tell(answer, describe(answer, dry_run=dry_run), as_json=as_json)


@cli.command()
@gateway_url
@click.option(
    "--idle-s",
    type=click.IntRange(0),
    show_default="all; with --abandon: that of `gateway serve --idle-after-s`",
    help="Sessions without a running turn for so many seconds.",
)
@click.option(
    "--abandon",
    is_flag=True,
    help="End those that are idle: no runner has the lease, no child runs, no reward is to come.",
)
@click.option("--json", "as_json", is_flag=True, help="The gateway's response as JSON.")
def sessions(url: str, idle_s: int | None, abandon: bool, as_json: bool) -> None:
    """Lists the live sessions of a running gateway and what keeps each, or ends the idle ones.

    \b
    Example: gateway sessions --idle-s 60 --abandon
    """
    from gateway.operate.sessions_view import abandon_idle, describe, describe_abandoned, list_sessions

    try:
        answer = asyncio.run(abandon_idle(url, idle_s) if abandon else list_sessions(url, idle_s))
    except LaminarError as e:
        raise Failed(str(e)) from e
    lines = describe_abandoned(answer) if abandon else describe(answer, idle_s)
    _tell(answer, lines, as_json=as_json)


@cli.command()
@gateway_url
@click.option("--json", "as_json", is_flag=True, help="All fields, as in the response of `GET /status`.")
@click.option(
    "--wait-s",
    type=Number(min=0),
    default=0.0,
    show_default=True,
    help="Wait so long until the gateway answers and --engines of its engines serve; exit status 1 if they do not by "
    "then.",
)
@click.option(
    "--engines", "engines_min", type=click.IntRange(1), default=1, help="With --wait-s: how many engines have to serve."
)
def status(url: str, as_json: bool, wait_s: float, engines_min: int) -> None:
    """Shows the engines, turns, buffer and problems of a running gateway."""
    from gateway.operate.repack_view import call, wait_for_engines
    from gateway.operate.status_view import show

    try:
        answer = asyncio.run(wait_for_engines(url, wait_s, engines_min) if wait_s else call("GET", url, "/status"))
    except LaminarError as e:
        raise Failed(str(e)) from e
    if as_json:
        click.echo(json.dumps(answer, indent=1))
    else:
        show(answer)


@cli.command()
@click.option(
    "--url",
    default="http://127.0.0.1:8080",
    envvar=GATEWAY_VARIABLE,
    show_envvar=True,
    help="Address of a running gateway.",
)
@click.option("--once", is_flag=True, help="Print it as it is now, and end.")
def top(url: str, once: bool) -> None:
    """Shows a running gateway as it goes on: engines, sessions, relays, what waits. Ctrl-C ends it.

    The dashboard at /ui shows the same in a browser. Both need a key with the role reader where the gateway has keys.
    """
    from gateway.operate.top import run

    try:
        asyncio.run(run(url, only_once=once))
    except LaminarError as e:
        raise Failed(str(e)) from e
    except KeyboardInterrupt:
        return


async def _serve(config: GatewayConfig, ready_file: Path | None) -> None:
    with uncollected():
        from gateway.app import DRAIN_TIMEOUT_S, start
        from gateway.runtime.garbage import collect_regularly

    gateway = await start(config)
    collector = asyncio.create_task(collect_regularly(lambda: bool(gateway.sessions.running)), name="garbage")
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    log.info("%s", config)
    log.info("serving %s at %s/v1 with %d engines", config.model, gateway.url, len(config.engines))
    if gateway.admin is not None:
        log.info("routes that change the fleet are answered at %s alone", gateway.admin_url)
    if not config.engines and config.etcd is None:
        log.warning(
            "no engine yet: name one with --engine, or send it to POST /admin/engines; until then turns get 429"
        )
    try:
        write_ready_file(ready_file, {"url": gateway.url, "admin_url": gateway.admin_url})
    except LaminarError:
        await gateway.close(drain_timeout_s=0)
        raise
    await stop.wait()
    running = len(gateway.sessions.running)
    log.info("draining for %g s at most: %d turns run; another signal waits no longer", DRAIN_TIMEOUT_S, running)
    await gateway.close(hurry=hurry)
    collector.cancel()
    log.info("closed")


def main() -> None:
    cli(prog_name="gateway")
