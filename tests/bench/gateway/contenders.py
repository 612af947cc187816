"""The routers under comparison, each a process tree of its own in front of the same mock engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.bench.environment import Environment, peers
from tests.bench.gateway.mock_engine import MODEL
from tests.bench.needs import packages
from tests.support.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
START_TIMEOUT_S = 60.0
ROUTERS = ("sglang-router", "vllm-router")


class ContenderFailed(Exception):
    """It did not come up, or answered with an error; the message says which."""


@dataclass(slots=True)
class Contender:
    """A running router. `cpu_s` is the processor time of all its processes and threads since they began."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    _members: list[psutil.Process] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Through each process's own clock: nanoseconds, where `/proc/PID/stat` counts in ticks of 10 ms."""
        if not self._members:
            here = psutil.Process(self.process.pid)
            self._members = [here, *here.children(recursive=True)]
        return sum(time.clock_gettime((~member.pid << 3) | 2) for member in self._members)

    def kill(self) -> None:
        """kill -9."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Safe after `kill`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def environment() -> Environment:
    return peers(HERE / "peers" / "requirements.txt")


def lacking() -> list[str]:
    """The Rust routers, and what httpx's twin is made of."""
    return packages(environment(), *ROUTERS, "httpx", "uvicorn", "uvloop", "httptools")


@contextlib.contextmanager
def mock_engines(num: int, *, rate: float, cache_tokens: int = 0) -> Iterator[list[str]]:
    """Addresses of `num` mock engines that share a process."""
    arguments = ["--engines", str(num), "--rate", str(rate)]
    if cache_tokens:
        arguments += ["--cache-tokens", str(cache_tokens), "--tokenizer", str(tiny_model())]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.gateway.mock_engine", *arguments],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def contenders(
    names: Sequence[str],
    engines: Sequence[str],
    *,
    gateway: Sequence[str] = (),
    each: Mapping[str, Sequence[str]] = MappingProxyType({}),
    policy: str = "round_robin",
) -> Iterator[dict[str, Contender]]:
    """Those named, up and answering; `gateway` adds options to this project's own, `each` to those of one name."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-bench-")))
        found = {}
        for name in names:
            found[name] = start(name, engines, directory, [*gateway, *each.get(name, ())], policy)
            stack.callback(found[name].close)
        yield found


def start(name: str, engines: Sequence[str], directory: Path, gateway: Sequence[str], policy: str) -> Contender:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    log = directory / f"{name}.log"
    command = _command(name, engines, port, directory, gateway, policy)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    contender = Contender(name, url, process, log)
    try:
        _wait_until_it_answers(contender)
    except BaseException:
        contender.close()
        raise
    return contender


def _command(
    name: str, engines: Sequence[str], port: int, directory: Path, gateway: Sequence[str], policy: str
) -> list[str]:
    if name.startswith("laminar"):
        return [*_ours(engines, port, directory / f"{name}.data"), *gateway]
    binaries = environment().python.parent
    if name == "httpx":
        script = [str(binaries / "python"), str(HERE / "peers" / "httpx_style.py")]
        return [*script, "--port", str(port), *engines]
    options = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", "warn"]
    if name == "sglang":
        metrics = ["--prometheus-port", str(_free_port())]
        return [str(binaries / "sglang-router"), "launch", *options, *metrics, "--worker-urls", *engines]
    options[-1] = "warning"
    unlimited = ["--max-concurrent-requests", "65536", "--queue-size", "65536"]
    metrics = ["--prometheus-port", str(_free_port())]
    return [str(binaries / "vllm-router"), *options, *unlimited, *metrics, "--worker-urls", *engines]


def _ours(engines: Sequence[str], port: int, data: Path) -> list[str]:
    named = [word for at, url in enumerate(engines) for word in ("--engine", f"e{at}=vllm={url}")]
    limits = ["--max-running", "4096", "--intake-batch", "1000000", "--queue-max", "65536", "--log-level", "warning"]
    where = ["--port", str(port), "--data", str(data), "--tokenizer", str(tiny_model())]
    return [sys.executable, "-m", "gateway", "serve", "--model", MODEL, *named, *limits, *where]


def _wait_until_it_answers(contender: Contender) -> None:
    """Until it passes a request on to an engine: before that a router may listen, and know no engine."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    request = urllib.request.Request(
        contender.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline, said = time.monotonic() + START_TIMEOUT_S, ""
    while time.monotonic() < deadline and contender.process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as e:
            said = str(e)
        time.sleep(0.2)
    tail = contender.log.read_text(errors="replace")[-1500:]
    raise ContenderFailed(f"{contender.name} does not answer ({said}): {tail}")


def _free_port() -> int:
    """For routers that cannot tell which port they took; nobody else asks for one between this and their bind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
