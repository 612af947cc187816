"""The processes of a soak and their supervisor: each is started again when it ends, as systemd or Kubernetes would.

Invariants:
- each program has one task, which starts it, waits for its end, and starts it again until `close`;
- a process that ends without a kill, after it had served, is a finding, unless what it needs was taken away
  (`excused`): then it is counted;
- children are killed by the kernel when the soak ends in whatever way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.setup_env import ROOT
from protos.process import TIED
from tests.soak import clocks

AGAIN_S = 1.0
"""From an end that nobody wanted to the next start; a failed start doubles it, up to `AGAIN_MAX_S`."""
AGAIN_MAX_S = 8.0
STOP_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Program:
    """`argv`: the whole command. `ready`: it writes `NAME.ready.json`, and takes `--ready-file`. `ends`: once it has
    ended with status 0 it is done, and not started again."""

    name: str
    kind: str
    argv: tuple[str, ...]
    ready: bool = True
    ends: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


class Supervised:
    """One program, and its present process if there is one."""

    def __init__(self, program: Program, directory: Path, note: Callable[[str, str], None]) -> None:
        self.program = program
        self.excused = 0
        """Above 0: something that it needs is taken away, so it may end by itself."""
        self.ends: Counter[str] = Counter()  # by reason: "killed", "by itself", "excused", "failed start"
        self._directory, self._note = directory, note
        self._process: asyncio.subprocess.Process | None = None
        self._started_s = 0.0
        self._away_s = 0.0
        self._killed = self._closing = False
        self.done = False
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def serves(self) -> bool:
        """Whether the present process has announced that it does; whether it runs, if it announces nothing."""
        return self.pid is not None and self._is_ready()

    @property
    def life_s(self) -> float:
        return time.monotonic() - self._started_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def ready(self, timeout_s: float = 180.0) -> dict[str, Any]:
        """What the present process announced, once it has. TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                if self._is_ready():
                    found: dict[str, Any] = json.loads(self._ready_path.read_text()) if self.program.ready else {}
                    return found
                await asyncio.sleep(POLL_S)

    def kill(self, away_s: float) -> None:
        """kill -9; it is started again after `away_s`."""
        self._away_s = away_s
        if self._signal(signal.SIGKILL):
            self._killed = True

    async def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        process = self._process
        if self._signal(signal.SIGSTOP):
            await asyncio.sleep(seconds)
            if process is self._process:  # else it was killed meanwhile, and another one runs
                self._signal(signal.SIGCONT)

    async def close(self) -> None:
        """SIGTERM, and SIGKILL when it does not end."""
        self._closing = True
        if self._task is None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self._task), STOP_S)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._task

    async def _keep(self) -> None:
        again_s = AGAIN_S
        while not self._closing:
            process = self._process = await self._spawn()
            self._started_s = time.monotonic()
            status = await process.wait()
            clocks.forget(process.pid)
            self.done = self.program.ends and status == 0
            if self._closing or self.done:
                return
            reason = self._reason()
            self.ends[reason] += 1
            again_s = min(2 * again_s, AGAIN_MAX_S) if reason == "failed start" else AGAIN_S
            if reason == "by itself":
                self._note(self.name, f"ended with {status}: {self._last_line()}")
            await asyncio.sleep(self._away_s if reason == "killed" else again_s)

    def _reason(self) -> str:
        killed, self._killed = self._killed, False
        if killed:
            return "killed"
        if self.excused:
            return "excused"
        return "by itself" if self._is_ready() else "failed start"

    def _is_ready(self) -> bool:
        return self._ready_path.exists() if self.program.ready else self._process is not None

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._ready_path.unlink(missing_ok=True)
        ready = ("--ready-file", str(self._ready_path)) if self.program.ready else ()
        with (self._directory / f"{self.name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", TIED, *self.program.argv, *ready),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.program.env},
                start_new_session=True,
            )

    def _signal(self, number: int) -> bool:
        """Whether there was a process to be signalled."""
        if self.pid is None or self._process is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
            return True
        return False

    @property
    def _ready_path(self) -> Path:
        return self._directory / f"{self.name}.ready.json"

    def _last_line(self) -> str:
        lines = (self._directory / f"{self.name}.log").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it logged nothing")[:400]
