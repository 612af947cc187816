"""An OpenEnv server as a process of ours: started on a free port, ready when it answers, ended with the block.

Invariants:
- no process of its group is left when the block ends, however it ends; if this process is killed, the kernel kills the
  server;
- a server that ends before it is ready fails at once, with its status.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from agents_env.failures import RunFailed
from agents_env.server import programs_environment

PORT = "{port}"
READY_TIMEOUT_S = 180.0
"""OpenEnv alone takes a quarter of a minute to import."""
LOOK_S = 0.2
STOP_S = 10.0
"""Between SIGTERM and SIGKILL."""
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def served(command: str) -> Iterator[str]:
    """The URL of the server that `command` starts, as a shell would split it, with the port for `{port}`.

    RunFailed when it does not become ready. SIGTERM ends the block as SystemExit, where nobody else handles it.
    """
    words = shlex.split(command)
    if not any(PORT in word for word in words):
        raise RunFailed(
            f"--serve has no {PORT}: the server's port is chosen here, as in `uvicorn app:app --port {PORT}`"
        )
    port = _free_port()
    handler = signal.signal(signal.SIGTERM, _terminated)
    try:
        process = _started([word.replace(PORT, str(port)) for word in words])
        try:
            _await_ready(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process)
    finally:
        signal.signal(signal.SIGTERM, handler)


def _started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=programs_environment(),
            start_new_session=True,  # Ctrl-C is for this process, which ends its sessions first
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise RunFailed(f"--serve: {words[0]}: {error.strerror}") from error


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _await_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as http:
        while time.monotonic() < deadline:
            if (status := process.poll()) is not None:
                raise RunFailed(f"the server of --serve ended with status {status} before it answered")
            with contextlib.suppress(httpx.TransportError):
                if http.get("/health").is_success:
                    return
            time.sleep(LOOK_S)
    raise RunFailed(f"the server of --serve did not answer {url}/health within {READY_TIMEOUT_S:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _terminated(number: int, _: Any) -> None:
    sys.exit(128 + number)
