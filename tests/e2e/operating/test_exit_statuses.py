"""docs/operations.md, "Exit statuses": each row of its table is provoked, and each command gives its version."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tests.support.words import tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
NOBODY = "127.0.0.1:9"
MODULES = {"paramserver": "paramserver", "gateway": "gateway", "agents-env": "agents_env"}


async def start(command: str, *words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULES[command], *words, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )


async def ended(command: str, *words: str) -> int:
    """The status of a command that ends by itself, as a shell counts it; an error is not a traceback."""
    return await status_of(await start(command, *words))


async def status_of(process: asyncio.subprocess.Process) -> int:
    output, _ = await asyncio.wait_for(process.communicate(), 180)
    assert b"Traceback" not in output, output.decode()
    assert process.returncode is not None
    return 128 - process.returncode if process.returncode < 0 else process.returncode


async def stopped(directory: Path, command: str, *words: str, by: Sequence[signal.Signals], sign: str) -> int:
    """The status of one that is sent signals once the file `sign` is there."""
    process = await start(command, *words)
    async with asyncio.timeout(180):
        while not (directory / sign).exists():
            assert process.returncode is None, await process.communicate()
            await asyncio.sleep(0.02)
    for number in by:
        process.send_signal(number)
    return await status_of(process)


def told(directory: Path) -> str:
    """A program that says that it runs, and then waits: `vf-eval`, or an environment's server."""
    program = directory / "program"
    program.write_text(f"#!/bin/sh\ntouch {directory}/runs\nexec sleep 600\n")
    program.chmod(0o755)
    return str(program)


def etcd(directory: Path) -> Awaitable[int]:
    """The daemon of `paramserver` that needs no other; a relay's own end is tested where relays are."""
    ready = f"--ready-file={directory}/ready"
    return stopped(directory, "paramserver", "etcd", ready, by=[signal.SIGTERM], sign="ready")


def gateway(directory: Path, by: signal.Signals) -> Awaitable[int]:
    options = ["--model=policy", f"--tokenizer={tokenizer(directory / 'model')}", "--port=0"]
    ready = f"--ready-file={directory}/ready"
    return stopped(directory, "gateway", "serve", *options, ready, by=[by], sign="ready")


def verifiers(directory: Path) -> Awaitable[int]:
    words = ["verifiers", "env", f"--gateway=http://{NOBODY}", f"--vf-eval={told(directory)}", f"--out={directory}/out"]
    return stopped(directory, "agents-env", *words, by=[signal.SIGTERM], sign="runs")


def openenv(directory: Path) -> Awaitable[int]:
    words = ["run", "openenv", f"--gateway=http://{NOBODY}", "--serve", f"{told(directory)} {{port}}"]
    return stopped(directory, "agents-env", *words, by=[signal.SIGTERM], sign="runs")


PROVOKED: dict[tuple[str, str], Callable[[Path], Awaitable[int]]] = {
    ("paramserver", "0"): etcd,
    ("paramserver", "1"): lambda _: ended("paramserver", "status", "--relay", NOBODY),
    ("paramserver", "2"): lambda _: ended("paramserver", "serve", "--pool-bytes", "much"),
    ("gateway", "0"): lambda directory: gateway(directory, signal.SIGTERM),
    ("gateway", "1"): lambda directory: ended("gateway", "backup", f"--data={directory}", f"{directory}/out"),
    ("gateway", "2"): lambda _: ended("gateway", "serve", "--no-such-option"),
    ("agents-env", "0"): lambda _: ended("agents-env", "list"),
    ("agents-env", "1"): lambda _: ended(
        "agents-env", "run", "tool-chain", f"--gateway=http://{NOBODY}", "--patience-s=0"
    ),
    ("agents-env", "2"): lambda _: ended("agents-env", "run", "chess"),
    ("agents-env verifiers", "130"): verifiers,
    ("agents-env run openenv --serve", "143"): openenv,
    ("each", "137"): lambda directory: gateway(directory, signal.SIGKILL),
}


def documented() -> set[tuple[str, str]]:
    section = (ROOT / "docs/operations.md").read_text().partition("## Exit statuses")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| ", section, re.MULTILINE)
    found = {(command.strip("`"), status) for command, status in rows if command not in ("command", "---")}
    return {(command, "137" if status == "128 + n" else status) for command, status in found}


def test_each_row_of_the_table_is_provoked() -> None:
    assert documented() == set(PROVOKED)


@pytest.mark.parametrize(("command", "status"), PROVOKED)
async def test_a_command_ends_with_the_status_of_the_table(command: str, status: str, tmp_path: Path) -> None:
    assert await PROVOKED[command, status](tmp_path) == int(status)


async def test_each_command_gives_the_version_of_the_distribution() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for command in MODULES:
        process = await start(command, "--version")
        output, _ = await process.communicate()
        assert (process.returncode, output.decode()) == (0, f"{command}, version {version}\n")


async def test_a_variable_that_means_something_else_is_no_request_for_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARAMSERVER_VERSION", "1")
    assert await ended("paramserver", "status", "--relay", NOBODY) == 1
