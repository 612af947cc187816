"""What `make bench-repack` makes of its runs: ratios within a stretch, medians, spread, bars, and what it keeps."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from gateway.core.fleet import FleetConfig
from tests.bench.repack.__main__ import (
    BARS,
    DEFAULT,
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
from tests.bench.repack.run import REPEATS_MAX, TRAJECTORIES_OF_A_REPEAT, Point, Watch, figures, gateway_command
from tests.bench.repack.trace import COMMITTED

BASE = Point("drain", scale=6.0, stretches=6)


def one(stretch: int, **figures: Any) -> dict[str, Any]:
    """Figures of a stretch."""
    same = {"kv_util": 0.5, "answer_p99_s": 10.0, "latency_p99_s": 9.0, "pause_mean_s": None, "wrong_answers": 0}
    shape = {"stretch": stretch, "mode": "drain", "outcomes": {}, "mixed": 0, "trajectories": 10, "shipped": False}
    return {**shape, "tokens_per_s": 100.0, **same, **figures}


def test_a_figure_is_a_ratio_within_a_stretch() -> None:
    """Different stretches are never compared: each has its own part of the trace and its own publishes."""
    runs = {
        "drain": [one(0), one(1, tokens_per_s=200.0), one(2)],
        "repack": [one(2, tokens_per_s=150.0), one(0, tokens_per_s=130.0), one(1, tokens_per_s=240.0), one(3)],
    }
    assert headline(runs)["repack_gain"] == [1.5, 1.3, 1.2]
    assert spread([1.5, 1.3, 1.2]) == {"min": 1.2, "max": 1.5, "stretches": [1.5, 1.3, 1.2]}
    assert [(ours["stretch"], theirs["stretch"]) for ours, theirs in pairs(runs, "repack", "drain")] == [
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


def test_a_mode_that_stood_still_or_was_not_run_has_no_ratio() -> None:
    """What was measured before and after is not lost for it."""
    still = one(0, tokens_per_s=0.0)
    lives = {"drain": [still], "repack": [one(0)], "inflight": []}
    figures = report(lives, {"drain": [still, one(1)], "repack": [one(0), one(1)], "inflight": []}, [], simulated=True)
    assert "repack_gain" not in figures["figures"]
    assert figures["spread"]["repack_gain"]["stretches"] == [1.0]
    assert set(figures["by_mode"]) == {"drain", "repack"}


def test_bars_are_told_when_they_are_missed() -> None:
    runs = {
        "drain": [one(0)],
        "repack": [one(0, tokens_per_s=130.0, kv_util=0.55, pause_mean_s=0.4)],
        "inflight": [one(0, tokens_per_s=131.0, wrong_answers=2)],
    }
    found = {name: value for name, [value] in headline(runs).items() if name in BARS}
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
    assert not {"stretch", "mode", "outcomes", "shipped"} & found.keys()


def test_the_relief_is_the_gateways_default_or_off() -> None:
    default = FleetConfig()
    assert point_of(BASE, "drain_shipped").relief == (default.drain_max_s, default.staleness_max)
    assert point_of(BASE, "drain").relief == (COMMITTED["drain_max_s"], COMMITTED["staleness_max"])
    assert point_of(BASE, "repack_shipped", repeat=3) == dataclasses.replace(
        BASE, mode="repack", shipped=True, repeat=3
    )


def test_the_gateway_gets_the_relief_in_seconds_of_the_run(tmp_path: Any) -> None:
    point = Point("drain", scale=6.0, shipped=True)
    flags = gateway_command(point, {}, "relay", tmp_path)
    assert f"--drain-max-s={FleetConfig().drain_max_s / 6.0}" in flags


def test_a_mode_has_one_life_and_all_lives_begin_with_the_same_trace() -> None:
    points = mode_points(BASE, PARTS["paper"], apart=False)
    assert [name for name, _ in points] == list(PARTS["paper"])
    assert {point.stretches for _, point in points} == {6}
    assert {point.first_trajectory for _, point in points} == {0}
    assert {(p.stretch_s, p.warm_up_s, p.publish_period_s) for _, p in points} == {(400.0, 400.0, 200.0)}


def test_the_whole_run_takes_no_more_than_forty_minutes() -> None:
    points = [point for part in DEFAULT for _, point in mode_points(BASE, PARTS[part], apart=False)]
    assert sum(point.wall_s for point in points) < 40 * 60
    assert "sweep" not in DEFAULT


def test_stretches_apart_have_parts_of_the_trace_that_never_meet() -> None:
    points = mode_points(BASE, PARTS["paper"], apart=True)
    assert [name for name, point in points if point.repeat == 0] == list(PARTS["paper"])
    assert {point.stretches for _, point in points} == {1}
    firsts = sorted({point.first_trajectory for _, point in points})
    assert all(b - a == TRAJECTORIES_OF_A_REPEAT for a, b in itertools.pairwise(firsts))
    assert firsts[-1] + TRAJECTORIES_OF_A_REPEAT <= REPEATS_MAX * TRAJECTORIES_OF_A_REPEAT <= TRACE_LENGTH


@pytest.mark.parametrize("simulated", [True, False])
def test_the_sweep_covers_every_batch_and_period_in_both_modes(simulated: bool) -> None:
    points = [point for _, point in sweep_points(BASE, simulated)]
    assert len({(p.batch, p.publish_period_s, p.mode) for p in points}) == len(points)
    assert len(points) == 2 * len(COMMITTED["sweep_batch"]) * len(COMMITTED["sweep_publish_period_s"])
    assert all(p.stretches == 6 if simulated else p.stretch_s >= 2 * p.publish_period_s for p in points)


def look(at_s: float, tokens: int, **counts: int) -> dict[str, Any]:
    """What `Watch.look` finds: one engine that has decoded `tokens`."""
    engine = dict.fromkeys(("decoded_tokens", "again_tokens", "kv_share_s", "running_s", "preempted", "late_s"), 0)
    names = ("refreshes", "repacks", "moves", "turns_cut", "turns_mixed_version")
    status = {"counters": dict.fromkeys(names, 0), "staleness": {"generation": {}}}
    shares = {"gateway_cpu_s": 0.0, "client_cpu_s": 0.0, "cpu_s": 0.0}
    seen = {"ended": 0, "answered": 0, "wrong": 0, **counts}
    return {"now": at_s, "unix_s": at_s, "engines": {"e": {**engine, "decoded_tokens": tokens}}, "status": status} | (
        shares | seen
    )


def move(pause_s: float | None) -> dict[str, Any]:
    return {"pause_s": pause_s, "outcome": "moved"}


def receipt(planned_at: float, pause_s: float) -> dict[str, Any]:
    none = {"estimated": 1.0, "measured": 0.0}
    told = {"planned_unix_s": planned_at, "price_s": none, "gain_s": {"estimated": 1.0, "measured": None}}
    return {**told, "moves": [move(pause_s)], "emptied_after_s": None}


def test_each_stretch_counts_what_ended_and_what_was_planned_in_it() -> None:
    clients: Any = type("Answered", (), {"answers": [(0.0, 2.0), (1.0, 9.0), (2.0, 20.0)], "trace": [32, 320, 3200]})()
    nothing: Any = None
    watch = Watch(BASE, nothing, "", nothing, nothing, clients)
    watch.ended = [(0, 0.5, 2.0), (1, 1.5, 9.0), (2, 2.5, 20.0)]
    watch.receipts = [receipt(2.0, 9.0), receipt(5.0, 0.1), receipt(10.0, 0.2), receipt(20.0, 9.0)]
    looks = [
        look(4.0, 0, ended=1, answered=1),
        look(10.0, 600, ended=2, answered=2),
        look(20.0, 1000, ended=3, answered=3),
    ]
    first, second = (figures(watch, n, before, after) for n, (before, after) in enumerate(itertools.pairwise(looks)))
    assert [(f["stretch"], f["trajectories"], f["receipts"]) for f in (first, second)] == [(0, 1, 1), (1, 1, 1)]
    assert (first["latency_p99_s"], first["answer_p99_s"], first["pause_mean_s"]) == (7.5 * 6, 8.0 * 6, 0.6)
    assert (second["latency_p99_s"], second["answer_p99_s"]) == (17.5 * 6, 18.0 * 6)
    assert (first["tokens_per_s"], second["tokens_per_s"]) == (16.7, 6.7)


@pytest.mark.parametrize(
    ("kept", "stays"),
    [({"stretches": 5, "scale": 6.0, "runs": {"drain": []}}, True), ({"stretches": 3}, False), ({}, False)],
)
def test_a_part_is_added_only_to_what_was_measured_alike(kept: dict[str, Any], stays: bool) -> None:
    assert earlier(kept, {"stretches": 5, "scale": 6.0}) == (kept if stays else {})


def test_a_figure_is_that_of_the_whole_life_and_its_spread_that_of_the_stretches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Drain swings from one stretch to the next: the median of three would be either end of it."""
    stretches = {
        "drain": [one(0, tokens_per_s=80.0), one(1, tokens_per_s=120.0), one(2, tokens_per_s=80.0)],
        "repack": [one(n, tokens_per_s=120.0) for n in range(3)],
    }
    lives = {"drain": [one(0, tokens_per_s=96.0)], "repack": [one(0, tokens_per_s=120.0)]}
    told = report(lives, stretches, [], simulated=True)
    assert told["figures"]["repack_gain"] == 1.25
    assert told["spread"]["repack_gain"] == {"min": 1.0, "max": 1.5, "stretches": [1.5, 1.0, 1.5]}
    assert told["missed"][0] == "repack_gain is 1.25, at least 1.26 was wanted"
    say(told, [])
    assert "1 .. 1.5" in capsys.readouterr().out


def test_lives_apart_give_the_median_of_their_ratios() -> None:
    lives = {
        "drain": [one(n) for n in range(3)],
        "repack": [one(n, tokens_per_s=100.0 + 10 * n) for n in range(3)],
    }
    assert report(lives, lives, [], simulated=True)["figures"]["repack_gain"] == 1.1
