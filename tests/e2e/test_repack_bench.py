"""The repack benchmark in small, so that it cannot rot: the real gateway and four scripted engines, every mode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.bench.repack.__main__ import headline, missed, purity
from tests.bench.repack.run import Point, run

pytestmark = pytest.mark.slow


LEAST = {"trajectories": 51, "refreshes": 1}
LEAST_OF_MODE = {"repack": {"receipts": 1, "moves": 1, "pause_mean_s": 0.001}, "inflight": {"versions_mixed": 1}}


def small(mode: str) -> dict[str, Any]:
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
        least={**LEAST, **LEAST_OF_MODE.get(mode, {})},
    )
    return asyncio.run(run(point))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["barrier", "drain", "repack", "inflight"])
def test_every_mode_gives_each_client_its_own_tokens_and_loads_versions(mode: str) -> None:
    found = small(mode)
    assert found["wrong_answers"] == 0
    assert found["cuts"] == 0
    assert found["tokens_per_s"] > 0
    if mode == "repack":
        assert found["outcomes"].get("moved", 0) >= 1
    if mode != "inflight":
        assert found["versions_mixed"] == 0


def test_bars_are_told_when_they_are_missed() -> None:
    drain = {"tokens_per_s": 100.0, "kv_util": 0.5, "answer_p99_s": 10.0, "latency_p99_s": 9.0, "wrong_answers": 0}
    repack = {**drain, "tokens_per_s": 130.0, "kv_util": 0.55, "pause_mean_s": 0.4}
    inflight = {**drain, "tokens_per_s": 131.0, "wrong_answers": 2}
    found = headline({"drain": drain, "repack": repack, "inflight": inflight})
    assert purity({"drain": drain, "repack": repack}) == []
    assert found["repack_gain"] == 1.3
    assert missed(found) == [
        "kv_util_gain is 1.1, at least 1.14 was wanted",
        "wrong_answers is 2, at most 0 was wanted",
    ]
