"""Makes `.venv-verl`: verl for a CPU with this checkout beside it, as a user's trainer environment has it.

As with `.venv`, the heavy part is installed once per lock (deploy/verl.lock) into the shared cache.
"""

from __future__ import annotations

from pathlib import Path

from deploy.setup_env import ROOT, shared_environment, thin_environment

LOCK = ROOT / "deploy" / "verl.lock"
VENV = ROOT / ".venv-verl"
PYTHON = VENV / "bin" / "python"


def _nothing(_: Path) -> None:
    """The lock is complete, and pip is not to add what verl wishes for."""


def python() -> Path:
    """The interpreter of `.venv-verl`, made when it is not there."""
    thin_environment(shared_environment(LOCK, "verl-", finish=_nothing), VENV, tools=())
    return PYTHON


if __name__ == "__main__":
    python()
