"""What `make bench-repack` makes of its runs: ratios within a repeat, medians, spread, bars, and what it keeps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gateway.core.fleet import FleetConfig
from tests.bench.repack.__main__ import (
    PARTS,
    earlier,
    headline,
    medians,
    missed,
    mode_points,
    pairs,
    point_of,
    purity,
    report,
    say,
    spread,
    sweep_points,
)
from tests.bench.repack.engines import TRACE_LENGTH
from tests.bench.repack.run import REPEATS_MAX, TRAJECTORIES_OF_A_REPEAT, Point, gateway_command
from tests.bench.repack.trace import COMMITTED

BASE = Point("drain")


def one(repeat: int, **figures: Any) -> dict[str, Any]:
    """A run."""
    same = {"kv_util": 0.5, "answer_p99_s": 10.0, "latency_p99_s": 9.0, "pause_mean_s": None, "wrong_answers": 0}
    shape = {"repeat": repeat, "mode": "drain", "outcomes": {}, "mixed": 0, "trajectories": 10, "shipped": False}
    return {**shape, "tokens_per_s": 100.0, **same, **figures}


def test_a_figure_is_the_median_of_ratios_within_a_repeat() -> None:
    """Runs of different repeats are never compared: each has its own stretch of the trace."""
    runs = {
        "drain": [one(0), one(1, tokens_per_s=200.0), one(2)],
        "repack": [one(2, tokens_per_s=150.0), one(0, tokens_per_s=130.0), one(1, tokens_per_s=240.0), one(3)],
    }
    assert headline(runs)["repack_gain"] == [1.5, 1.3, 1.2]
    assert spread(headline(runs)["repack_gain"]) == {"median": 1.3, "min": 1.2, "max": 1.5, "repeats": [1.5, 1.3, 1.2]}
    assert [(ours["repeat"], theirs["repeat"]) for ours, theirs in pairs(runs, "repack", "drain")] == [
        (2, 2),
        (0, 0),
        (1, 1),
    ]


def test_both_p99_are_told_with_and_without_the_relief_that_ships() -> None:
    slower = one(0, answer_p99_s=9.0, latency_p99_s=9.9)
    found = headline({"drain": [one(0)], "repack": [slower], "drain_shipped": [one(0)], "repack_shipped": [one(0)]})
    assert (found["tail_latency_ratio"], found["tail_decode_ratio"]) == ([0.9], [1.1])
    assert (found["tail_latency_ratio_shipped"], found["tail_decode_ratio_shipped"]) == ([1.0], [1.0])
    assert "repack_over_inflight" not in found


def test_bars_are_told_when_they_are_missed() -> None:
    runs = {
        "drain": [one(0)],
        "repack": [one(0, tokens_per_s=130.0, kv_util=0.55, pause_mean_s=0.4)],
        "inflight": [one(0, tokens_per_s=131.0, wrong_answers=2)],
    }
    found = {name: spread(values)["median"] for name, values in headline(runs).items()}
    assert found["repack_gain"] == 1.3
    assert missed(found) == [
        "kv_util_gain is 1.1, at least 1.14 was wanted",
        "wrong_answers is 2, at most 0 was wanted",
    ]
    assert missed({"repack_gain_shipped": 1.15}) == ["repack_gain_shipped is 1.15, at least 1.26 was wanted"]
    assert purity({"drain": one(0), "repack": one(0)}) == []


def test_medians_of_a_mode_leave_out_what_is_no_number() -> None:
    found = medians([one(0, pause_mean_s=0.4), one(1, tokens_per_s=300.0), one(2, tokens_per_s=200.0)])
    assert (found["tokens_per_s"], found["pause_mean_s"]) == (200.0, 0.4)
    assert not {"repeat", "mode", "outcomes", "shipped"} & found.keys()


def test_the_relief_is_the_gateways_default_or_off() -> None:
    default = FleetConfig()
    assert point_of(BASE, "drain_shipped", 0).relief == (default.drain_max_s, default.staleness_max)
    assert point_of(BASE, "drain", 0).relief == (COMMITTED["drain_max_s"], COMMITTED["staleness_max"])
    assert (point_of(BASE, "repack_shipped", 3).mode, point_of(BASE, "repack_shipped", 3).repeat) == ("repack", 3)


def test_the_gateway_gets_the_relief_in_seconds_of_the_run(tmp_path: Any) -> None:
    point = Point("drain", scale=6.0, shipped=True)
    flags = gateway_command(point, {}, "relay", tmp_path)
    assert f"--drain-max-s={FleetConfig().drain_max_s / 6.0}" in flags


def test_repeats_have_stretches_of_the_trace_that_never_meet() -> None:
    points = mode_points(BASE, PARTS["paper"], REPEATS_MAX)
    assert [name for name, point in points if point.repeat == 0] == list(PARTS["paper"])
    assert [name for name, point in points if point.repeat == 1] == ["drain", "repack", "inflight"]
    firsts = sorted({point.first_trajectory for _, point in points})
    assert all(b - a == TRAJECTORIES_OF_A_REPEAT for a, b in itertools.pairwise(firsts))
    assert firsts[-1] + TRAJECTORIES_OF_A_REPEAT <= TRACE_LENGTH


def test_the_sweep_covers_every_batch_and_period_in_both_modes() -> None:
    points = {(p.batch, p.publish_period_s, p.mode) for p in sweep_points(BASE)}
    assert len(points) == 2 * len(COMMITTED["sweep_batch"]) * len(COMMITTED["sweep_publish_period_s"])


@pytest.mark.parametrize(
    ("kept", "stays"),
    [({"repeats": 5, "scale": 6.0, "runs": {"drain": []}}, True), ({"repeats": 3}, False), ({}, False)],
)
def test_a_part_is_added_only_to_what_was_measured_alike(kept: dict[str, Any], stays: bool) -> None:
    assert earlier(kept, {"repeats": 5, "scale": 6.0}) == (kept if stays else {})


def test_the_report_says_median_and_spread(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"drain": [one(0), one(1)], "repack": [one(0, tokens_per_s=120.0), one(1, tokens_per_s=130.0)]}
    told = report(runs, [], simulated=True)
    assert told["spread"]["repack_gain"] == {"median": 1.25, "min": 1.2, "max": 1.3, "repeats": [1.2, 1.3]}
    assert told["missed"][0] == "repack_gain is 1.25, at least 1.26 was wanted"
    say(told, [])
    assert "1.2 .. 1.3" in capsys.readouterr().out
