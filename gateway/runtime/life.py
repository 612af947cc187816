"""One process's life: a name of it, by which another process of this host sees whether it is over."""

from __future__ import annotations

import os
from pathlib import Path


def this_life() -> str:
    """Of this process: where process ids are told apart (a boot, a namespace), its id, and when it began."""
    return f"{_place()}.{os.getpid()}.{_began(os.getpid())}"


def is_over(life: str) -> bool:
    """Whether the process is known to have ended. False also for one of another host, of which nothing is known."""
    place, _, rest = life.rpartition(".")
    place, _, pid = place.rpartition(".")
    return place == _place() and pid.isdecimal() and _began(int(pid)) != rest


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> str:
    """The kernel's ticks at its start; empty: it is not there, or has ended and its parent has not looked yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
