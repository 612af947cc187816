"""The environment of the verifiers library is made before the first test, so that no deadline pays for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.side_envs import VERIFIERS


@pytest.fixture(scope="session", autouse=True)
def commands() -> Path:
    """The folder with `vf-eval` and `uv`."""
    return VERIFIERS.make()
