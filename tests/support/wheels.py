"""The distribution as its users get it: a wheel, built from a folder of sources and installed without the checkout.

Its dependencies are those of the shared environment, to which a path file leads, so nothing is downloaded.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from deploy.setup_env import ROOT, make_venv, shared_environment

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


def built_from_checkout(directory: Path) -> Path:
    """The wheel of the files that `deploy/images/Containerfile` copies."""
    source = directory / "src"
    source.mkdir()
    for name in copied_into_the_build():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "_stream.so"))
        else:
            shutil.copy(ROOT / name, source)
    return built(source, directory)


def copied_into_the_build() -> list[str]:
    """Files and folders of the checkout."""
    text = (ROOT / "deploy/images/Containerfile").read_text()
    stage = text.partition(" AS build\n")[2].partition("\nFROM ")[0]
    return [name for line in re.findall(r"^COPY (?!--)(.+)$", stage, re.MULTILINE) for name in line.split()[:-1]]


def installed(wheel: Path, venv: Path) -> Path:
    """Makes `venv` with the wheel in it; returns the folder of its commands."""
    make_venv(venv, "--without-pip")
    shared = shared_environment()
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": "", "platbase": ""}).lstrip("/"))
    (venv / packages / "dependencies.pth").write_text(f"{shared / packages}\n")
    pip = [python_of(shared), "-m", "pip", "--disable-pip-version-check", "--python", python_of(venv)]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=venv)
    return venv / "bin"
