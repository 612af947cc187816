"""The `paramserver` command: run a relay, look at one, and fetch a version from one.

Exit status: 0 done, 1 failed (one line with the reason and what would be right), 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar

import click

from paramserver.client.relay import RelayClient, RelayStatus
from paramserver.config import EngineBeside, RelayConfig, default_pool_dir, own_etcd_dir, show_bytes
from paramserver.core.records import NUMBER_MAX
from paramserver.credentials.commands import credentials as credentials_group
from paramserver.membership import LocalEtcd
from protos.access.credentials import CREDENTIALS_VARIABLE, credentials_in
from protos.access.etcd import EtcdAccess
from protos.errors import InvalidRequest, LaminarError, Unavailable
from protos.imports import uncollected
from protos.options import (
    DIRECTORY,
    LOG_LEVEL,
    PORT,
    Group,
    HostPort,
    config_from,
    config_option,
    config_options,
    log_format_option,
    version_option,
)
from protos.process import setup_logging, write_ready_file
from protos.terminal import say
from protos.version_labels import VersionLabels

T = TypeVar("T")

POLL_S = 0.3
"""Between two requests of a command that waits."""


def daemon_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every daemon."""
    for option in (
        click.option(
            "--ready-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="JSON with the addresses, written once serving.",
        ),
        click.option(
            "--log-level",
            type=LOG_LEVEL,
            default="info",
            show_default=True,
            help="The least severe messages that are logged.",
        ),
        log_format_option,
    ):
        command = option(command)
    return command


def relay_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that calls a relay."""
    return click.option(
        "--relay", type=HostPort(), required=True, envvar="LAMINAR_RELAY", help="gRPC HOST:PORT of a relay."
    )(credentials_option(command))


credentials_option = click.option(
    "--credentials",
    type=DIRECTORY,
    envvar=CREDENTIALS_VARIABLE,
    show_envvar=True,
    help="The caller's credentials, where relays ask for them.",
)


@click.group(
    cls=Group,
    context_settings={"auto_envvar_prefix": "PARAMSERVER", "show_default": True, "help_option_names": ["-h", "--help"]},
)
@version_option
def cli() -> None:
    """Laminar's parameter service: relays that keep weight versions in host memory and pass them along a chain.

    \b
    Try it on one machine:
      paramserver etcd --port 2379 &
      paramserver serve --name a --etcd 127.0.0.1:2379 --port 7001 &
      paramserver serve --name b --etcd 127.0.0.1:2379 --port 7002 &
      paramserver status --relay 127.0.0.1:7001
    """


cli.add_command(credentials_group)


@cli.command()
@config_options(RelayConfig)
@daemon_options
def serve(
    name: str,
    etcd: str | None,
    pool_dir: Path | None,
    engines: tuple[str, ...],
    log_level: str,
    log_format: str,
    ready_file: Path | None,
    **options: object,
) -> None:
    """Runs one relay until SIGTERM."""
    setup_logging(log_level, log_format, relay=name)
    try:
        beside = tuple(map(EngineBeside.parse, engines))
    except LaminarError as error:
        raise click.UsageError(str(error)) from error  # status 2: a supervisor need not try it again
    resolved = {
        "name": name,
        "etcd": etcd or "",
        "pool_dir": pool_dir or default_pool_dir(name),
        "engines": beside,
    }
    _run_daemon(_serve(config_from(RelayConfig, {**options, **resolved}), ready_file), log_format)


async def _serve(config: RelayConfig, ready_file: Path | None) -> None:
    with uncollected():
        from paramserver.daemon.process import open_credentials, serve
        from paramserver.memory.orphans import size_of

    credentials = open_credentials(config)  # before an etcd of its own starts
    if not config.etcd and (config.etcd_access.etcd_cacert or config.etcd_access.etcd_user):
        raise InvalidRequest("--etcd-cacert and --etcd-user are for an etcd that runs", hint="add --etcd HOST:PORT")
    if config.etcd:
        await serve(config, credentials, lambda addresses: _ready(ready_file, {**addresses, "etcd": config.etcd}))
        return
    # Beside the pool, and kept: with a new etcd versions would begin at 1 again, below those that engines serve.
    pool_dir = config.pool_dir.resolve()
    etcd_dir = own_etcd_dir(pool_dir)
    async with LocalEtcd(data_dir=etcd_dir, forget=config.forget) as etcd:
        config = dataclasses.replace(config, etcd=etcd.endpoint)
        keeping = asyncio.create_task(etcd.keep())

        def ready(addresses: dict[str, str]) -> None:
            etcd.settle()
            _ready(ready_file, {**addresses, "etcd": config.etcd})

        try:
            await serve(config, credentials, ready)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
    if not config.forget:
        logging.getLogger(__name__).info(
            "%s of its etcd stay in %s, so that numbers go on: `paramserver clear --pool-dir %s` gives them back",
            show_bytes(size_of(etcd_dir)),
            etcd_dir,
            pool_dir,
        )


@cli.command()
@click.option("--port", type=PORT, default=0, help="Client port; 0: any free one.")
@click.option(
    "--data-dir",
    type=DIRECTORY,
    show_default="a temporary directory, removed at the end",
    help="Directory for its data.",
)
@daemon_options
def etcd(port: int, data_dir: Path | None, log_level: str, log_format: str, ready_file: Path | None) -> None:
    """Runs an etcd on loopback until SIGTERM: for one machine, not for production."""
    setup_logging(log_level, log_format)
    _run_daemon(_etcd(port, data_dir, ready_file), log_format)


async def _etcd(port: int, data_dir: Path | None, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with LocalEtcd(data_dir=data_dir, port=port) as local:
        local.settle()
        _ready(ready_file, {"etcd": local.endpoint})
        ended = asyncio.ensure_future(local.wait())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not stop.is_set():
            raise LaminarError(f"etcd ended by itself with status {ended.result()}")
        ended.cancel()


@cli.command()
@relay_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option(
    "--wait-s",
    type=click.FloatRange(0),
    default=0.0,
    help="Wait so long until the relay answers and knows --members relays; exit status 1 if it does not by then.",
)
@click.option(
    "--members",
    type=click.IntRange(1),
    default=1,
    help="With --wait-s: how many relays, itself included.",
)
def status(relay: str, credentials: Path | None, as_json: bool, wait_s: float, members: int) -> None:
    """Shows a relay: its models, chain, versions, transfers, pins and memory."""
    from paramserver.cli_views import show_status

    async def call() -> None:
        async with _client(relay, credentials) as client:
            show_status(await _settled(client, wait_s, members), as_json=as_json)

    _run(call())


@cli.command()
@relay_options
@click.option("--once", is_flag=True, help="Print it as it is now, and end.")
def top(relay: str, credentials: Path | None, once: bool) -> None:
    """Shows a relay as it goes on: its chain with rates, versions, transfers and memory. Ctrl-C ends it."""
    from paramserver.top import run

    async def call() -> None:
        async with _client(relay, credentials) as client:
            await run(client, only_once=once)

    try:
        _run(call())
    except KeyboardInterrupt:
        return


@cli.command()
@relay_options
@click.option("--wait-s", type=click.FloatRange(0), default=600.0, help="How long to wait until it is not needed.")
def drain(relay: str, credentials: Path | None, wait_s: float) -> None:
    """Prepares a relay to be stopped: it gives up mastership and leaves the chain. Waits until the relay is not needed.

    It serves its versions meanwhile. Exit status 1 when it is still needed after --wait-s.
    """

    async def wait() -> list[str]:
        shown: list[str] = []
        deadline = time.monotonic() + wait_s
        async with _client(relay, credentials) as client:
            while (needed := await client.drain()) and time.monotonic() < deadline:
                if needed != shown:
                    say(f"still needed as {'; '.join(needed)}", err=True)
                    shown = needed
                await asyncio.sleep(POLL_S)
        return needed

    needed = _run(wait())
    if needed:
        say(f"error: still needed after {wait_s:g} s as {'; '.join(needed)}", err=True)
        sys.exit(1)
    click.echo("it is not needed any more: it can be stopped")


@cli.command()
@relay_options
@click.option(
    "--continues", default="", metavar="ID", help="Id of an earlier etcd, whose versions continue in the present one."
)
@click.option("--model", default="", help="With --continues: its next version is above --above.")
@click.option("--above", type=click.IntRange(0, NUMBER_MAX), default=0, help="The newest version known anywhere.")
def adopt(relay: str, credentials: Path | None, continues: str, model: str, above: int) -> None:
    """Makes a relay join the etcd that is there now, after the one it belonged to was replaced by an empty one.

    Until then the relay serves what it has and takes nothing new: an empty etcd counts its revisions from the start, so
    old masters would look new. Its sealed versions keep their numbers. The next version's number is some 1000 higher:
    no other relay holds a version of that number. Run it for every relay.

    Gateways and trainers refuse versions of an etcd that replaced the earlier one. When no relay of the earlier one is
    left, their message names its id, for --continues: run that once, on any relay.
    """

    async def call() -> tuple[str, list[str]]:
        async with _client(relay, credentials) as client:
            return await client.adopt(continues=continues, model=model, above=above)

    store_id, versions = _run(call())
    say(f"{'continues in' if continues else 'joined'} {store_id} with {', '.join(versions) or 'no version'}")


@cli.command()
@relay_options
@click.option("--model", required=True, help="The model's name.")
def drop(relay: str, credentials: Path | None, model: str) -> None:
    """Ends a model: all its versions, on every relay, in memory and on disk.

    Refused while it has a publisher. Engines that still map a version keep its bytes until they unmap it. A model of
    that name may be published again; its numbers continue.
    """

    async def call() -> list[int]:
        async with _client(relay, credentials) as client:
            return await client.drop(model)

    held = _run(call())
    say(f"dropped {model} with {'versions ' + ', '.join(map(str, held)) if held else 'no version'}")


@cli.command()
@config_option(RelayConfig, "pool_dir", help="As the relay had it.")
@config_option(RelayConfig, "name", help="As the relay had it.")
def clear(pool_dir: Path | None, name: str) -> None:
    """Gives the memory back that a stopped relay left on this host: its versions, and an etcd of its own.

    Refused while the relay runs. The next start is as after a reboot: it finds no version, and an etcd of its own
    counts versions from 1 again.
    """
    from paramserver.memory.orphans import clear as clear_pool

    where = (pool_dir or default_pool_dir(name)).resolve()
    freed = clear_pool(where)
    say(f"{show_bytes(freed)} came back from {where}" if freed else f"no relay left anything in {where}")


@cli.command()
@relay_options
@click.option("--model", required=True, help="The model's name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per version.")
def versions(relay: str, credentials: Path | None, model: str, as_json: bool) -> None:
    """Lists the sealed versions of a model that a relay holds."""
    from paramserver.cli_views import show_versions

    async def call() -> None:
        async with _client(relay, credentials) as client:
            show_versions(model, await client.versions(model), as_json=as_json)

    _run(call())


@cli.command()
@config_option(RelayConfig, "pool_dir", help="As the relay will have it.")
@config_option(RelayConfig, "name", help="As the relay will have it.")
@config_option(RelayConfig, "pool_bytes", help="As the relay will have it.")
@config_option(RelayConfig, "etcd", help="Check whether it answers in time.")
@click.option(
    "--relay", "relays", type=HostPort(), multiple=True, help="Check whether its ports are reachable from here."
)
@credentials_option
@config_option(RelayConfig, "lease_ttl_s", help="As the relay will have it.")
@config_options(EtcdAccess)
@click.option(
    "--wait-s",
    type=click.FloatRange(0),
    default=0.0,
    help="Look again for so long while anything is wrong: etcd starts.",
)
def doctor(
    pool_dir: Path | None,
    name: str,
    pool_bytes: int,
    etcd: str | None,
    relays: tuple[str, ...],
    credentials: Path | None,
    lease_ttl_s: float,
    wait_s: float,
    **etcd_options: object,
) -> None:
    """Checks this host for a relay: what is wrong, and how to mend it. Exit status 1 if anything is.

    \b
    Example: paramserver doctor --pool-bytes 64GiB --etcd etcd:2379 --relay trainer-0:7070
    """
    from paramserver.doctor import examine
    from protos.findings import Finding, report_findings, wrong

    access = config_from(EtcdAccess, etcd_options)
    where = pool_dir or default_pool_dir(name)

    async def look() -> list[Finding]:
        deadline = time.monotonic() + wait_s
        while True:
            clients = [_client(address, credentials) for address in relays]
            found = await examine(where, pool_bytes, etcd, clients, lease_ttl_s, access)
            if not wrong(found) or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(POLL_S)

    report_findings(_run(look()))


@cli.command()
@relay_options
@click.option("--model", required=True, help="The model's name.")
@click.option(
    "--version",
    type=click.IntRange(1, NUMBER_MAX),
    help="The version to copy.",
    show_default="the newest that the relay holds",
)
@click.option(
    "--out",
    type=DIRECTORY,
    required=True,
    help="Directory to write; resumes what an earlier pull left there.",
)
@config_option(RelayConfig, "stripes", help="TCP connections to the relay.")
@click.option("--patience-s", type=click.FloatRange(0.1), default=30.0, help="Give up after so long without a byte.")
def pull(
    relay: str,
    credentials: Path | None,
    model: str,
    version: int | None,
    out: Path,
    stripes: int,
    patience_s: float,
) -> None:
    """Copies a version from a relay into a directory of safetensors files, every digest checked.

    \b
    Example: paramserver pull --relay 127.0.0.1:7001 --model policy --out weights/
    """
    from paramserver.client.pull import pull as pull_version

    client = _client(relay, credentials)
    _run(pull_version(client, model, version, out, num_stripes=stripes, patience_s=patience_s))


@cli.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@relay_options
@click.option("--model", required=True, help="Name to publish under; engines and gateways follow it by this name.")
@click.option("--step", type=int, default=0, help="Label of the version; its number is given by the master relay.")
@click.option("--run", help="Label of whoever publishes.", show_default="one made of the time")
@click.option("--copies", type=click.IntRange(1), default=1, help="Wait until so many relays hold it verified.")
@config_options(VersionLabels)
@click.option("--allow-change", is_flag=True, help="Publish other names, shapes or dtypes than the version before.")
@click.option("--wait-s", type=click.FloatRange(0.1), default=120.0, help="How long to wait for seal and copies.")
def push(
    directory: Path,
    relay: str,
    credentials: Path | None,
    model: str,
    step: int,
    run: str | None,
    copies: int,
    allow_change: bool,
    wait_s: float,
    **labels: object,
) -> None:
    """Publishes a checkpoint DIRECTORY as the next version of a model, as it is.

    Tensors come from model.safetensors, the files that its index names, or the only set of numbered files.
    Configuration, tokenizer, chat template and generation defaults (*.json, *.jinja, *.txt, *.model, *.tiktoken, *.py)
    ride along, so that a relay's snapshot opens with `from_pretrained`.
    Subdirectories, adapters, optimizer states and pickled weights stay behind.

    Refused while another publisher, such as a trainer, is connected to that model.

    \b
    Example, the base model of a run as version 1, safe on two hosts:
      paramserver push ./SmolLM2-135M-Instruct --relay trainer-0:7070 --model policy --copies 2
    and back into a directory:
      paramserver pull --relay trainer-0:7070 --model policy --out weights/
    """
    from paramserver.client.push import push as push_directory

    work = push_directory(
        _client(relay, credentials),
        directory,
        model,
        step=step,
        run=run,
        copies=copies,
        allow_change=allow_change,
        wait_s=wait_s,
        **config_from(VersionLabels, labels),
    )
    _run(work)


async def _settled(client: RelayClient, wait_s: float, members_min: int) -> RelayStatus:
    """The relay's status, awaited for `wait_s` while it does not answer, or knows too few members."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found = await client.status()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
        else:
            if not wait_s or len(found.members) >= members_min:
                return found
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"{client.address} knows {len(found.members)} of {members_min} relays after {wait_s:g} s: "
                    f"{', '.join(found.members)}",
                    hint="see the logs of the others; all of a fleet have the same --etcd",
                )
        await asyncio.sleep(POLL_S)


def _ready(path: Path | None, addresses: dict[str, str]) -> None:
    write_ready_file(path, addresses)
    click.echo(" ".join(f"{key}={value}" for key, value in addresses.items()))


def _client(relay: str, credentials: Path | None) -> RelayClient:
    return RelayClient(relay, credentials=credentials_in(credentials))


def _run(work: Coroutine[None, None, T]) -> T:
    try:
        return asyncio.run(work)
    except LaminarError as error:
        logging.getLogger(__name__).debug("failed", exc_info=error)
        say(f"error: {error}", err=True)
        sys.exit(1)


def _run_daemon(work: Coroutine[None, None, None], log_format: str) -> None:
    """As `_run`, but whoever reads a daemon's log as JSON finds its failure there, in that form."""
    if log_format == "text":
        _run(work)
        return
    try:
        asyncio.run(work)
    except LaminarError as error:
        logging.getLogger(__name__).error("%s", error)
        sys.exit(1)


def main() -> None:
    """Entry point. Expected errors are one line, without a traceback."""
    try:
        cli(prog_name="paramserver")
    except LaminarError as error:
        say(f"error: {error}", err=True)
        sys.exit(1)
