"""Makes `.venv-trl`: TRL for a CPU with this checkout beside it, as a user's trainer environment has it.

As with `.venv`, the heavy part is installed once per lock (deploy/trl.lock) into the shared cache.
"""

from __future__ import annotations

from pathlib import Path

from deploy.setup_env import ROOT, shared_environment, thin_environment

LOCK = ROOT / "deploy" / "trl.lock"
VENV = ROOT / ".venv-trl"
PYTHON = VENV / "bin" / "python"


def python() -> Path:
    """The interpreter of `.venv-trl`, made when it is not there."""
    thin_environment(shared_environment(LOCK, "trl-"), VENV, tools=())
    return PYTHON


if __name__ == "__main__":
    python()
