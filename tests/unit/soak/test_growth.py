"""Growth is the slope within lives: restarts are no growth, and a leak is one, however often its process is killed."""

from __future__ import annotations

import os

from tests.soak.growth import POINTS_MIN, WARM_UP_S, Growth, Sample, largest, sample, slope_within


def lives(leak_mb_s: float, levels: tuple[float, ...]) -> Growth:
    """Processes one after the other, 300 s each; each life begins at a level of its own."""
    growth = Growth()
    for number, level in enumerate(levels):
        for life_s in range(0, 300, 5):
            rss = level + leak_mb_s * life_s + (50 if life_s < WARM_UP_S else 0)
            growth.add("engine", "engine-1", number, Sample(300.0 * number + life_s, float(life_s), rss, 10, 0))
    return growth


def test_restarts_and_warming_up_are_no_growth() -> None:
    found = lives(0.0, (100, 150, 180, 400)).figures(1200)["engine"]
    assert found == {"rss_mb": 0.0, "fds": 0.0, "shm_mb": 0.0}


def test_a_leak_is_as_large_as_the_longest_life_of_the_last_half_made_it() -> None:
    assert lives(0.1, (100, 400, 90, 300)).figures(1200)["engine"]["rss_mb"] == 0.1 * (295 - WARM_UP_S)


def test_the_longest_life_of_the_last_half_has_its_levels() -> None:
    growth = lives(0.1, (100, 400, 90, 300))
    for life_s in range(0, 600, 5):
        rss = 70.0 if life_s < 300 else 90.0
        growth.add("engine", "engine-2", 9, Sample(600.0 + life_s, float(life_s), rss, 10, 0))
    found = growth.longest_lives(1200)["engine"]
    assert (found["process"], found["minutes"]) == ("engine-2", 6.9)
    assert (found["rss_mb"][0], found["rss_mb"][-1], found["fds"]) == (70.0, 90.0, [10] * len(found["fds"]))
    assert growth.longest_lives(9000) == {}


def test_the_first_half_does_not_count() -> None:
    growth = lives(0.0, (100, 100, 100, 100))
    for at in range(0, 600, 5):
        growth.add("relay", "relay-1", 1, Sample(float(at), 1000.0, float(at), 0, 0))
    assert growth.figures(1200)["relay"]["rss_mb"] is None
    growth.forget_before(600)
    assert "relay" not in growth.figures(1200) or growth.figures(1200)["relay"]["rss_mb"] is None


def test_too_few_points_say_nothing() -> None:
    assert slope_within([[(float(n), float(n)) for n in range(POINTS_MIN - 1)]]) is None
    assert slope_within([[(float(n), 2.0 * n) for n in range(POINTS_MIN)]]) == 2.0
    assert slope_within([]) is None


def test_the_largest_of_all_kinds_is_the_figure() -> None:
    figures = {"a": {"fds": 1.0}, "b": {"fds": 3.5}, "c": {"fds": None}}
    assert largest(figures, "fds") == 3.5
    assert largest({"c": {"fds": None}}, "fds") is None


def test_a_process_is_measured_and_one_that_has_ended_is_not() -> None:
    found = sample(os.getpid(), 1.0, 2.0)
    assert found is not None
    assert found.rss_mb > 1
    assert found.fds >= 3
    assert sample(2**22 + 1, 0, 0) is None
