"""The sandboxes that work on this machine, as parameters of tests, and a look for processes that a run left behind."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents_env.sandbox.client import LANDLOCK_ABI_MIN
from agents_env.sandbox.kinds import landlock_abi
from tests.support.skips import needs

LEFT_BEHIND_S = 30.0


def _lacks_sandlock() -> str:
    if landlock_abi() < LANDLOCK_ABI_MIN:
        return needs("sandlock needs Landlock's interface 6", "a kernel from Linux 6.12 on")
    return "" if importlib.util.find_spec("sandlock") else needs("sandlock is not installed", "make env")


def _lacks_bubblewrap() -> str:
    return "" if shutil.which("bwrap") else needs("there is no bwrap", "make system-packages")


KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(lacks), reason=lacks), id=kind)
    for kind, lacks in (("sandlock", _lacks_sandlock()), ("bubblewrap", _lacks_bubblewrap()))
]


def processes_with(token: str) -> list[str]:
    """The command lines of processes whose command line or environment holds `token`; zombies have neither."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if token.encode() in words:
                found.append(words[:200].decode(errors="replace"))
    return found


def wait_until_gone(token: str) -> None:
    """Waits until no process has `token`; AssertionError with those that stay."""
    for left in _looks(token):
        if not left:
            return
    raise AssertionError(f"still there: {processes_with(token)}")


def wait_until_there(token: str, number: int) -> None:
    for found in _looks(token):
        if len(found) >= number:
            return
    raise AssertionError(f"never there: {number} processes with {token}")


def _looks(token: str) -> Iterator[list[str]]:
    deadline = time.monotonic() + LEFT_BEHIND_S
    while time.monotonic() < deadline:
        yield processes_with(token)
        time.sleep(0.005)
