"""vLLM's trainer side with the engine `laminar`: what is sent by its factory is what the fleet samples from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from deploy.side_envs import VLLM
from tests.support.training.scene import TrainingScene

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
"""Of importance ratios, float32 on both sides, temperature 1."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        scene = TrainingScene(VLLM.python, tmp_path_factory.mktemp("trainer"), stack)
        return scene.train("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.vllm.trainer")


def test_the_fleet_samples_from_what_was_sent(reports: list[dict[str, Any]]) -> None:
    *versions, _, _ = reports
    assert [report["version"] for report in versions] == [1, 2, 3]
    for report in versions:
        assert report["rows"] == 4
        assert report["ratio_off"] < TOLERANCE
    for report in versions[1:]:
        assert report["ratio_off_version_before"] > 10 * TOLERANCE


def test_a_version_that_is_refused_leaves_no_rank_behind(reports: list[dict[str, Any]]) -> None:
    refused = reports[-2]
    assert "announced as BF16" in refused["refused"]
    assert refused["taken"] == [refused["tensors"]] * 2
    assert refused["version_after"] == 0


def test_the_program_of_the_page_publishes(reports: list[dict[str, Any]]) -> None:
    assert reports[-1] == {"documented": 5}, "number 4 went to the version that was given up"
