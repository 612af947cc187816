"""The number format that this processor is fastest in, measured by `gateway engine-dtype` before anything else starts:
a process of its own, so that the demo itself needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deploy.demo.processes import DemoError
from gateway.core.dtypes import Choice

TIMEOUT_S = 120.0
"""The measurement takes a second, besides the start of Python and torch."""


def measure_speed(model_dir: Path, root: Path, env: Mapping[str, str]) -> Choice:
    """Raises DemoError with the command's output when it fails."""
    command = [sys.executable, "-m", "gateway", "engine-dtype", "--train", "--json", "--model", str(model_dir)]
    try:
        done = subprocess.run(
            command, cwd=root, env={**os.environ, **env}, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"the processor's speed was not measured in {TIMEOUT_S:.0f} s: {' '.join(command)}") from error
    if done.returncode:
        raise DemoError(f"the processor's speed could not be measured: {done.stderr.decode(errors='replace').strip()}")
    return msgspec.json.decode(done.stdout, type=Choice)
