"""The quick start runs as it stands: its commands, trainer and environment; with a smaller model and free ports.

Its gateway is killed while turns run and the trainer waits, and started again after ten seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support import processes
from tests.support.fleet import until
from tests.support.pages import blocks
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PORTS = ("7070", "8000", "8080")
PAGE = "docs/quick-start.md"
INSTEAD = {
    "$(python -m deploy.demo.model)": str(tiny_model()),
    "--pool-bytes 3GiB": "--pool-bytes 64MiB --pool-dir $POOLS/relay",
    "gateway status": "gateway status --url http://localhost:8080",
    "gateway engine": f"touch hold\n{sys.executable} -m tests.support.held_engine hold",
    "gateway status --url http://localhost:8080 --wait-s": "echo $! > gateway.pid\n{}",
    "environment.log 2>&1 &": "environment.log 2>&1 &\nENVIRONMENT=$!",
    "python trainer.py $MODEL 3\n": "python trainer.py $MODEL 3\nwait $ENVIRONMENT\n",
    "kill $(jobs -p)": "kill $(jobs -rp)",
}
"""`{}`: what was there. The engine holds its turns in their middle until the gateway was killed."""
AWAY_S = 10.0


@pytest.fixture
def pools() -> Iterator[Path]:
    """A directory in memory, for the relay's pool and what lies beside it."""
    path = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def ports() -> Iterator[KeptPorts]:
    """Of the test's own, for README's fixed ones."""
    with KeptPorts() as found:
        yield found


def run_shell(script: str, directory: Path, pools: Path) -> str:
    """What it printed; whatever it left running is killed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "POOLS": str(pools)}
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            printed, _ = shell.communicate(timeout=500)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    return printed


def kill_and_start(url: str, command: list[str], directory: Path) -> Daemon:
    """Kills the gateway once turns run in it and the trainer has asked it for a batch; the gateway that follows it."""

    def in_the_middle() -> bool:
        try:
            status = httpx.get(f"{url}/status", timeout=60).json()
        except httpx.TransportError:
            return False
        return bool(status["sessions"]["running_turns"]) and status["admission"]["reader"] is not None

    until(in_the_middle, "turns that run, and a trainer that waits", timeout_s=300.0)
    os.kill(int((directory / "gateway.pid").read_text()), signal.SIGKILL)
    (directory / "hold").unlink()
    time.sleep(AWAY_S)
    return processes.start("restarted", command, directory)


def test_its_programs_are_short_enough_to_copy() -> None:
    trainer, environment = blocks(PAGE, "python")
    assert len(trainer.splitlines()) <= 45
    assert len(environment.splitlines()) <= 34


def test_its_commands_run_together_and_train(tmp_path: Path, pools: Path, ports: KeptPorts) -> None:
    def with_ports(text: str) -> str:
        return re.sub("|".join(PORTS), lambda match: str(ports.of(match[0])), text)

    for program in blocks(PAGE, "python"):
        name = re.match(r'"""(\w+\.py) ', program)
        assert name is not None
        (tmp_path / name[1]).write_text(with_ports(program))
    start, run = blocks(PAGE, "sh")
    setup, _, start = start.partition("\n")
    assert setup == "make env && . .venv/bin/activate"
    script = f"set -eux\n{start}{run}wait\n"
    for text, instead in INSTEAD.items():
        assert text in script
        script = script.replace(text, instead.replace("{}", text))
    script = with_ports(script)
    serve = re.search(r"^(gateway serve .*?) > gateway.log", script.replace("\\\n", ""), re.MULTILINE)
    assert serve is not None
    command = shlex.split(serve[1].replace("$MODEL", str(tiny_model())).replace("./", f"{tmp_path}/"))
    url = f"http://localhost:{ports.of('8080')}"
    with ThreadPoolExecutor(1) as thread:
        restarting = thread.submit(kill_and_start, url, command, tmp_path)
        printed = run_shell(script, tmp_path, pools)
        gateway = restarting.result()
    left = httpx.get(f"{url}/experience/statistics", timeout=60).json()["buffer"]
    assert gateway.stop() == 0
    logs = "".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(tmp_path.glob("*.log")))
    steps = re.findall(r"^step (\d): .* published version (\d)$", printed, re.MULTILINE)
    assert steps == [("0", "1"), ("1", "2"), ("2", "3")], printed + logs
    assert "newest version 3, the trainer's" in printed, "the second look at the gateway"
    assert (left["trajectories"], left["leased"]) == (8, 0), "of 32 rollouts 24 were trained on, each once"
    assert "gateway: closed" in gateway.log()
    assert "Traceback" not in logs
