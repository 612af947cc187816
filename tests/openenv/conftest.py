"""The environment of OpenEnv, and a server in it, are made before the first test, so that no deadline pays for them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents_env.openenv.serving import served
from deploy.side_envs import OPENENV

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def commands() -> Path:
    """The folder with `openenv` and `uvicorn`."""
    return OPENENV.make()


@pytest.fixture(scope="session")
def parrot(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenEnv's own echo environment, as its `openenv init` makes it: text is answered with the same text."""
    folder = tmp_path_factory.mktemp("made")
    # It tries to lock its packages with uv, and says so where it cannot; the environment is there all the same.
    subprocess.run([commands / "openenv", "init", "parrot", "-o", folder], check=True, capture_output=True, timeout=300)
    return folder / "parrot"


def serve(commands: Path, folder: Path, app: str) -> str:
    """The command of a server."""
    # The pings are frequent: a client that answers none of them while a model thinks is thrown out.
    pings = "--ws-ping-interval 1 --ws-ping-timeout 20"
    return f"{commands}/uvicorn --app-dir {folder} {app} --port {{port}} --log-level warning {pings}"


@pytest.fixture(scope="session")
def server(commands: Path) -> Iterator[str]:
    """The URL of a server with the environments of this folder, each below its name."""
    with served(serve(commands, HERE / "environments", "serve:app")) as url:
        yield url
