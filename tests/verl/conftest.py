"""verl's environment is made before the first test, so that no test's deadline pays for the installation."""

from __future__ import annotations

import pytest

from deploy.side_envs import VERL


@pytest.fixture(scope="session", autouse=True)
def verl_environment() -> None:
    VERL.make()
