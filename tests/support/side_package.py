"""Packages that tests need and that are not in requirements.lock: installed once for each lock into the cache, without
what they depend on, beside the shared environment."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

from deploy.setup_env import cache_dir, digest, python_tag, shared_environment

INSTALL_TIMEOUT_S = 600


def installed(lock: Path) -> Path:
    """The directory to import it from, filled now if need be. Safe under concurrent calls. RuntimeError: why not."""
    target = cache_dir() / "envs" / f"{lock.stem}-{python_tag()}-{digest(lock.read_bytes())}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (target / ".complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            _install(lock, target)
            (target / ".complete").touch()
    return target


def _install(lock: Path, target: Path) -> None:
    pip = [str(shared_environment() / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--target", str(target), "--requirement", str(lock)],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{lock.read_text().strip()} cannot be installed: {done.stderr.strip()[-300:]}")
