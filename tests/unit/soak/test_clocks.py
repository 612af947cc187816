"""A process' clock is set while it runs; what it measures and how long it sleeps stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import clocks
from tests.support.skips import needs

PROGRAM = """
import sys, time
began, lived = time.time(), time.monotonic()
print("ready", flush=True)
while time.time() - began < 50:
    time.sleep(0.01)
assert 90 < time.time() - began < 200, time.time() - began
assert time.monotonic() - lived < 60
before = time.monotonic()
time.sleep(0.2)
assert time.monotonic() - before >= 0.2
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(clocks.missing()), reason=needs(f"no clock steps: {clocks.missing()}", "make system-packages"))
def test_a_clock_is_set_while_its_process_runs(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    env = {**os.environ, **clocks.environment(tmp_path, clock)}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        clocks.set_clock(clock, 100.0)
        assert process.wait(60) == 0
