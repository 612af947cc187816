"""The curve of rewards: whole, true on the mean, and bounded."""

from __future__ import annotations

import math
import random

import pytest

from gateway.core.reward_curve import POINTS_MAX, WIDTH_S, RewardCurve


def test_sessions_of_about_one_time_are_one_point() -> None:
    curve = RewardCurve()
    for t, reward in ((800.0, 0.0), (800.5, 1.0), (801.0, 0.5), (800.0 + WIDTH_S, 2.0)):
        curve.add(t, reward)
    first, second = curve.points().values()
    assert (first.t_unix_s, first.sessions, first.mean) == (801.0, 3, pytest.approx(0.5))
    assert (second.sessions, second.mean) == (1, 2.0)


@pytest.mark.parametrize("gap_s", [0.01, 3.0, 900.0], ids=["dense", "steady", "sparse"])
def test_it_covers_all_of_a_long_run_in_a_bounded_number_of_points(gap_s: float) -> None:
    draw, curve, sessions = random.Random(1), RewardCurve(), 5000
    rewards = [draw.random() for _ in range(sessions)]
    for at, reward in enumerate(rewards):
        curve.add(1e9 + at * gap_s, reward)
        assert len(curve.points()) <= POINTS_MAX
    points = list(curve.points().values())
    assert sum(point.sessions for point in points) == sessions
    assert sum(point.sessions * point.mean for point in points) == pytest.approx(sum(rewards))
    assert points[-1].t_unix_s == 1e9 + (sessions - 1) * gap_s
    if sessions * gap_s > POINTS_MAX * WIDTH_S:
        assert len(points) >= POINTS_MAX // 2 - 1, "as fine as the bound allows"


def test_the_mean_of_what_is_finite_is_finite() -> None:
    curve = RewardCurve()
    for reward in (1.7e308, 1.7e308, 1.7e308, -1.7e308):
        curve.add(0.0, reward)
    (point,) = curve.points().values()
    assert math.isfinite(point.mean)


def test_a_clock_that_was_set_back_loses_nothing() -> None:
    curve = RewardCurve()
    for t in (1000.0, 500.0, 1001.0):
        curve.add(t, 1.0)
    assert sum(point.sessions for point in curve.points().values()) == 3
