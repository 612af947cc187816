"""The repack benchmark in small, so that it cannot rot: the real gateway and four scripted engines, every mode."""

from __future__ import annotations

import asyncio

import pytest

from tests.bench.repack.run import Life, Point, run

pytestmark = pytest.mark.slow


LEAST = {"trajectories": 51, "refreshes": 1}
LEAST_OF_MODE = {"repack": {"receipts": 1, "moves": 1, "pause_mean_s": 0.001}, "inflight": {"versions_mixed": 1}}


def small(mode: str, shipped: bool = False) -> Life:
    """Two stretches of some 5 seconds, the second as long as it takes until it has something to tell of everything."""
    point = Point(
        mode,
        batch=24,
        publish_period_s=50.0,
        scale=20.0,
        warm_up_s=20.0,
        stretch_s=90.0,
        stretches=2,
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
    for count in ("trajectories", "refreshes", "moves", "receipts"):
        assert sum(f[count] for f in found.stretches) == found.whole[count]
    for of_stretch in found.stretches:
        assert of_stretch["wrong_answers"] == 0
        assert of_stretch["cuts"] == 0
        assert of_stretch["tokens_per_s"] > 0
        if mode != "inflight" and not shipped:
            assert of_stretch["versions_mixed"] == 0
    if mode == "repack":
        assert found.stretches[-1]["outcomes"].get("moved", 0) >= 1
