"""A directory for tests in which other users of this host try what they may: every user gets into it.

Pytest's own are its user's alone, and so may be what TMPDIR names. Its path is short: a unix socket's has 107 bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="laminar-test-", dir="/dev/shm") as found:
        os.chmod(found, 0o755)  # noqa: S103 - so that only what a test makes below it keeps others out
        yield Path(found)
