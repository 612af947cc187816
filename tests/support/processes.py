"""Real child processes for tests: started with `--ready-file`, awaited by it, always reaped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Daemon:
    """One child process; `ready` holds the addresses it announced."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    ready: dict[str, Any] = field(default_factory=dict)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9 and reap."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 180.0) -> int:
        """SIGTERM, wait, and return the exit status; SIGKILL and fail when it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} ignored SIGTERM for {timeout_s} s:\n{self.log()[-4000:]}") from None


def start(
    name: str,
    command: list[str],
    directory: Path,
    *,
    timeout_s: float = 180.0,
    env: dict[str, str] | None = None,
    wait_ready: bool = True,
    prefix: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
) -> Daemon:
    """Runs `python -m <command...> --ready-file ...` and waits until the ready file appears.

    `prefix` goes before the whole command, as a host's of `tests.support.links` does. `python`: of another release, as
    `tests.support.releases` has it.
    """
    ready_path = directory / f"{name}.ready.json"
    ready_path.unlink(missing_ok=True)
    log_path = directory / f"{name}.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*prefix, *python, "-m", *command, "--ready-file", str(ready_path)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
    daemon = Daemon(name, process, log_path)
    if wait_ready:
        await_ready(daemon, directory, timeout_s=timeout_s)
    return daemon


def await_ready(daemon: Daemon, directory: Path, *, timeout_s: float = 180.0) -> None:
    """Waits for the ready file of a daemon that was started in `directory`; kills one that does not write it."""
    ready_path = directory / f"{daemon.name}.ready.json"
    deadline = time.monotonic() + timeout_s
    while not ready_path.exists():
        if daemon.process.poll() is not None:
            ended = daemon.process.returncode
            raise AssertionError(f"{daemon.name} ended with {ended} before ready:\n{daemon.log()[-4000:]}")
        if time.monotonic() > deadline:
            daemon.kill()
            raise AssertionError(f"{daemon.name} not ready after {timeout_s} s:\n{daemon.log()[-4000:]}")
        time.sleep(0.02)
    daemon.ready = json.loads(ready_path.read_text())
