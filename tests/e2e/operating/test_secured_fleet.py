"""docs/secured-fleet.md, typed as it stands: from the wheel, in an empty directory, environment and HOME.

pip resolves and installs the dependencies as a user's does, in versions of `requirements.lock`. Ports, and where the
relays keep their memory, are the test's own. It is typed twice where the machine's own Python is another release than
this one: a release may differ in what connections and event loops do. `make test-fleet` runs it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.setup_env import LOCK, ROOT, torch_index
from tests.support import wheels
from tests.support.pages import blocks
from tests.support.ports import KeptPorts
from tests.support.relays import PATIENT

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

PAGE = "docs/secured-fleet.md"
PROGRAMS = ("model.py", "publish.py", "episode.py", "sample.py")
"""Of the page, in its order."""
DAEMONS = ("etcd", "relay-0", "relay-1", "engine-0", "engine-1", "gateway")
OF_THE_INDEX = (
    "PIP_",
    "UV_",
    "SSL_CERT",
    "REQUESTS_CA",
    "CURL_CA",
    "http",
    "no_proxy",
    "all_proxy",
    "HTTP",
    "NO_PROXY",
)
"""Beginnings of the variables that say where packages come from: the only ones that the page's shell gets."""
FAILS_AT_ONCE = "set -Eeu -o pipefail\ntrap 'echo \"failed: $BASH_COMMAND\"' ERR\n"
MACHINES_OWN = "/usr/bin"
OLDEST = (3, 11)
"""Python that the project runs on."""
LIMIT_S = 3000
"""For all of it: most is pip's."""


def attempts() -> list[tuple[str, str]]:
    """Of the table of what is refused: commands, and what each of them gets."""
    return re.findall(r"^\| `(.+)` \| (.+) \|$", (ROOT / PAGE).read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Typed:
    """What the page's commands printed, and the directory in which they were typed."""

    printed: str
    directory: Path

    def log(self, daemon: str) -> str:
        return (self.directory / f"{daemon}.log").read_text(errors="replace")


def pythons() -> dict[str, Path]:
    """By release, the folders of the Pythons that the page is typed with: this one, and the machine's own."""
    found = {platform.python_version(): Path(sys.base_prefix) / "bin"}
    if shutil.which("python3", path=MACHINES_OWN) is not None:
        said = subprocess.run([f"{MACHINES_OWN}/python3", "--version"], capture_output=True, text=True, check=True)
        release = said.stdout.split()[1]
        if tuple(map(int, release.split(".")[:2])) >= OLDEST:
            found.setdefault(release, Path(MACHINES_OWN))
    return found


def environment(home: Path, python: Path) -> dict[str, str]:
    """Of an empty machine with a package index, and a cache of what pip has downloaded before. `python`: its folder."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(OF_THE_INDEX)}
    config = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "pip/pip.conf"
    if config.exists():
        kept.setdefault("PIP_CONFIG_FILE", str(config))  # it may name the index
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pip"
    return {
        "PIP_CACHE_DIR": str(cache),
        **kept,
        "PIP_CONSTRAINT": str(LOCK),
        "PATH": f"{python}:/usr/bin:/bin",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }


def script(ports: KeptPorts, pools: Path) -> str:
    """The page's commands in its order, each of which has to succeed, and before the last ones the attempts."""
    *parts, stop = blocks(PAGE, "sh")
    refused = [
        f"if {command} > attempt-{number}.txt 2>&1; then echo 'attempt {number} was not refused'; exit 1; fi\n"
        for number, (command, _) in enumerate(attempts())
    ]
    text = with_ports(ports, "".join([*parts, *refused, stop]))
    text = text.replace("pip install ", f"pip install --quiet {shlex.join(torch_index())} ")
    own = rf"paramserver serve --name \1 --pool-dir {pools}/\1 {shlex.join(PATIENT)}"
    return FAILS_AT_ONCE + re.sub(r"paramserver serve --name (\S+)", own, text)


def with_ports(ports: KeptPorts, text: str) -> str:
    return re.sub(r"\b(2379|7070|7071|7170|7171|8000|8001|8080)\b", lambda found: str(ports.of(found[0])), text)


def run_shell(text: str, directory: Path, env: dict[str, str]) -> tuple[int, str]:
    """Its exit status, and what it printed; whatever it left running is killed."""
    with subprocess.Popen(
        ["bash", "-c", text],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            printed, _ = shell.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    return shell.returncode, printed


@pytest.fixture(scope="module", params=pythons().items(), ids=lambda python: python[0])
def typed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typed]:
    _, python = request.param
    directory, home = tmp_path_factory.mktemp("typed"), tmp_path_factory.mktemp("home")
    pools = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    try:
        wheel = wheels.built_from_checkout(tmp_path_factory.mktemp("wheel"))
        shutil.copy(wheel, directory)
        with KeptPorts() as ports:
            for name, program in zip(PROGRAMS, blocks(PAGE, "python"), strict=True):
                (directory / name).write_text(with_ports(ports, program))
            status, printed = run_shell(script(ports, pools), directory, environment(home, python))
        print(printed)
        logs = "".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in directory.glob("*.log"))
        assert status == 0, printed[-6000:] + logs
        yield Typed(printed, directory)
    finally:
        shutil.rmtree(pools)


@pytest.mark.timeout(LIMIT_S + 120)
def test_the_page_brings_a_fleet_up_and_trains_with_it(typed: Typed) -> None:
    for shown in (
        "members: relay-0, relay-1",
        "admin listener: admin.sock can be a unix socket",
        "version 1 is sealed, and both relays hold it",
        "the agent rewards itself: 403",
        "its creator rewards it",
        "API keys: 1 admin, 1 trainer, 1 agent, 1 reader",
    ):
        assert shown in typed.printed, shown
    generated = re.search(r"^the agent generated ([1-8]) tokens$", typed.printed, re.MULTILINE)
    assert generated, "1 to 8: the model has random weights, and may sample its end before its limit"
    assert f" tokens, {generated[1]} to train on, rewards [1.0]" in typed.printed
    assert len(re.findall(r"^\S+:\d+ +embedded +serving +\d", typed.printed, re.MULTILINE)) >= 4, "by status and by top"
    assert "wrong  " not in typed.printed, "both doctors found nothing wrong"


def test_who_has_no_right_gets_what_the_page_says(typed: Typed) -> None:
    assert len(attempts()) >= 8
    for number, (command, said) in enumerate(attempts()):
        got = (typed.directory / f"attempt-{number}.txt").read_text()
        assert re.sub(r":\d+", "", said) in re.sub(r":\d+", "", " ".join(got.split())), (command, got)


def test_every_daemon_ended_by_itself_and_without_an_error(typed: Typed) -> None:
    for daemon in DAEMONS:
        assert "Traceback" not in typed.log(daemon), typed.log(daemon)[-3000:]
        assert " ERROR " not in typed.log(daemon), typed.log(daemon)[-3000:]
    assert "gateway: closed" in typed.log("gateway")
    assert not (typed.directory / "admin.sock").exists()


def test_nothing_came_from_the_checkout_and_secrets_are_their_owners(typed: Typed) -> None:
    python = typed.directory / "venv/bin/python"
    where = wheels.run(python, "-c", "import gateway; print(gateway.__file__)", cwd=typed.directory)
    assert Path(where.strip()).is_relative_to(typed.directory / "venv")
    for path in (
        typed.directory / "api-keys",
        *typed.directory.glob("fleet/**/*.key"),
        *typed.directory.glob("fleet/*/key.pem"),
    ):
        assert path.stat().st_mode & 0o077 == 0, path
    key = re.search(r"^admin \S+ (\S+)$", (typed.directory / "api-keys").read_text(), re.MULTILINE)
    assert key is not None
    assert all(key[1] not in typed.log(daemon) for daemon in DAEMONS)
