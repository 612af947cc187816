"""The programs of docs/trl.md run as they stand; only addresses and the model are the test's own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deploy.side_envs import TRL
from tests.e2e.test_docs import blocks
from tests.support.training.scene import TrainingScene

pytestmark = [pytest.mark.trl, pytest.mark.timeout(1200)]

PROGRAMS = blocks("docs/trl.md", "python")
CPU = "use_cpu=True, bf16=False, report_to=[], save_strategy='no', "
"""What a machine without a GPU needs, in the arguments of TRL's configurations."""


@pytest.mark.parametrize("program", PROGRAMS, ids=["GRPOTrainer", "AsyncGRPOTrainer"])
def test_the_program_trains(program: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        scene = TrainingScene(TRL.python, tmp_path, stack)
        program = program.replace("127.0.0.1:7070", scene.relay).replace("http://127.0.0.1:8080", scene.gateway)
        program = program.replace("MODEL_DIR", str(scene.model))
        program = program.replace('output_dir="out"', f'{CPU}output_dir="{tmp_path}"')
        if "AsyncGRPOTrainer" in program:
            program = f"from tests.trl.attention import on_a_cpu\non_a_cpu()\n{program}"
        (tmp_path / "program.py").write_text(program)
        scene.run([str(tmp_path / "program.py")])
        newest = httpx.get(f"{scene.gateway}/status").raise_for_status().json()["newest_version"]
        assert newest >= 2, "each step published"
