"""The distribution as its users get it: a wheel, built from a folder of sources and installed without the checkout.

Its dependencies are those of the shared environment, to which a path file leads, so nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from deploy.setup_env import make_venv, shared_environment

PACKAGES = ("protos", "paramserver", "gateway", "trainer_client", "agents_env")


def python_of(venv: Path) -> str:
    return str(venv / "bin" / "python")


def run(*words: str | Path, cwd: Path) -> str:
    """What it prints; nothing of the checkout is on its path."""
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source: Path, directory: Path) -> Path:
    """The wheel of the sources in `source`, in `directory`."""
    pip = [python_of(shared_environment()), "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, source, cwd=directory)
    [found] = directory.glob("*.whl")
    return found


def installed(wheel: Path, venv: Path) -> Path:
    """Makes `venv` with the wheel in it; returns the folder of its commands."""
    make_venv(venv, "--without-pip")
    shared = shared_environment()
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": "", "platbase": ""}).lstrip("/"))
    (venv / packages / "dependencies.pth").write_text(f"{shared / packages}\n")
    pip = [python_of(shared), "-m", "pip", "--disable-pip-version-check", "--python", python_of(venv)]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=venv)
    return venv / "bin"
