"""The repack benchmark in small, so that it cannot rot: the real gateway and four scripted engines, every mode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.bench.repack.run import Point, run

pytestmark = pytest.mark.slow


LEAST = {"trajectories": 51, "refreshes": 1}
LEAST_OF_MODE = {"repack": {"receipts": 1, "moves": 1, "pause_mean_s": 0.001}, "inflight": {"versions_mixed": 1}}


def small(mode: str, shipped: bool = False) -> dict[str, Any]:
    """Some 12 seconds, or as long as it takes until every figure below has something to tell."""
    point = Point(
        mode,
        batch=24,
        publish_period_s=50.0,
        scale=20.0,
        warm_up_s=20.0,
        measured_s=180.0,
        engines=4,
        concurrency=64,
        shipped=shipped,
        repeat=int(shipped),
        least={**LEAST, **LEAST_OF_MODE.get(mode, {})},
    )
    return asyncio.run(run(point))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "shipped"),
    [("barrier", False), ("drain", False), ("repack", False), ("inflight", False), ("drain", True)],
)
def test_every_mode_gives_each_client_its_own_tokens_and_loads_versions(mode: str, shipped: bool) -> None:
    found = small(mode, shipped)
    assert found["wrong_answers"] == 0
    assert found["cuts"] == 0
    assert found["tokens_per_s"] > 0
    if mode == "repack":
        assert found["outcomes"].get("moved", 0) >= 1
    if mode != "inflight" and not shipped:
        assert found["versions_mixed"] == 0
