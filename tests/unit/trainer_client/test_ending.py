"""SIGTERM ends a trainer's process as it always did, after what it holds was given back."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys, threading
from trainer_client.integrations import ending
{before}
lock = threading.Lock()

def stop():
    with lock:
        print("given back", flush=True)

ending.at_sigterm(stop)
with lock:
    print("ready", flush=True)
    while not sys.stdin.readline():
        pass
    print("trains on", flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "trains on\ngiven back\n"),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", ""),
    ],
    ids=["nobody handles it", "the program handles it"],
)
def test_sigterm_gives_back_first_unless_the_program_handles_it(before: str, said: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(before=before)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            # The main thread holds the lock until it has read a line: the handler must not wait for it there.
            printed, _ = process.communicate("go on\n", timeout=120)
        finally:
            process.kill()
    assert printed == said
    assert process.returncode == (-signal.SIGTERM if said else 7)


@pytest.mark.slow
def test_a_stop_that_hangs_does_not_keep_the_process() -> None:
    program = PROGRAM.format(before="ending.SIGTERM_PATIENCE_S = 0.05\n").replace(
        'with lock:\n        print("given back", flush=True)', "threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == -signal.SIGTERM
        finally:
            process.kill()
