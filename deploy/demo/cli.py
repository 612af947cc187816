"""The demo's command line.

Exit status: 0 when no turn was lost and every process ended cleanly, 1 when not, 2 wrong usage, 130 stopped on request.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from deploy.demo.display import choose_display
from deploy.demo.model import ModelUnavailable, ensure_model
from deploy.demo.outcome import write_report
from deploy.demo.plan import RELAYS, Plan, Settings, settle
from deploy.demo.processes import DemoError
from deploy.demo.recording import Recording
from deploy.demo.run import CHILD_ENV, ROOT, Outcome, Run
from deploy.demo.speed import measure_speed
from gateway.core.dtypes import Dtype, table
from protos.options import config_option
from protos.process import usable_cores

INTERRUPTED_STATUS = 130
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is looked at


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@config_option(Settings, "seed")
@config_option(Settings, "steps")
@click.option(
    "--report",
    "report_dir",
    default="demo-report",
    type=click.Path(file_okay=False, path_type=Path),
    help="where report.html, summary.json and logs/ go; what an earlier run left there is replaced",
)
@config_option(Settings, "budget_s")
@click.option(
    "--dtype",
    default="auto",
    type=click.Choice(["auto", *get_args(Dtype)]),
    help="what trainer and engines compute in; auto: what this processor is faster in, measured first",
)
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    show_default="SmolLM2-135M-Instruct, downloaded once",
    help="another model to train: a Llama or Qwen2 directory with a chat template, as `transformers` saves it",
)
@click.option("--open/--no-open", "open_page", default=True, help="open the report in a browser, where there is one")
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def main(model_dir: Path | None, dtype: str, open_page: bool, report_dir: Path, **options: Any) -> None:
    """Trains a small real model by reinforcement learning on this machine, everything real and everything shown.

    Runs etcd, 3 relays in a chain, 3 inference engines, the gateway, a GRPO trainer and two agent environments as
    separate processes; kills one engine on purpose; ends by itself and leaves a report. Before that it measures for a
    second whether this processor is faster in float32 or in bfloat16, with one thread or with two.
    """
    try:
        model_dir = ensure_model(click.echo) if model_dir is None else model_dir.resolve()
        with scratch_directories() as scratch:
            settings = Settings(
                model_dir=model_dir,
                report_dir=report_dir.resolve(),
                data_dir=scratch.data,
                pool_dir=scratch.pools,
                pool_bytes=pool_bytes(model_dir),
                **options,
            )
            check_memory(settings)
            settings = fit_processor(settings, None if dtype == "auto" else dtype)  # type: ignore[arg-type]
            warn_of_memory(settings)
            prepare_report(settings)
            recording = Recording()
            outcome = asyncio.run(_run(settings, recording))
    except (DemoError, ModelUnavailable) as error:
        click.echo(f"demo: {error}", err=True)
        sys.exit(1)
    sys.exit(_finish(settings, recording, outcome, open_page))


def fit_processor(settings: Settings, dtype: Dtype | None) -> Settings:
    """The settings for this processor, as measured now; prints the choice and its reason."""
    click.echo("demo: measuring for about a second what this processor does best ...")
    choice = measure_speed(settings.model_dir, ROOT, CHILD_ENV)
    settings = settle(settings, choice, cores=usable_cores(), dtype=dtype)
    for line in table(choice):
        click.echo(f"      {line}")
    chosen = f"trainer and engines compute in {settings.dtype}" + (", as requested" if dtype else "")
    threads = f"the trainer with {_threads(settings.trainer_threads)}, each engine with {settings.engine_threads}"
    click.echo(f"demo: {choice.reason}: {chosen}, {threads}")
    return settings


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


async def _run(settings: Settings, recording: Recording) -> Outcome:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await Run(Plan(settings), recording, choose_display(), stop).run()


def _finish(settings: Settings, recording: Recording, outcome: Outcome, open_page: bool) -> int:
    """Writes the report, prints the verdict, and returns the exit status."""
    if outcome.wall_s == 0.0:
        click.echo(f"demo: {outcome.problem}\nLogs: {settings.logs}", err=True)
        return INTERRUPTED_STATUS if outcome.interrupted else 1
    ok, why, page = write_report(settings, recording, outcome)
    click.echo((settings.report_dir / "summary.json").read_text().rstrip())
    click.echo(f"demo: {'ok' if ok else 'FAILED'}: {why}", err=not ok)
    if outcome.problem is not None:
        click.echo(outcome.problem, err=True)
    click.echo(f"Report: {page}\nLogs:   {settings.logs}")
    if open_page and has_screen():
        webbrowser.open(page.as_uri())
    if outcome.interrupted:
        return INTERRUPTED_STATUS
    return 0 if ok else 1


@dataclass(frozen=True, slots=True)
class Scratch:
    """Directories that are gone after the run."""

    data: Path
    pools: Path


@contextmanager
def scratch_directories() -> Iterator[Scratch]:
    """The gateway's store on disk, the relays' pools in shared memory."""
    if not SHARED_MEMORY.is_dir():
        raise DemoError(f"there is no {SHARED_MEMORY}: the relays keep weights in shared memory (Linux)")
    with (
        tempfile.TemporaryDirectory(prefix="laminar-demo-") as data,
        tempfile.TemporaryDirectory(prefix="laminar-demo-", dir=SHARED_MEMORY) as pools,
    ):
        yield Scratch(Path(data), Path(pools))


def pool_bytes(model_dir: Path) -> int:
    """A relay's memory: four times a version, and some room."""
    size = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return max(Settings.pool_bytes_min, 4 * size + (128 << 20))


def check_memory(settings: Settings) -> None:
    """The relays' pools must fit into shared memory."""
    needed = len(RELAYS) * settings.pool_bytes
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise DemoError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, and the relays' pools need {needed >> 20} MiB "
            "(in a container: start it with a larger --shm-size)"
        )


def warn_of_memory(settings: Settings, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Warns when memory may run out: otherwise the kernel would kill a process without a visible reason."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if found is None:
        return
    available = int(found[1]) << 10
    if available < settings.memory_bytes:
        click.echo(
            f"demo: {available / 2**30:.1f} GiB of memory are available, and all processes together take about "
            f"{settings.memory_bytes >> 30} GiB: the kernel may end one of them",
            err=True,
        )


def prepare_report(settings: Settings) -> None:
    """An empty place for this run's report; only what the demo itself makes is removed."""
    for name in ("report.html", "summary.json", "recording.jsonl"):
        (settings.report_dir / name).unlink(missing_ok=True)
    shutil.rmtree(settings.logs, ignore_errors=True)
    settings.logs.mkdir(parents=True)


def has_screen() -> bool:
    """Whether a browser could show anything to anybody."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
