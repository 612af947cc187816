"""What `gateway status` tells of a running gateway: for people, from what `/status` answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 10_000
"""Where it is no terminal: lines are not broken for a pipe."""
ENGINE_COLUMNS = ("engine", "kind", "state", "version", "intake", "admitted", "running", "waiting", "KV used")


def show(status: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    for line in _head(status):
        console.print(line, markup=False)
    console.print(_engines(status["engines"]))
    for line in _warnings(status):
        console.print(line, markup=False)


def _head(status: Mapping[str, Any]) -> Sequence[str]:
    sessions, counters, buffer = status["sessions"], status["counters"], status["buffer"]
    return (
        f"model {status['model']}, mode {status['mode']}: newest version {status['newest_version']}, "
        f"the trainer's {status['trainer_version']}",
        f"sessions {sessions['live']}, turns running {sessions['running_turns']}, waiting {sessions['queued']}; "
        f"{status['tokens_per_s']:.0f} tokens/s",
        f"turns ended {counters['turns_completed']}, cut {counters['turns_cut']}, resumed {counters['turns_resumed']}, "
        f"lost {counters['turns_lost']}; moves {counters['moves']}, refreshes {counters['refreshes']}",
        f"buffer {buffer['trajectories']} trajectories, leased {buffer['leased']}",
    )


def _engines(engines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(*ENGINE_COLUMNS, box=None, pad_edge=False)
    for e in engines:
        behind = f" of {e['available']}" if e["available"] > e["version"] else ""
        numbers = (str(e["admitted"]), str(e["running"]), str(e["waiting"]), f"{e['kv_usage']:.0%}")
        table.add_row(e["name"], e["kind"], e["state"], f"{e['version']}{behind}", e["intake"], *numbers)
    return table


def _ails(engine: Mapping[str, Any]) -> bool:
    return bool(engine["state"] != "serving" or engine["available"] > engine["version"])


def _warnings(status: Mapping[str, Any]) -> Sequence[str]:
    """What an operator should look at, with what would be right."""
    found = [f"{e['name']}, last error: {e['last_error']}" for e in status["engines"] if e["last_error"] and _ails(e)]
    if not any(e["state"] == "serving" for e in status["engines"]):
        found.append("no engine serves: new turns wait, then get 429")
    if status["counters"]["version_mismatches"]:
        found.append(f"{status['counters']['version_mismatches']} turns were contradicted by their engines' versions")
    if failures := status["counters"]["refresh_failures"]:
        found.append(f"{failures} loads of a version failed: see each engine's last error, and the log")
    return found
