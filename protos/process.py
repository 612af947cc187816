"""What every Laminar daemon does the same way: log lines, and telling others that it is ready.

Ready file: JSON written atomically once the process serves, so that a supervisor that passed `--port 0`
learns the addresses without guessing ports or sleeping.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

LOG_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


TIED = str(Path(__file__).with_name("tied.py"))
"""`[sys.executable, TIED, PROGRAM, ...]` starts a program that the kernel kills when its starter ends."""

LOG_LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str = "info") -> None:
    """Sends log lines to stderr in the one format of all daemons."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format=LOG_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S", force=True
    )


def write_ready_file(path: Path | None, addresses: Mapping[str, str]) -> None:
    """Writes `{"pid": ..., **addresses}` to `path` (nothing when None); readers never see half a file."""
    if path is None:
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps({"pid": os.getpid(), **addresses}))
    os.replace(scratch, path)
