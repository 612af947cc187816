"""vLLM's environment is made before the first test, so that no test's deadline pays for the installation."""

from __future__ import annotations

import pytest

from deploy.side_envs import VLLM


@pytest.fixture(scope="session", autouse=True)
def vllm_environment() -> None:
    VLLM.make()
