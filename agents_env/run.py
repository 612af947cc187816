"""`agents-env run`: one run of an environment, from its options to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import click

from agents_env.environment import Environment, PooledEnvironment
from agents_env.failures import RunFailed
from agents_env.options import RunOptions, TasksOptions, starting
from agents_env.programs import Programs
from agents_env.runner import Plan, Runner
from agents_env.runner.journal import Journal
from agents_env.runner.progress import describe, show_live, show_log
from agents_env.runner.sources import OwnTasks, PoolTasks, Source
from agents_env.server import Server
from agents_env.telemetry import serving_metrics
from protos import terminal
from protos.errors import LaminarError
from protos.process import setup_logging, write_ready_file

log = logging.getLogger("agents-env")


def start(environment: Environment[Any], options: RunOptions) -> None:
    if isinstance(environment, Programs):
        options = replace(options, groups=len(environment.own_tasks))
    run_to_end(_roll_out(environment, options), options.log_level, options.log_format)


run_options = starting(RunOptions, start)
"""Adds the options of `run` to an environment's command, which gets `start`."""


def run_to_end(work: Any, log_level: str, log_format: str = "text") -> Any:
    """Runs the coroutine; a failure that the user can mend is one line, and status 1."""
    setup_logging(log_level, log_format)
    for library in ("httpx", "httpx2", "httpcore", "openai"):
        logging.getLogger(library).setLevel(logging.WARNING)  # a line for every request otherwise
    try:
        return asyncio.run(work)
    except (RunFailed, LaminarError, OSError) as error:
        log.error("%s", error)
        sys.exit(1)


def stop_on_signals(environment: Environment[Any] | None = None) -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C, which an environment that runs programs passes on to them; the second Ctrl-C ends this
    process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stopped(number: signal.Signals) -> None:
        if isinstance(environment, Programs):
            environment.forward(number)
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped, number)
    return stop


async def _roll_out(environment: Environment[Any], options: RunOptions) -> None:
    stop = stop_on_signals(environment)
    with contextlib.ExitStack() as files:
        journal = None if options.journal is None else files.enter_context(_journal(environment, options))
        plan = options.plan(None if journal is None else journal.run_id)
        out = files.enter_context(opened(options.out))
        async with options.server(sessions=options.sessions) as server:
            if not await until(stop, server.check()):
                return
            async with _source(environment, server, plan, options, journal) as source:
                runner = Runner(environment, server, plan, out=out, source=source, journal=journal)
                metrics = files.enter_context(serving_metrics(options.metrics_port, runner.statistics))
                served = {} if metrics is None else {"metrics": metrics}
                write_ready_file(options.ready_file, {"run_id": plan.run_id, **served})
                log.info("rolling out %s against %s: %s", environment.name, server.root, plan)
                await shown(runner, stop, f"agents-env {environment.name}")
            end = runner.statistics()
            log.info("ended: %s", describe(end))
            if end.given_up and not end.rollouts:
                raise RunFailed(f"no rollout came to a reward; the last failure: {end.last_error}")


async def shown(runner: Runner[Any], stop: asyncio.Event, title: str) -> None:
    """Runs it while its progress is shown."""
    console = terminal.console(stderr=True)
    live = console.is_terminal
    show = show_live(console, title, runner.statistics) if live else show_log(runner.statistics)
    showing = asyncio.create_task(show)
    try:
        await runner.run(stop)
    finally:
        showing.cancel()
        await asyncio.wait({showing})


@contextlib.asynccontextmanager
async def _source(
    environment: Environment[Any], server: Server, plan: Plan, options: RunOptions, journal: Journal | None
) -> AsyncIterator[Source[Any]]:
    pool = options.pool_options()
    if pool is None:
        yield OwnTasks(environment, plan, journal)
    elif not options.sessions:
        raise RunFailed("--pool needs a gateway, and --no-sessions is for other servers; leave one out")
    else:
        async with PoolTasks(environment, server, pool, journal) as leased:
            yield leased


def _journal(environment: Environment[Any], options: RunOptions) -> Journal:
    assert options.journal is not None
    same: dict[str, Any] = {"environment": environment.name, "pool": options.pool}
    if options.pool is None:
        same |= {"seed": options.seed, "group_size": options.group_size}
    return Journal.open(options.journal, options.plan().run_id, same)


async def until(stop: asyncio.Event, work: Any) -> bool:
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


def opened(path: Path | None) -> contextlib.AbstractContextManager[TextIO | None]:
    if path is None:
        return contextlib.nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1)


def print_tasks(environment: Environment[Any], options: TasksOptions) -> None:
    """Prints own tasks as rows of a prompt pool, one JSON object a line, with the id as column `id`."""
    if not isinstance(environment, PooledEnvironment):
        raise click.UsageError(f"environment {environment.name} cannot read tasks of a prompt pool")
    for task in islice(environment.tasks(options.seed), options.count):
        click.echo(json.dumps({"id": task.task_id, **environment.data_of(task)}))
