"""Figures that depend on the processor: a row for each kind they were measured on, and the worst of them in front.

A kind that a figure was not run on is named, and leaves a bar open that all others met.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
"""Of those in /proc/cpuinfo, the ones that tell apart processors of one model name."""
UNKNOWN = "flags not recorded"
ROWS = "by_processor"

Row = Mapping[str, Any]


def processor(cpuinfo: str | None = None) -> str:
    """This processor's model name and flags."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = [flag for flag in FLAGS if flag in found.get("flags", "").split()]
    return f"{found.get('model name', 'unknown')} ({' '.join(flags) or UNKNOWN})"


def rows_of(kept: Row, machine: str) -> dict[str, Row]:
    """A kept figure's rows; one that was kept before there were any was measured on `machine`."""
    if ROWS in kept:
        return dict(kept[ROWS])
    return {f"{machine.partition(',')[0]} ({UNKNOWN})": kept} if kept else {}


def headline(rows: Mapping[str, Row], kinds: Iterable[str]) -> dict[str, Any]:
    """What stands for a figure: its worst row, all rows, and the known kinds that have none."""
    missing = sorted(set(kinds) - rows.keys())
    kind, worst = max(rows.items(), key=lambda item: _badness(item[1]))
    is_open = bool(missing) and worst["verdict"] == "met"
    return {
        **worst,
        "verdict": "open" if is_open else worst["verdict"],
        "processor": kind,
        "not_run_there": missing,
        ROWS: dict(rows),
    }


def _badness(row: Row) -> float:
    """What was not measured is the worst there is."""
    if row["value"] is None:
        return float("inf")
    return -row["value"] if row["better"] == "more" else row["value"]
