"""Makes the environment of the verifiers library: `vf-eval`, and `uv`, by which it runs its harnesses.

It is installed once per lock (deploy/verifiers.lock) into the shared cache. Nothing of this project is in it: `vf-eval`
knows a model by its URL alone.
"""

from __future__ import annotations

from pathlib import Path

from deploy.setup_env import ROOT, shared_environment

LOCK = ROOT / "deploy" / "verifiers.lock"


def commands() -> Path:
    """The folder of `vf-eval` and `uv`, made when it is not there."""
    return shared_environment(LOCK, "verifiers-") / "bin"


if __name__ == "__main__":
    print(commands())
