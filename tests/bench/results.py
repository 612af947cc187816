"""Where every benchmark leaves its figures: `bench-results/NAME.json`, with the day and the kind of machine."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

RESULTS = Path("bench-results")


def machine() -> str:
    """The machine in words: processor, cores this process may use, memory."""
    [model, *_] = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")] or ["unknown"]
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"


def write(name: str, figures: Mapping[str, object]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    measured = {"measured": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": machine()}
    path.write_text(json.dumps({**measured, **figures}, indent=1) + "\n")
    print(f"written: {path}")
    return path


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()
