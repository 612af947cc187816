"""The extra `nixl` for tests: installed once for each `nixl.lock` into the cache, beside the shared environment.

It is not in requirements.lock: 220 MB for one transport, and what it asks for besides (torch, numpy) is there already.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.setup_env import cache_dir, digest, python_tag, shared_environment
from tests.support.skips import needs

LOCK = Path(__file__).with_name("nixl.lock")
INSTALL_TIMEOUT_S = 600


def installed() -> Path:
    """The directory to import it from, filled now if need be. Safe under concurrent calls. RuntimeError: why not."""
    target = cache_dir() / "envs" / f"nixl-{python_tag()}-{digest(LOCK.read_bytes())}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (target / ".complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            _install(target)
            (target / ".complete").touch()
    return target


def _install(target: Path) -> None:
    pip = [str(shared_environment() / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--target", str(target), "--requirement", str(LOCK)],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{LOCK.read_text().strip()} cannot be installed: {done.stderr.strip()[-300:]}")


def environment() -> dict[str, str]:
    """What a process needs to find the library and to use it over TCP."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(installed()), *([before] if before else [])]), "UCX_TLS": "tcp"}


@pytest.fixture(scope="session")
def nixl_directory() -> Path:
    try:
        return installed()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        pytest.skip(needs(f"the extra nixl is not here: {error}", "the package index (`pip config list`), then again"))


@pytest.fixture(scope="module")
def nixl(nixl_directory: Path) -> Iterator[None]:
    """Relays and NIXL processes started by the module's tests find the library, which goes over TCP."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(nixl_directory))
        yield
