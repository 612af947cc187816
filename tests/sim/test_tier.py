"""Seeded lives of a relay tier: first safety under faults, then no faults and liveness. `make sim` runs thousands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # lives of whole relay tiers

FAULTS_S = 8.0
BUDGET_S = 60.0
SEEDS = [(0, 60), *(pytest.param(60 + at * 120, 120, marks=pytest.mark.long) for at in range(2))]
"""The first and how many of one test, or as many as fit into its budget."""


@pytest.mark.parametrize(("first", "count"), SEEDS)
def test_nothing_torn_nothing_back_memory_bounded_and_everything_heals(first: int, count: int) -> None:
    seeds = ("--first", str(first), "--seeds", str(count))
    found = _simulate(*seeds, "--faults-s", str(FAULTS_S), "--budget-s", str(BUDGET_S))
    assert found["versions_sealed"] > 5 * found["seeds"], "the faults leave work to be done"
    assert found["relay_lives"] > 5 * found["seeds"], "relays and trainers do die"


def test_what_failed_once_does_not_fail_again() -> None:
    _simulate("--kept", "--seeds", "0")


LIVES_SLOWLY = """
import pathlib, sys, time
from tests.sim import __main__ as sim, tier

def live(seed, faults_s):
    begun = pathlib.Path(sys.argv[1], str(seed))
    begun.touch()
    time.sleep(0.2 * (1 + seed % 2))
    begun.rename(begun.with_suffix(".ended"))
    raise RuntimeError("told")

tier.live = live
print(len(sim.run([(seed, 1.0) for seed in range(50)], 2, 3.0)))
"""


def test_a_budget_that_is_used_up_breaks_off_no_story(tmp_path: Path) -> None:
    """One that is killed leaves its relays' pools in shared memory."""
    command = [sys.executable, "-c", LIVES_SLOWLY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    begun = [path.suffix for path in tmp_path.iterdir()]
    assert 2 <= len(begun) < 50
    assert set(begun) == {".ended"}
    assert done.stdout.splitlines()[-1] == str(len(begun))


def _simulate(*arguments: str) -> dict[str, float]:
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
        command, capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "PYTHONHASHSEED": "0"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    return dict(json.loads(last))
