"""TRL's environment is made before the first test, so that no test's deadline pays for the installation."""

from __future__ import annotations

import pytest

from deploy.side_envs import TRL


@pytest.fixture(scope="session", autouse=True)
def trl_environment() -> None:
    TRL.make()
