"""Programs as environments: `agents-env exec` runs a command for each sample, as a session of its own.

Invariants:
- a run has a process group of its own, and no process of it is left when the run has ended, timed out or was stopped:
  neither of the group, nor one that left it (`setsid`), which is found by the run's own variable in its environment.
  Only a process that replaced its environment as well, or that is another user's, stays;
- SIGTERM and Ctrl-C reach the group; it gets `GRACE_S` before SIGKILL;
- the reward comes from one place: the exit status, a file, or a scoring command. A program that a signal ended, and a
  reward that is no number, are failures and no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import IO, Any

from agents_env.environment import Access, Chat, Outcome
from agents_env.environments import task_files
from agents_env.failures import RolloutFailed
from agents_env.runner.phases import phase
from agents_env.server import programs_environment

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL of a run."""
SCORE_BYTES_MAX = 1 << 20
"""Of a scoring command's output."""

TASK_FILE = "AGENTS_ENV_TASK_FILE"
"""The variable whose value no other run has: its folder is made for the run."""
STRAY_ROUNDS = 10
"""A stray may fork between being found and being killed; one that forks for ever is not chased for ever."""


@dataclass(frozen=True, slots=True)
class ProgramTask:
    task_id: str
    data: Mapping[str, Any] = field(default_factory=dict)


def read_tasks(path: Path | None) -> Sequence[ProgramTask]:
    """The tasks of a file with a JSON object on each line, named by their `id`, else by their number. Without a file:
    one task without content. Raises BadTaskFile."""
    return [ProgramTask("program")] if path is None else task_files.read_tasks(path, "", ProgramTask)


class Programs:
    """The environment of one command. `score`: a command, as a shell would split it."""

    name = "exec"

    def __init__(
        self,
        command: Sequence[str],
        tasks: Sequence[ProgramTask],
        *,
        reward_file: bool = False,
        score: str | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self._command, self.own_tasks = list(command), tasks
        self._reward_file, self._log_dir = reward_file, log_dir
        self._score = None if score is None else shlex.split(score)
        self._running: set[int] = set()  # process groups
        self._signalled: set[int] = set()  # those of them that got a signal of ours, and have their grace

    def tasks(self, seed: int) -> Iterator[ProgramTask]:
        return cycle(self.own_tasks)

    def task_of(self, task_id: str, data: Mapping[str, Any]) -> ProgramTask:
        return ProgramTask(task_id, data)

    def data_of(self, task: ProgramTask) -> Mapping[str, Any]:
        return task.data

    async def rollout(self, task: ProgramTask, client: Chat) -> Outcome:
        raise NotImplementedError("programs make their model calls themselves: see `play`")

    async def play(self, task: ProgramTask, access: Access) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="agents-env-") as scratch:
            folder = Path(scratch)
            variables = _variables(task, access, folder)
            began = asyncio.get_running_loop().time()
            with phase("tool"), self._output(access.session_id) as output:
                status = await self._run(self._command, variables, output)
                if status < 0:
                    raise RolloutFailed("environment", "signal", f"the program ended by {signal.Signals(-status).name}")
            seconds = asyncio.get_running_loop().time() - began
            with phase("score"):
                reward = await self._reward(status, variables, folder)
        return Outcome(reward, metrics={"exit_status": status, "seconds": seconds})

    def forward(self, number: signal.Signals) -> None:
        """Sends a signal to every run."""
        for group in self._running:
            _signal(group, number)
        self._signalled |= self._running

    async def _reward(self, status: int, variables: Mapping[str, str], folder: Path) -> float:
        if self._reward_file:
            path = folder / "reward"
            if not path.exists():
                raise RolloutFailed("environment", "reward", "the program wrote no $AGENTS_ENV_REWARD_FILE")
            return _number(path.read_text(errors="replace"), "$AGENTS_ENV_REWARD_FILE")
        if self._score is None:
            return float(status == 0)
        with tempfile.TemporaryFile() as output:
            scored = await self._run(self._score, {**variables, "AGENTS_ENV_EXIT_STATUS": str(status)}, output)
            output.seek(0)
            lines = output.read(SCORE_BYTES_MAX).decode(errors="replace").split("\n")
        if scored != 0:
            raise RolloutFailed("environment", "score", f"the scoring command ended with status {scored}")
        printed = [line for line in lines if line.strip()]
        return _number(printed[-1] if printed else "", "the scoring command's last line")

    async def _run(self, command: Sequence[str], variables: Mapping[str, str], output: IO[bytes] | None) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**programs_environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None and command is self._command else None,
                start_new_session=True,
            )
        except OSError as error:
            raise RolloutFailed("environment", type(error).__name__, f"{command[0]}: {error.strerror}") from error
        async with self._group(process, variables[TASK_FILE]):
            return await process.wait()

    @contextlib.asynccontextmanager
    async def _group(self, process: asyncio.subprocess.Process, task_file: str) -> AsyncIterator[None]:
        """Ends the group in any case; while it is asked to end, and does, it is given time for it."""
        group = process.pid
        self._running.add(group)
        try:
            yield
        except asyncio.CancelledError:
            if group not in self._signalled:  # else it ends as that signal says, such as Ctrl-C
                _signal(group, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE_S)
            raise
        finally:
            _signal(group, signal.SIGKILL)
            self._running.discard(group)
            self._signalled.discard(group)
            await process.wait()
            _kill_strays(task_file)

    @contextlib.contextmanager
    def _output(self, session_id: str) -> Iterator[IO[bytes] | None]:
        """None: this process's own output."""
        if self._log_dir is None:
            yield None
            return
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with (self._log_dir / f"{session_id}.log").open("wb") as file:
            yield file


def _variables(task: ProgramTask, access: Access, folder: Path) -> dict[str, str]:
    (folder / "task.json").write_text(json.dumps(task.data))
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),  # its clients add /v1/messages
        "ANTHROPIC_API_KEY": access.api_key,
        "AGENTS_ENV_MODEL": access.model,
        "AGENTS_ENV_SESSION_ID": access.session_id,
        "AGENTS_ENV_SAMPLE_INDEX": str(access.sample_index),
        TASK_FILE: str(folder / "task.json"),
        "AGENTS_ENV_REWARD_FILE": str(folder / "reward"),
    }


def _number(text: str, where: str) -> float:
    try:
        value = float(text.strip())
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RolloutFailed("environment", "reward", f"{where} has no number: {text.strip()[:80]!r}")
    return value


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(group, number)


def _kill_strays(task_file: str) -> None:
    """Kills the processes that left the group of a run, and have its variable (Linux)."""
    mark = f"{TASK_FILE}={task_file}".encode()
    for _ in range(STRAY_ROUNDS):
        found = [pid for pid in _pids() if mark in _environment(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """Empty for a process that has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
