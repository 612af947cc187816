"""Clocks of processes that can be set while they run, by libfaketime. Their monotonic clocks go on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

WAITS = Path(__file__).with_name("monotonic_waits.c")
SHARED = Path("/dev/shm")
LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


def missing() -> str:
    """Why no clock can be set here; "" when it can."""
    if not LIBRARIES:
        return "libfaketime is not installed (`make system-packages`)"
    return "" if shutil.which("cc") else "there is no C compiler (`make system-packages`)"


def preload(directory: Path) -> str:
    """What LD_PRELOAD has to be, with what is compiled for it in `directory`."""
    waits = directory / "monotonic_waits.so"
    if not waits.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(waits), str(WAITS), "-ldl"], check=True)
    return f"{waits}:{LIBRARIES[0]}"


def environment(directory: Path, clock: Path) -> Mapping[str, str]:
    """Of a process whose clock `clock` sets; a change is seen after one or two seconds."""
    set_clock(clock, 0.0)
    return {
        "LD_PRELOAD": preload(directory),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def forget(pid: int) -> None:
    """Removes what libfaketime leaves of a process that was killed."""
    for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
        (SHARED / name).unlink(missing_ok=True)


def set_clock(clock: Path, ahead_s: float) -> None:
    """Sets it to so many seconds ahead of the true time."""
    scratch = clock.with_suffix(".new")
    scratch.write_text(f"{ahead_s:+.0f}")
    scratch.replace(clock)
