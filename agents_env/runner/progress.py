"""The progress of a run: a live table on a terminal, log lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agents_env.runner import Statistics

log = logging.getLogger("agents-env")

LIVE_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0


async def show_live(console: Console, title: str, read: Callable[[], Statistics]) -> None:
    """Updates the table until it is cancelled; the last state stays on the screen."""
    with Live(_table(title, read()), console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(_table(title, read()), refresh=True)
                await asyncio.sleep(LIVE_INTERVAL_S)
        finally:
            live.update(_table(title, read()), refresh=True)


async def show_log(read: Callable[[], Statistics], interval_s: float = LOG_INTERVAL_S) -> None:
    """Logs the progress until it is cancelled; silent while nothing changes."""
    logged = ""
    while True:
        await asyncio.sleep(interval_s)
        now = read()
        if (progress := f"{now.rollouts} {now.turns} {now.failed} {now.waits_for}") != logged:
            logged = progress
            log.info("%s", describe(now))


def describe(now: Statistics) -> str:
    """The statistics of a run in one line."""
    text = (
        f"{now.rollouts} rollouts, {now.groups_completed} whole groups, {now.running} running; "
        f"reward {_number(now.reward_mean)}, lately {_number(now.reward_recent)}; {now.turns} turns, "
        f"{now.completion_tokens} tokens, {_rate(now):.1f} tokens/s"
    )
    troubles = [("retries", now.retries), ("failed", now.failed), ("given up", now.given_up)]
    text += "".join(f", {count} {name}" for name, count in troubles if count)
    text += f", {now.abandoned} abandoned" if now.abandoned else ""
    return text + (f"; told to wait: {now.waits_for}" if now.waits_for else "")


def _table(title: str, now: Statistics) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="cyan")
    table.add_column(justify="right", min_width=14)
    rows = {
        "whole groups": now.groups_completed,
        "rollouts": now.rollouts,
        "running": now.running,
        "rollouts/min": f"{60 * now.rollouts / now.seconds if now.seconds > 0 else 0.0:.1f}",
        "reward, mean": _number(now.reward_mean),
        "reward, lately": _number(now.reward_recent),
        "turns": now.turns,
        "tokens sampled": now.completion_tokens,
        "tokens/s": f"{_rate(now):.1f}",
        "requests retried": now.retries,
        "failed / given up / abandoned": f"{now.failed} / {now.given_up} / {now.abandoned}",
        "seconds": f"{now.seconds:.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    if now.waits_for:
        table.add_row("told to wait", now.waits_for)
    if now.last_error:
        table.add_row("last error", now.last_error)
    return table


def _rate(now: Statistics) -> float:
    return now.completion_tokens / now.seconds if now.seconds > 0 else 0.0


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.3f}"
