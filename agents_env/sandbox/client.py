"""The way into the sandbox: one keeper process for each run, and a bound on the runs at once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import json
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agents_env.sandbox.kinds import landlock_abi
from agents_env.sandbox.limits import Kind, Limits, Result, SandboxRefused

LANDLOCK_ABI_MIN = 6
"""What sandlock needs: it keeps signals and sockets inside as well. Linux 6.12."""
GRACE_S = 60.0
"""For a keeper's start and end, beside the time of its run; one that takes longer hangs."""
SYSTEM_FILES = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")


class SandboxFailed(Exception):
    """The sandbox itself broke down, whatever was run in it."""


class Sandbox:
    """Runs Python programs, each with `limits`, in a sandbox of `kind`; None: the best one that is here.

    Raises SandboxRefused when this machine has none, or no interpreter that a confined process may read.
    """

    def __init__(
        self, kind: Kind | None = None, limits: Limits | None = None, *, concurrency: int | None = None
    ) -> None:
        self.kind: Kind = choose() if kind is None else kind
        self.limits = limits or Limits()
        self.python = interpreter()
        self._slots = asyncio.Semaphore(concurrency or os.cpu_count() or 1)

    async def check(self) -> None:
        """Runs one trivial program. SandboxRefused: a bound cannot be had here; SandboxFailed: it does not work."""
        result = await self.run(["-I", "-S", "-c", "print(1)"])
        if result.stdout != b"1\n":
            raise SandboxFailed(f"{self.kind} does not run {self.python}: {result.stderr.decode(errors='replace')}")

    async def run(self, arguments: Sequence[str], stdin: bytes = b"", *, answer_bytes: int = 0) -> Result:
        """Runs `python *arguments` to its end. A cancellation ends once the run has ended. `answer_bytes`: of output
        that the caller expects, beside what the limits keep."""
        limits = replace(self.limits, output_bytes_max=self.limits.output_bytes_max + answer_bytes)
        job = {
            "kind": self.kind,
            "python": self.python,
            "arguments": list(arguments),
            "readable": readable(self.python),
            "stdin": base64.b64encode(stdin).decode(),
            "limits": asdict(limits),
        }
        async with self._slots:
            answer = await self._ask(json.dumps(job).encode() + b"\n")
        if "refused" in answer:
            raise SandboxRefused(answer["refused"], f"{answer['why']} ({self.kind})")
        return Result(
            answer["ending"],
            answer["exit_code"],
            base64.b64decode(answer["stdout"]),
            base64.b64decode(answer["stderr"]),
            answer["seconds"],
            answer["cut"],
        )

    async def _ask(self, job: bytes) -> dict[str, Any]:
        pipe = asyncio.subprocess.PIPE
        keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "agents_env.sandbox.keeper"),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C is for the caller, which closes the pipe
            limit=1 << 20,
        )
        try:
            async with asyncio.timeout(self.limits.time_s + GRACE_S):
                line, complaint = await _converse(keeper, job)
        except TimeoutError as error:
            raise SandboxFailed(f"the keeper of a run hung for {GRACE_S:g} s") from error
        finally:
            await asyncio.shield(_end(keeper))
        if not line:
            raise SandboxFailed(f"the keeper of a run died: {complaint[-500:].decode(errors='replace').strip()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _converse(keeper: asyncio.subprocess.Process, job: bytes) -> tuple[bytes, bytes]:
    """Sends the job and reads the answer; stdin stays open meanwhile, as its end means that the caller is gone."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: `line` is empty then
        keeper.stdin.write(job)
        await keeper.stdin.drain()
    return await asyncio.gather(keeper.stdout.read(), keeper.stderr.read())


async def _end(keeper: asyncio.subprocess.Process) -> None:
    assert keeper.stdin is not None
    keeper.stdin.close()
    try:
        async with asyncio.timeout(GRACE_S):
            await keeper.wait()
    except TimeoutError:
        keeper.kill()
        await keeper.wait()


def choose() -> Kind:
    """The sandbox for this machine."""
    abi = landlock_abi()
    if abi >= LANDLOCK_ABI_MIN and importlib.util.find_spec("sandlock") is not None:
        return "sandlock"
    if shutil.which("bwrap") is not None:
        return "bubblewrap"
    lacking = "the package sandlock is not installed" if abi >= LANDLOCK_ABI_MIN else f"this kernel's is {abi}"
    raise SandboxRefused(
        "sandbox",
        f"sandlock needs Landlock's interface {LANDLOCK_ABI_MIN} (Linux 6.12): {lacking}; bubblewrap needs the command "
        "bwrap: install the package bubblewrap",
    )


def interpreter() -> str:
    """A Python that a run may read: as root, which runs become another user, one that is readable for everybody."""
    own = os.path.realpath(sys.executable)
    candidates = [own, "/usr/bin/python3", "/usr/local/bin/python3"]
    for candidate in candidates:
        path = os.path.realpath(candidate)
        if os.access(path, os.X_OK) and not _below_tmp(path) and (os.geteuid() != 0 or _is_public(Path(path))):
            return path
    raise SandboxRefused(
        "files",
        f"none of {', '.join(candidates)} is a Python that another user may run; install python3, or run as a user "
        "other than root",
    )


def readable(python: str) -> list[str]:
    """What a run may read: the system's programs and libraries, and the interpreter's own."""
    prefix = str(Path(python).parents[1])
    own = [] if prefix in ("/usr", "/usr/local") else [prefix]
    return [path for path in (*SYSTEM_FILES, *own) if os.path.exists(path)]


def _is_public(path: Path) -> bool:
    folders = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    return folders and path.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH) == stat.S_IROTH | stat.S_IXOTH


def _below_tmp(path: str) -> bool:
    return path.startswith("/tmp/")  # a run has a /tmp of its own
