"""LoRA adapters of peft, which verl's environment has: the SDK streams what `merge_and_unload` makes."""

from __future__ import annotations

import json
import subprocess

import pytest

from deploy.side_envs import VERL

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_merged_weights_are_those_of_merge_and_unload() -> None:
    done = subprocess.run(
        [str(VERL.python), "-m", "tests.verl.lora"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert "DoRA cannot be merged here" in report.pop("dora")
    assert "rows of trainable_token_indices cannot be merged here" in report.pop("tokens")
    assert "merged into 'q.weight' already" in report.pop("merged")
    assert len(report) == 10
    assert not any(report.values()), report
