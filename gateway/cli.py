"""Commands of the gateway: `serve`, `status`, `repack`, and those that load more (`LAZY`)."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any, get_args

import click
import uvloop

from gateway.config import GatewayConfig, parse_engine
from gateway.core.fleet import FleetConfig, Mode
from protos.engines import ENGINE_KINDS
from protos.errors import LaminarError
from protos.options import LOG_LEVEL, PORT, HostPort, Name, Number
from protos.process import setup_logging, write_ready_file

log = logging.getLogger("gateway")

AT_LEAST_1 = click.IntRange(min=1)
SECONDS = Number(min=0)
POSITIVE = Number(min=0, min_open=True)
INTERVAL = Number(min=0.01)
"""Of looks at engines, and of plans: more often than that they would be all that is done."""
SHARE = Number(0, 1, min_open=True)

LAZY = {
    "engine": ("gateway.engines.embedded.cli", "The embedded inference engine (needs torch)."),
    "engine-dtype": (
        "gateway.engines.embedded.cli",
        "Which dtype the embedded engine is fastest in here (needs torch).",
    ),
    "faultkit": ("gateway.faultkit.cli", "Scripted engines that die, hang, repeat, shorten, abort."),
}


class LazyGroup(click.Group):
    """Imports a command's module only when it is called: `serve` must start without torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY:
            return super().get_command(ctx, cmd_name)
        module, _ = LAZY[cmd_name]
        command = getattr(importlib.import_module(module), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
def cli() -> None:
    """One OpenAI-compatible door to many inference engines, for reinforcement learning.

    \b
    Start one engine and the gateway:
      gateway engine --model DIR --served-model-name policy --port 8000
      gateway serve --model policy --tokenizer DIR --engine e0=embedded=http://127.0.0.1:8000 --port 8080
    Then point an OpenAI client at http://127.0.0.1:8080/v1.
    """


@cli.command()
@click.option("--model", required=True, type=Name(), help="The served model's name, as engines and relays know it.")
@click.option(
    "--tokenizer",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with tokenizer.json and the chat template.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="NAME=KIND=URL[@RELAY]",
    help=f"An engine; repeat for each of them. KIND: {', '.join(ENGINE_KINDS)}.",
)
@click.option("--etcd", type=HostPort(), help="Where relays register engines (`paramserver serve --engine`).")
@click.option("--relay", type=HostPort(), help="Relay of engines that name none: where they load versions from.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to keep sessions and trajectories for the next start. Without it they are in memory, and lost at exit.",
)
@click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
    default="repack",
    help="repack: the long tail is packed onto few engines; drain: engines empty by themselves; "
    "inflight: turns pause while their engine loads, and go on mixed; barrier: all engines wait for the last turn.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=PORT, default=8080, help="0: any free port.")
@click.option("--max-running", type=AT_LEAST_1, default=64, help="Turns that one engine runs at once.")
@click.option("--kv-max", type=SHARE, default=0.9, help="Share of an engine's KV cache that turns may fill.")
@click.option(
    "--intake-batch",
    type=AT_LEAST_1,
    default=64,
    help="New sessions that an engine takes on one version; then its intake closes.",
)
@click.option("--intake-age-s", type=SECONDS, default=600.0, help="An engine's intake closes so long after it opened.")
@click.option(
    "--intake-min-batch",
    type=AT_LEAST_1,
    default=1,
    help="With a newer version at its relay, an engine's intake closes only after so many sessions.",
)
@click.option(
    "--version-hold-s",
    type=SECONDS,
    default=120.0,
    help="How long the last engine on a version stays on it for the version's sessions; less while turns wait.",
)
@click.option(
    "--pinned-versions-max",
    type=click.IntRange(min=0),
    default=4,
    help="Versions that relays keep for sessions with on_version_loss=strict. At the limit, a strict session on a "
    "further version gets 429.",
)
@click.option(
    "--drain-max-s",
    type=SECONDS,
    default=60.0,
    help="How long few remaining turns may keep an engine from loading a newer version.",
)
@click.option(
    "--min-util", type=SHARE, default=0.25, help="Turns of an engine are few below this share of --max-running."
)
@click.option(
    "--staleness-max",
    type=click.IntRange(min=0),
    default=4,
    help="How many versions a trajectory may be behind the trainer when it is sampled.",
)
@click.option("--repack-interval-s", type=INTERVAL, default=5.0, help="Time between two plans for packing turns.")
@click.option(
    "--prefill-tokens-per-s",
    type=POSITIVE,
    default=1000.0,
    help="Prefill speed of an engine: the planner's price of a move.",
)
@click.option(
    "--poll-interval-s",
    type=INTERVAL,
    default=1.0,
    help="Time between two requests for an engine's health and metrics.",
)
@click.option(
    "--stall-timeout-s",
    type=POSITIVE,
    default=60.0,
    help="An engine that sends nothing of a turn for so long has lost it: the turn goes on elsewhere.",
)
@click.option(
    "--disconnect-grace-s", type=SECONDS, default=5.0, help="How long a turn runs on after its client disconnected."
)
@click.option(
    "--recovery-grace-s",
    type=SECONDS,
    default=60.0,
    help="How long a turn that a restart resumed waits for its client.",
)
@click.option(
    "--idempotency-window-s",
    type=SECONDS,
    default=600.0,
    help="How long the answer of a turn is kept for a client that sends the request again.",
)
@click.option(
    "--queue-timeout-s", type=SECONDS, default=60.0, help="How long a turn waits for an engine before it gets 429."
)
@click.option(
    "--tokens-per-event",
    type=AT_LEAST_1,
    help="Tokens that an engine sends in one event. Default: 1 to 48, by the turns' number, speed and clients.",
)
@click.option(
    "--queue-max",
    type=AT_LEAST_1,
    default=1024,
    help="Turns that may wait for an engine at once; further ones get 429.",
)
@click.option(
    "--session-idle-s", type=SECONDS, default=1800.0, help="A session without a request for so long is abandoned."
)
@click.option(
    "--logprobs-kind",
    type=click.Choice(["processed", "raw"]),
    default="processed",
    help="Which logprobs the engines report: vLLM's are raw unless it runs with --logprobs-mode processed_logprobs.",
)
@click.option(
    "--penalties-move",
    is_flag=True,
    help="Turns with penalties may move to another engine, which counts tokens anew: their distribution changes.",
)
@click.option(
    "--session-from-user/--no-session-from-user",
    default=True,
    help="OpenAI's body field `user` names the session of a call that nothing else names. Switch it off for clients "
    "that always send one: all calls of a user would be one session.",
)
@click.option(
    "--relay-text",
    is_flag=True,
    help="Calls that name no session and ask for no token ids are passed to an engine's own text API as they are: "
    "many times cheaper. These calls have no record, token ids or versions of spans; a call that breaks off is not "
    "resumed; retries are not joined; the engine alone checks the fields. Engines of kind embedded take only "
    "/v1/completions.",
)
@click.option(
    "--probe/--no-probe",
    default=True,
    help="Ask each engine for one token before and after a load, to see whether it computes with the new weights.",
)
@click.option("--seed", default=0, help="Of the planner's random choice between equal plans.")
@click.option("--log-level", type=LOG_LEVEL, default="info")
@click.option("--ready-file", type=click.Path(dir_okay=False, path_type=Path), help="JSON with the address, once up.")
def serve(model: str, tokenizer: Path, engines: tuple[str, ...], relay: str | None, **options: Any) -> None:
    """Serves the OpenAI API over the engines named."""
    setup_logging(options.pop("log_level"))
    ready_file = options.pop("ready_file")
    fleet_names = FleetConfig.__dataclass_fields__.keys()
    fleet = FleetConfig(**{name: options.pop(name) for name in list(options) if name in fleet_names})
    try:
        config = GatewayConfig(
            model=model,
            tokenizer=tokenizer,
            engines=tuple(parse_engine(text, relay) for text in engines),
            fleet=fleet,
            **options,
        )
        uvloop.run(_serve(config, ready_file))
    except LaminarError as e:
        log.error("%s", e)
        sys.exit(1)


@cli.command()
@click.option("--url", default="http://127.0.0.1:8080", help="Address of a running gateway.")
@click.option("--dry-run", is_flag=True, help="Show what would move now, and why; nothing moves.")
@click.option("--json", "as_json", is_flag=True, help="The gateway's answer as JSON.")
def repack(url: str, dry_run: bool, as_json: bool) -> None:
    """Packs the long tail of a running gateway now, or shows the plan."""
    from gateway.operate.repack_view import describe, request_plans

    try:
        answer = asyncio.run(request_plans(url, dry_run=dry_run))
    except LaminarError as e:
        raise click.ClickException(str(e)) from e
    click.echo(json.dumps(answer, indent=1) if as_json else describe(answer, dry_run=dry_run))


@cli.command()
@click.option("--url", default="http://127.0.0.1:8080", help="Address of a running gateway.")
@click.option("--json", "as_json", is_flag=True, help="All fields, as `GET /status` answers.")
@click.option(
    "--wait-s",
    type=SECONDS,
    default=0.0,
    show_default=True,
    help="Wait so long for the gateway to answer and for an engine to serve; exit status 1 if none does by then.",
)
def status(url: str, as_json: bool, wait_s: float) -> None:
    """Shows the engines, turns, buffer and faults of a running gateway."""
    from gateway.operate.repack_view import call, wait_for_engine
    from gateway.operate.status_view import show

    try:
        answer = asyncio.run(wait_for_engine(url, wait_s) if wait_s else call("GET", url, "/status"))
    except LaminarError as e:
        raise click.ClickException(str(e)) from e
    if as_json:
        click.echo(json.dumps(answer, indent=1))
    else:
        show(answer)


async def _serve(config: GatewayConfig, ready_file: Path | None) -> None:
    from gateway.app import DRAIN_TIMEOUT_S, start
    from gateway.runtime.garbage import collect_regularly

    gateway = await start(config)
    collector = asyncio.create_task(collect_regularly(lambda: bool(gateway.sessions.running)), name="garbage")
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    log.info("%s", config)
    log.info("serving %s at %s/v1 with %d engines", config.model, gateway.url, len(config.engines))
    if not config.engines and config.etcd is None:
        log.warning(
            "no engine yet: name one with --engine, or send it to POST /admin/engines; until then turns get 429"
        )
    try:
        write_ready_file(ready_file, {"url": gateway.url})
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
