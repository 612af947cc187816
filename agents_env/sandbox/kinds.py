"""The kept sandboxes behind one seam: `start` runs a command confined and returns its process.

A `Started` process has pipes for its three streams. `kill` ends what the sandbox knows of; the keeper ends the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from agents_env.sandbox import syscalls
from agents_env.sandbox.limits import Kind, Limits, SandboxRefused

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

_LAUNCHER = """
import os, resource, sys
memory, processes = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Sets the limits that have to be set inside: the kernel counts processes for each user in each user namespace."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: the program is Python, whose files and those of `readable` are all that can be read."""

    python: str
    arguments: Sequence[str]
    readable: Sequence[str]


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    kill: Callable[[], None]
    wait: Callable[[], int | None]
    """Reaps the process, which has ended; its exit code, None after a signal."""


Starter = Callable[[Command, Limits], Started]


def starter(kind: Kind) -> Starter:
    """The function that starts `kind`, with everything imported that it needs: later the files may be out of reach."""
    if kind == "sandlock":
        import sandlock

        return lambda command, limits: _start_sandlock(sandlock, command, limits)
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxRefused("sandbox", "there is no bwrap in PATH: install the package bubblewrap")
    if not syscalls.has_filter():
        raise SandboxRefused("sandbox", f"the numbers of system calls of {os.uname().machine} are not known")
    return lambda command, limits: _start_bubblewrap(bwrap, command, limits)


def _start_sandlock(sandlock: Any, command: Command, limits: Limits) -> Started:
    box = sandlock.Sandbox(
        fs_readable=[*command.readable, *DEVICES],
        fs_writable=["/dev/null", *(["/tmp"] if limits.disk_bytes else [])],
        max_memory=limits.memory_bytes,
        max_processes=limits.processes_max,
        no_coredump=True,
        clean_env=True,
        env=dict(ENVIRONMENT),
        cwd="/tmp" if limits.disk_bytes else "/",
        extra_deny_syscalls=syscalls.denied_by_sandlock(),
    )
    pipe = sandlock.StdioMode.PIPED
    process = box.popen([command.python, *command.arguments], stdin=pipe, stdout=pipe, stderr=pipe)

    def wait() -> int | None:
        result = process.wait()
        return result.exit_code if result.reason == sandlock.ExitReason.EXITED else None

    return Started(process.pid, process.stdin, process.stdout, process.stderr, process.kill, wait)


def _start_bubblewrap(bwrap: str, command: Command, limits: Limits) -> Started:
    launch = ["-I", "-S", "-c", _LAUNCHER, str(limits.memory_bytes), str(limits.processes_max + 1)]  # bwrap's own init
    with _seccomp_filter() as descriptor:
        process = subprocess.Popen(
            [
                bwrap,
                *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
                *("--unshare-cgroup-try", "--disable-userns", "--die-with-parent", "--new-session"),
                *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--seccomp", str(descriptor)),
                *_environment(ENVIRONMENT),
                *_files(command.readable, limits),
                *(command.python, *launch, command.python, *command.arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={},
            bufsize=0,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    def wait() -> int | None:
        code = process.wait()
        return code if 0 <= code < 128 else None  # bwrap reports 128 + the signal

    return Started(process.pid, process.stdin, process.stdout, process.stderr, process.kill, wait)


def _environment(variables: Mapping[str, str]) -> list[str]:
    return ["--clearenv", *(word for name, value in variables.items() for word in ("--setenv", name, value))]


def _files(readable: Sequence[str], limits: Limits) -> list[str]:
    """The file system: what is readable, /proc, /dev, and /tmp, which alone is writable. The order is bwrap's."""
    words = ["--proc", "/proc", "--dev", "/dev"]
    for path in readable:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind", path, path]
    words += ["--bind", "/tmp", "/tmp", "--chdir", "/tmp"] if limits.disk_bytes else ["--dir", "/tmp", "--chdir", "/"]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]  # else a tmpfs without a bound


@contextlib.contextmanager
def _seccomp_filter() -> Iterator[int]:
    descriptor, writing = os.pipe()
    os.write(writing, syscalls.compile_filter())  # less than a pipe holds
    os.close(writing)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def landlock_abi() -> int:
    """The version of Landlock's interface in the running kernel; 0 where there is none (landlock_create_ruleset(2))."""
    import ctypes

    if sys.platform != "linux":
        return 0
    version: int = ctypes.CDLL(None, use_errno=True).syscall(444, None, ctypes.c_size_t(0), 1)
    return max(version, 0)
