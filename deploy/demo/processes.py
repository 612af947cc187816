"""Real child processes with an owner: started, awaited until ready, watched, killed on purpose, ended in order.

Invariants:
- every child is reaped, and its exit status kept, before the supervisor closes;
- a child that ends without a request, and was not due to end by itself, is a failure that `failure()` reports;
- children live in sessions of their own: Ctrl-C at the terminal reaches only the supervisor, which ends them in order;
- a supervisor that is killed takes its children with it (Linux: parent-death signal).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from protos.process import TIED

READY_POLL_S = 0.03
LOG_TAIL_CHARS = 1500

Ending = Literal["running", "by itself", "on request", "killed on purpose", "unexpected", "killed: ignored SIGTERM"]


class DemoError(Exception):
    """The demo cannot continue; the message is for the person who started it."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process to run: `python <argv> [--ready-file F]`."""

    name: str
    argv: tuple[str, ...]
    ready_timeout_s: float | None = 90.0  # None: it writes no ready file
    ends_by_itself: bool = False
    niceness: int = 0  # from when it is ready: its start has the usual priority


@dataclass(frozen=True, slots=True)
class Exit:
    """How one process ended."""

    name: str
    pid: int
    status: int
    ending: Ending
    lived_s: float

    @property
    def clean(self) -> bool:
        return self.status == 0 or self.ending == "killed on purpose"

    def __str__(self) -> str:
        text = f"{self.name} (pid {self.pid}) ended with status {self.status} ({self.ending})"
        if self.status == -signal.SIGKILL and self.ending == "by itself":
            return f"{text}: killed from outside; the kernel does that when memory runs out (see dmesg)"
        return text


@dataclass
class Child:
    """A running process. `ready` holds what its ready file announced."""

    command: Command
    process: asyncio.subprocess.Process
    log_path: Path
    started_s: float
    ready: dict[str, Any] = field(default_factory=dict)
    ending: Ending = "running"
    watcher: asyncio.Task[Exit] | None = None

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()

    def signal(self, number: int, ending: Ending) -> None:
        """Signals the process and records the reason of its end; does nothing when it has ended already."""
        if not self.alive:
            return
        self.ending = ending
        with suppress(ProcessLookupError):  # it ended between the check and the signal
            self.process.send_signal(number)


class Supervisor:
    """Owner of child processes, by name. A name can be started again once its process has ended."""

    def __init__(self, directory: Path, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self._cwd = cwd
        self._env = {**os.environ, **(env or {})}
        self._children: dict[str, Child] = {}
        self._exits: list[Exit] = []
        self._failure: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills all children that still run, on every way out."""
        for child in self._children.values():
            child.signal(signal.SIGKILL, "killed: ignored SIGTERM")
        await asyncio.gather(*(child.watcher for child in self._children.values() if child.watcher is not None))
        self._failure.cancel()

    @property
    def exits(self) -> Sequence[Exit]:
        return tuple(self._exits)

    def child(self, name: str) -> Child:
        return self._children[name]

    async def start(self, command: Command) -> Child:
        """Runs `command` and waits for its ready file. DemoError names the problem and shows the end of its log."""
        previous = self._children.get(command.name)
        assert previous is None or not previous.alive, f"{command.name} is running already"
        ready_path = self._directory / f"{command.name}.ready.json"
        ready_path.unlink(missing_ok=True)
        child = await self._spawn(command, ready_path)
        if command.ready_timeout_s is not None:
            await self._until_ready(child, ready_path, command.ready_timeout_s)
        if command.niceness and child.alive:
            _be_nice(child.process.pid, command.niceness)
        return child

    async def start_all(self, commands: Iterable[Command]) -> dict[str, dict[str, Any]]:
        """Runs them at once; what their ready files announced, by name."""
        starts = [asyncio.create_task(self.start(command)) for command in commands]
        try:
            return {child.name: child.ready for child in await asyncio.gather(*starts)}
        finally:
            for start in starts:
                start.cancel()

    async def failure(self) -> Exit:
        """The first process that ended unexpectedly."""
        return await asyncio.shield(self._failure)

    async def wait(self, name: str) -> Exit:
        watcher = self._children[name].watcher
        assert watcher is not None
        return await asyncio.shield(watcher)

    async def kill(self, name: str) -> Exit:
        """kill -9, on purpose."""
        self._children[name].signal(signal.SIGKILL, "killed on purpose")
        return await self.wait(name)

    async def stop(self, name: str, timeout_s: float) -> Exit | None:
        """SIGTERM, then SIGKILL after `timeout_s`. None when there is no such process."""
        child = self._children.get(name)
        if child is None:
            return None
        child.signal(signal.SIGTERM, "on request")
        try:
            return await asyncio.wait_for(self.wait(name), timeout_s)
        except TimeoutError:
            child.signal(signal.SIGKILL, "killed: ignored SIGTERM")
            return await self.wait(name)

    async def stop_all(self, names: Iterable[str], timeout_s: float) -> None:
        """Stops them side by side; names that never started are passed over."""
        await asyncio.gather(*(self.stop(name, timeout_s) for name in names))

    async def _spawn(self, command: Command, ready_path: Path) -> Child:
        ready = () if command.ready_timeout_s is None else ("--ready-file", str(ready_path))
        log_path = self._directory / f"{command.name}.log"
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", TIED),
                *(sys.executable, *command.argv),
                *ready,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                env=self._env,
                start_new_session=True,
            )
        child = Child(command, process, log_path, time.monotonic())
        child.watcher = asyncio.create_task(self._reap(child), name=f"reap {command.name}")
        self._children[command.name] = child
        return child

    async def _reap(self, child: Child) -> Exit:
        status = await child.process.wait()
        if child.ending == "running":
            child.ending = "by itself" if child.command.ends_by_itself else "unexpected"
        done = Exit(child.name, child.process.pid, status, child.ending, time.monotonic() - child.started_s)
        self._exits.append(done)
        failed = done.ending == "unexpected" or (done.ending == "by itself" and status != 0)
        if failed and not self._failure.done():
            self._failure.set_result(done)
        return done

    async def _until_ready(self, child: Child, ready_path: Path, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (ready := _read_json(ready_path)) is None:
            log = f"The end of its log ({child.log_path}):\n{child.log_tail()}"
            if not child.alive:
                raise DemoError(f"{child.name} ended with {child.process.returncode} before it was ready. {log}")
            if time.monotonic() > deadline:
                raise DemoError(f"{child.name} was not ready after {timeout_s:.0f} s. {log}")
            await asyncio.sleep(READY_POLL_S)
        child.ready = ready


def _be_nice(pid: int, niceness: int) -> None:
    """Lowers the priority of a process, all threads of it: to Linux they are tasks of their own."""
    tasks = Path(f"/proc/{pid}/task")
    for task in [int(entry.name) for entry in tasks.iterdir()] if tasks.is_dir() else [pid]:
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.setpriority(os.PRIO_PROCESS, task, niceness)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    ready: dict[str, Any] = json.loads(path.read_text())
    return ready
