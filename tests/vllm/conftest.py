"""vLLM's environment is made before the first test, so that no test's deadline pays for the installation."""

from __future__ import annotations

import pytest

from deploy.side_envs import VLLM
from gateway.engines import connections, http

# Compilers that vLLM starts may keep the processors for longer than an engine's connection may take.
connections.CONNECT_TIMEOUT_S = http.CONNECT_TIMEOUT_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def vllm_environment() -> None:
    VLLM.make()
