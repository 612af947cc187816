"""The release before this checkout, built from its commit and installed beside it; and what both are asked to run.

old, new = previous_release(directory), CHECKOUT
old.start("relay-a", ["paramserver", "serve", ...], directory); new.program("publish.py", relay)
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.setup_env import ROOT
from tests.support import processes, wheels
from tests.support.processes import Daemon

PREVIOUS, PREVIOUS_COMMIT = "v0.1.0", "a24da882249a0ca977f150add62e30579f24c3a0"
"""The tag of the release before, and its commit: a clone may lack tags."""
PARTS = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", *wheels.PACKAGES)
"""What its wheel is built of."""
PROGRAMS = ROOT / "tests/upgrade/programs"


@dataclass(frozen=True, slots=True)
class Release:
    """An installed release. `python` runs its modules, and no others of this project."""

    name: str
    python: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def start(self, name: str, command: list[str], directory: Path) -> Daemon:
        """A daemon of it, as `tests.support.processes.start` starts those of the checkout."""
        return processes.start(name, command, directory, python=self.python)

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """`python -m words`, however it ends."""
        return self._run("-m", *words)

    def program(self, name: str, *words: str | int | Path) -> Any:
        """What one of `tests/upgrade/programs` prints, as JSON; AssertionError with its output if it fails."""
        done = self._run(PROGRAMS / name, *map(str, words))
        assert done.returncode == 0, f"{name} of {self} with {words}:\n{done.stdout}{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def _run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.python, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


CHECKOUT = Release("new", (sys.executable, "-I"))


def previous_release(directory: Path) -> Release:
    """Builds and installs it below `directory`. AssertionError, with the command that mends it, without its commit."""
    source = directory / "src"
    source.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", PREVIOUS_COMMIT, *PARTS], capture_output=True, check=False
    )
    assert archive.returncode == 0, (
        f"the commit of {PREVIOUS}, {PREVIOUS_COMMIT}, is not in this clone: `git fetch origin {PREVIOUS_COMMIT}`, or "
        f"`git fetch --unshallow --tags`\n{archive.stderr.decode(errors='replace')}"
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    commands = wheels.installed(wheels.built(source, directory), directory / "venv")
    return Release("old", (str(commands / "python"), "-I"))
