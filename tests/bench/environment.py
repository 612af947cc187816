"""The peers' own environment: `~/.cache/laminar-rl/envs/peers-HASH`, one for each `peers/requirements.txt`.

Each package is installed by itself, so that one that cannot be had costs only its own figures.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deploy.setup_env import cache_dir, digest, python_tag, torch_index

WITHOUT_DEPENDENCIES = ("nixl",)  # theirs would bring several GB of CUDA
INSTALL_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter with the peers, and why some are not there."""

    python: Path
    failed: dict[str, str]

    def why_not(self, *packages: str) -> str:
        """ "" when all of them are installed."""
        return "; ".join(f"{name}: {self.failed[name]}" for name in packages if name in self.failed)


def _requirements(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def peers(requirements: Path) -> Environment:
    """Those that the file names, installed now if they are not there yet. Safe under concurrent calls."""
    target = cache_dir() / "envs" / f"peers-{python_tag()}-{digest(requirements.read_bytes())}"
    target.parent.mkdir(parents=True, exist_ok=True)
    marks = target / "installed"
    with open(f"{target}.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not marks.exists():
            print(f"bench: installing what is compared with into {target} (once; some minutes)", flush=True)
            shutil.rmtree(target, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
            marks.mkdir()
        for requirement in _requirements(requirements):
            _install(target, marks, requirement)
    failed = {path.name: path.read_text() for path in marks.iterdir() if path.read_text()}
    return Environment(target / "bin" / "python", failed)


def _install(target: Path, marks: Path, requirement: str) -> None:
    """A failure is tried again by the next run; a success is not."""
    mark = marks / requirement.partition("==")[0]
    if mark.exists() and not mark.read_text():
        return
    options = ["--no-deps"] if requirement.startswith(WITHOUT_DEPENDENCIES) else []
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", *options, *torch_index(), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        mark.write_text(f"not installed within {INSTALL_TIMEOUT_S} s")
        return
    mark.write_text("" if done.returncode == 0 else f"cannot be installed: {done.stderr.strip()[-300:]}")
