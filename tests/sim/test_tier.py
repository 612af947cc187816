"""Seeded lives of a relay tier: first safety under faults, then no faults and liveness. `make sim` runs thousands."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

FAULTS_S = 8.0
NUM_SEEDS = 50  # of each test; each takes some 0.2 s of one core


@pytest.mark.parametrize("first", [0, NUM_SEEDS])
def test_nothing_torn_nothing_back_memory_bounded_and_everything_heals(first: int) -> None:
    found = _simulate("--first", str(first), "--seeds", str(NUM_SEEDS), "--faults-s", str(FAULTS_S))
    assert found["sealed"] > 5 * NUM_SEEDS, "the faults leave work to be done"
    assert found["ended"] > 0, "and some of it is undone"
    assert found["lives"] > 5 * NUM_SEEDS, "relays and trainers do die"


def test_what_failed_once_does_not_fail_again() -> None:
    _simulate("--kept", "--seeds", "0")


def _simulate(*arguments: str) -> dict[str, int]:
    """In a process of its own: time and threads of this one stay as they are."""
    command = [sys.executable, "-m", "tests.sim", "--no-keep", "--processes", "1", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "PYTHONHASHSEED": "0"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        what: int(number)
        for number, what in re.findall(r"(\d+) (?:versions )?(sealed|ended|faults|lives)", done.stdout)
    }
