"""Seeded lives of a relay tier: first safety under faults, then no faults and liveness. `make sim` runs thousands."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

FAULTS_S = 8.0
NUM_QUICK, NUM_SLOW = 8, 150  # seeds of one test, or as many as fit into its budget
BUDGET_S = 60.0
SLOW = [pytest.param(NUM_QUICK + at * NUM_SLOW, NUM_SLOW, marks=pytest.mark.slow) for at in range(2)]


@pytest.mark.parametrize(("first", "count"), [(0, NUM_QUICK), *SLOW])
def test_nothing_torn_nothing_back_memory_bounded_and_everything_heals(first: int, count: int) -> None:
    seeds = ("--first", str(first), "--seeds", str(count))
    found = _simulate(*seeds, "--faults-s", str(FAULTS_S), "--budget-s", str(BUDGET_S))
    assert found["sealed"] > 5 * found["seeds"], "the faults leave work to be done"
    assert found["lives"] > 5 * found["seeds"], "relays and trainers do die"


def test_what_failed_once_does_not_fail_again() -> None:
    _simulate("--kept", "--seeds", "0")


def _simulate(*arguments: str) -> dict[str, int]:
    """In a process of its own: time and threads of this one stay as they are."""
    command = [
        sys.executable,
        "-m",
        "tests.sim",
        "--no-keep",
        "--processes",
        "1",
        "--budget-s",
        str(BUDGET_S),
        *arguments,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "PYTHONHASHSEED": "0"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    return {what: int(number) for number, what in re.findall(r"(\d+) (?:versions )?(seeds|sealed|faults|lives)", last)}
