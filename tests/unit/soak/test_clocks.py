"""A process' clock is set while it runs; what it measures and how long it sleeps stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import clocks
from tests.support.skips import needs

STEPPED = """
import time
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

# One thread holds the GIL through a single call; the other one waits for it, and adds up what it uses meanwhile.
WAITING = """
import threading, time
started, held, waited = threading.Event(), 0.0, 0.0
def wait():
    global waited
    began = time.thread_time()
    started.set()
    while not held:
        pass
    waited = time.thread_time() - began
waiter = threading.Thread(target=wait)
waiter.start()
started.wait()
began = time.thread_time()
sum(range(5 * 10**7))
held = time.thread_time() - began
waiter.join()
assert waited < held / 2, (waited, held)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(clocks.missing()), reason=needs(f"no clock steps: {clocks.missing()}", "make system-packages")
    ),
]


def test_a_clock_is_set_while_its_process_runs(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    env = {**os.environ, **clocks.environment(tmp_path, clock)}
    with subprocess.Popen([sys.executable, "-c", STEPPED], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        clocks.set_clock(clock, 100.0)
        assert process.wait(60) == 0


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
def test_a_thread_that_waits_for_the_gil_uses_next_to_no_processor_time(tmp_path: Path, ahead_s: float) -> None:
    clock = tmp_path / "clock"
    env = {**os.environ, **clocks.environment(tmp_path, clock)}
    clocks.set_clock(clock, ahead_s)
    subprocess.run([sys.executable, "-c", WAITING], env=env, check=True, timeout=120)
