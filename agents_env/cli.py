"""The command `agents-env`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import click
from rich.console import Console

from agents_env.environment import Environment
from agents_env.environments.reasoning import DEFAULT_DATASET, Reasoning, UnknownDataset, datasets
from agents_env.environments.tool_chain import ToolChain
from agents_env.failures import RunFailed
from agents_env.progress import describe, show_live, show_log
from agents_env.runner import Plan, Runner
from agents_env.server import Sampling, Server

log = logging.getLogger("agents-env")

Command = TypeVar("Command", bound=Callable[..., Any])

API_KEY_VARIABLE = "OPENAI_API_KEY"
SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, slots=True)
class Options:
    """The options that every `agents-env run` has."""

    gateway: str
    model: str
    sessions: bool
    groups: int
    group_size: int
    concurrency: int
    duration_s: float | None
    seed: int
    temperature: float
    top_p: float
    split: Literal["train", "eval"]
    attempts: int
    failures_max: int
    patience_s: float
    timeout_s: float
    out: Path | None
    run_id: str | None
    ready_file: Path | None
    log_level: str

    def plan(self) -> Plan:
        return Plan(
            run_id=self.run_id or secrets.token_hex(3),
            groups=self.groups,
            group_size=self.group_size,
            concurrency=self.concurrency,
            seed=self.seed,
            attempts=self.attempts,
            duration_s=self.duration_s,
            split=self.split,
            failures_max=self.failures_max,
        )

    def server(self) -> Server:
        return Server(
            self.gateway,
            Sampling(self.model, self.temperature, self.top_p),
            sessions=self.sessions,
            api_key=os.environ.get(API_KEY_VARIABLE) or "none",
            patience_s=self.patience_s,
            timeout_s=self.timeout_s,
        )


def _url(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise click.BadParameter(f"{value!r} is not a URL; write http://{value}")
    return value


def _option(owner: Callable[..., object], flag: str, **attributes: Any) -> Callable[[Command], Command]:
    """The option of a parameter of `owner`, with the parameter's default."""
    name = flag.partition("/")[0].removeprefix("--").replace("-", "_")
    return click.option(flag, default=inspect.signature(owner).parameters[name].default, **attributes)


_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--gateway",
        required=True,
        metavar="URL",
        callback=_url,
        help="what `gateway serve` prints, or an OpenAI base_url",
    ),
    click.option("--model", default="policy", help="the model's name there"),
    _option(Server, "--sessions/--no-sessions", help="--no-sessions: a plain OpenAI server; nothing is recorded"),
    _option(Plan, "--groups", type=click.IntRange(min=0), help="tasks to roll out; 0: until stopped"),
    _option(Plan, "--group-size", type=click.IntRange(min=1), help="samples of each task"),
    _option(Plan, "--concurrency", type=click.IntRange(min=1), help="rollouts at once"),
    _option(Plan, "--duration-s", type=click.FloatRange(min=0), help="stop after so many seconds"),
    _option(Plan, "--seed", type=click.IntRange(min=0), help="of the stream of tasks"),
    _option(Sampling, "--temperature", type=click.FloatRange(min=0)),
    _option(Sampling, "--top-p", type=click.FloatRange(0, 1, min_open=True)),
    _option(Plan, "--split", type=click.Choice(["train", "eval"]), help="eval: scored, not trained on"),
    _option(Plan, "--attempts", type=click.IntRange(min=1), help="per sample; each in a session of its own"),
    _option(Plan, "--failures-max", type=click.IntRange(min=1), help="failures in a row that end the run"),
    _option(Server, "--patience-s", type=click.FloatRange(min=0), help="for a server that is full or away"),
    _option(Server, "--timeout-s", type=click.FloatRange(min=0, min_open=True), help="of one request"),
    click.option(
        "--out", default=None, type=click.Path(dir_okay=False, path_type=Path), help="a JSON line per rollout is added"
    ),
    click.option("--run-id", default=None, help="part of every group and session id  [default: random]"),
    click.option(
        "--ready-file", default=None, type=click.Path(dir_okay=False, path_type=Path), help="written once it rolls out"
    ),
    click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"])),
]


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of every environment to a command, which gets them as `options`."""
    names = set(Options.__dataclass_fields__)

    @functools.wraps(command)
    def with_options(**arguments: Any) -> None:
        own = {name: value for name, value in arguments.items() if name not in names}
        command(options=Options(**{name: arguments[name] for name in names}), **own)

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options


@click.group(context_settings=SETTINGS)
def main() -> None:
    """Agent environments that roll out against an OpenAI-compatible server.

    \b
    agents-env list
    agents-env run tool-chain --gateway http://127.0.0.1:8080 --concurrency 16 --group-size 8 --groups 4
    agents-env run reasoning --gateway http://127.0.0.1:8000/v1 --no-sessions --model NAME --dataset gcd
    """


@main.group(context_settings=SETTINGS)
def run() -> None:
    """Roll out an environment: groups of samples of one task, with their rewards sent to the gateway.

    Ends with status 0 when --groups are done, after --duration-s, or on SIGTERM or Ctrl-C, which abandon open sessions.
    The key for a server that wants one is read from OPENAI_API_KEY.
    """


@run.command("tool-chain", context_settings=SETTINGS)
@_common
def tool_chain(options: Options) -> None:
    """Multi-turn: 1 to 8 calls of a calculator, then the answer."""
    _run(ToolChain(), options)


@run.command("reasoning", context_settings=SETTINGS)
@click.option("--dataset", default=DEFAULT_DATASET, help="of reasoning-gym; `agents-env list --datasets` names them")
@click.option("--dataset-config", default=None, metavar="JSON", help="its settings, such as '{\"max_words\": 4}'")
@click.option("--max-tokens", default=16, type=click.IntRange(min=1), help="of the reply")
@click.option("--examples", default=1, type=click.IntRange(min=0), help="worked examples before the question")
@_common
def reasoning(options: Options, dataset: str, dataset_config: str | None, max_tokens: int, examples: int) -> None:
    """Single-turn: problems of the reasoning-gym library, with its own scoring."""
    try:
        config = None if dataset_config is None else _json_object(dataset_config)
        environment = Reasoning(dataset, config, num_examples=examples, max_tokens=max_tokens)
    except UnknownDataset as error:
        raise click.UsageError(str(error)) from error
    _run(environment, options)


@main.command("list", context_settings=SETTINGS)
@click.option("--datasets", "with_datasets", is_flag=True, help="name the datasets that `reasoning` can use")
def list_environments(with_datasets: bool) -> None:
    """Name the environments."""
    width = max(map(len, run.commands)) + 2
    for name, command in sorted(run.commands.items()):
        click.echo(f"{name:{width}}{command.help}")
    if with_datasets:
        click.echo("\n".join(["", "datasets of `reasoning`:", *(f"  {name}" for name in datasets())]))


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"--dataset-config is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise click.UsageError("--dataset-config is not a JSON object")
    return value


def _run(environment: Environment[Any], options: Options) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=options.log_level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    for library in ("httpx", "httpx2", "httpcore", "openai"):
        logging.getLogger(library).setLevel(logging.WARNING)  # a line for every request otherwise
    try:
        asyncio.run(_roll_out(environment, options))
    except (RunFailed, OSError) as error:
        log.error("%s", error)
        sys.exit(1)


async def _roll_out(environment: Environment[Any], options: Options) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    plan = options.plan()
    with _opened(options.out) as out:
        async with options.server() as server:
            if not await _until(stop, server.check()):
                return
            _write_ready_file(options.ready_file, plan)
            runner = Runner(environment, server, plan, out=out)
            log.info("rolling out %s against %s: %s", environment.name, server.root, plan)
            showing = asyncio.create_task(_show(environment.name, runner))
            try:
                await runner.run(stop)
            finally:
                showing.cancel()
                await asyncio.wait({showing})
            end = runner.statistics()
            log.info("ended: %s", describe(end))
            if end.given_up and not end.rollouts:
                raise RunFailed(f"no rollout came to a reward; the last failure: {end.last_error}")


async def _until(stop: asyncio.Event, work: Any) -> bool:
    """Waits for `work`; returns whether it was done before `stop` was set."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})
        return False
    working.result()
    return True


async def _show(name: str, runner: Runner[Any]) -> None:
    console = Console(stderr=True)
    if console.is_terminal:
        await show_live(console, f"agents-env {name}", runner.statistics)
    else:
        await show_log(runner.statistics)


def _opened(path: Path | None) -> contextlib.AbstractContextManager[TextIO | None]:
    if path is None:
        return contextlib.nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1)


def _write_ready_file(path: Path | None, plan: Plan) -> None:
    """Writes `{"pid": ..., "run_id": ...}` at once: readers never see half of it."""
    if path is None:
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps({"pid": os.getpid(), "run_id": plan.run_id}))
    os.replace(scratch, path)
