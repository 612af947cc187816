"""The extra `nixl` for tests: installed once for each `nixl.lock` into the cache, beside the shared environment.

It is not in requirements.lock: 220 MB for one transport, and what it asks for besides (torch, numpy) is there already.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import side_package
from tests.support.skips import needs

LOCK = Path(__file__).with_name("nixl.lock")


def installed() -> Path:
    return side_package.installed(LOCK)


def environment() -> dict[str, str]:
    """What a process needs to find the library and to use it over TCP."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(installed()), *([before] if before else [])]), "UCX_TLS": "tcp"}


@pytest.fixture(scope="session")
def nixl_directory() -> Path:
    try:
        return installed()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        pytest.skip(needs(f"the extra nixl is not here: {error}", "the package index (`pip config list`), then again"))


@pytest.fixture(scope="module")
def nixl(nixl_directory: Path) -> Iterator[None]:
    """Relays and NIXL processes started by the module's tests find the library, which goes over TCP."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(nixl_directory))
        yield
