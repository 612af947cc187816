"""Makes the environment of OpenEnv, in which servers of its environments run.

It is installed once per lock (deploy/openenv.lock) into the shared cache. Nothing of this project is in it: a server is
known by its URL alone.
"""

from __future__ import annotations

from pathlib import Path

from deploy.setup_env import ROOT, shared_environment

LOCK = ROOT / "deploy" / "openenv.lock"


def commands() -> Path:
    """The folder of `openenv` and `uvicorn`, made when it is not there."""
    return shared_environment(LOCK, "openenv-") / "bin"


if __name__ == "__main__":
    print(commands())
