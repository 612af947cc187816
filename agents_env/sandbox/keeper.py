"""The process that keeps one run: reads the job, starts the sandbox, watches it, ends everything, writes the result.

Invariants:
- nothing starts before the whole job has been read, and the job comes through the pipe that its caller holds: when
  the caller dies, at any moment, that pipe ends, and the keeper ends the run;
- every process of the run is a descendant of this process, and orphans become its children, so that none is left
  when it exits.

`python -P -m agents_env.sandbox.keeper`, with a line of JSON on stdin; the result is a line of JSON on stdout.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from agents_env.sandbox import stage
from agents_env.sandbox.kinds import Command, Started, starter
from agents_env.sandbox.limits import Ending, Limits, SandboxRefused

READ_BYTES = 64 << 10


class CallerGone(Exception):
    """The caller has died or given up: nobody waits for the result."""


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    job = _read_job()
    if job is None:
        return
    stage.adopt_orphans()
    try:
        answer = _keep(job)
    except SandboxRefused as refused:
        answer = {"refused": refused.bound, "why": refused.why}
    except CallerGone:
        return
    finally:
        end_descendants()
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _stop(_: int, __: FrameType | None) -> NoReturn:
    raise CallerGone


def _read_job() -> dict[str, Any] | None:
    """The job; None when the caller has gone before it was written whole."""
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _keep(job: dict[str, Any]) -> dict[str, Any]:
    limits = Limits(**job["limits"])
    start = starter(job["kind"])
    stage.enter(limits)
    began = time.monotonic()
    process = start(Command(job["python"], job["arguments"], job["readable"]), limits)
    watch = _Watch(process, base64.b64decode(job["stdin"]), limits)
    try:
        ending = watch.until_end(began + limits.time_s)
    finally:
        process.kill()
        code = process.wait()
    if ending == "exited" and code is None:
        ending = "killed"
    return {
        "ending": ending,
        "exit_code": code if ending == "exited" else None,
        "stdout": watch.output(process.stdout),
        "stderr": watch.output(process.stderr),
        "seconds": time.monotonic() - began,
        "cut": watch.cut,
    }


class _Watch:
    """Feeds a process, reads its output, and sees its end, its deadline, and the caller's death."""

    def __init__(self, process: Started, stdin: bytes, limits: Limits) -> None:
        self._process = process
        self._left = memoryview(stdin)
        self._limits = limits
        self.cut = False
        """Output was dropped."""
        self._kept = {stream.fileno(): bytearray() for stream in (process.stdout, process.stderr)}
        self._ended = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        for descriptor in (self._ended, sys.stdin.fileno(), *self._kept):
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._selector.register(process.stdin, selectors.EVENT_WRITE)
        for descriptor in (process.stdin.fileno(), *self._kept):
            os.set_blocking(descriptor, False)

    def output(self, stream: IO[bytes]) -> str:
        return base64.b64encode(self._kept[stream.fileno()]).decode()

    def until_end(self, deadline: float) -> Ending:
        while (left_s := deadline - time.monotonic()) > 0:
            ready = {key.fd for key, _ in self._selector.select(left_s)}
            if sys.stdin.fileno() in ready:
                raise CallerGone  # nothing follows the job but the end of the pipe
            if self._ended in ready:
                for descriptor in self._kept:
                    while self._read(descriptor):
                        pass
                return "exited"
            for descriptor in ready & set(self._kept):
                self._read(descriptor)
            if not self._process.stdin.closed and self._process.stdin.fileno() in ready:
                self._feed()
        return "timeout"

    def _read(self, descriptor: int) -> bool:
        """Takes some of what is there; returns whether there was any."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        kept = self._kept[descriptor]
        room = self._limits.output_bytes_max - len(kept)
        kept += data[:room]
        self.cut |= len(data) > room
        return bool(data)

    def _feed(self) -> None:
        stream = self._process.stdin
        try:
            self._left = self._left[os.write(stream.fileno(), self._left[:READ_BYTES]) :]
        except BrokenPipeError:
            self._left = self._left[:0]  # it does not read its input, which is its own affair
        if not self._left:
            self._selector.unregister(stream)
            stream.close()


def end_descendants() -> None:
    """Kills and reaps until there is no child: the orphans of one that was killed become children, and are next."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    own = str(os.getpid()).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            if fields[1] == own:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
