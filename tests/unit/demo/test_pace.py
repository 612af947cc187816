"""How many prompts a step takes, and how many steps a budget has room for."""

from __future__ import annotations

import math

import pytest

from deploy.demo.training.pace import Pace, Taken

PACE = Pace(steps=10, budget_s=240.0, groups_max=4, groups_min=2, group_s=1.0)


def played(pace: Pace, *, wait_s: float, group_s: float) -> tuple[list[Taken], float]:
    """A whole run whose steps take so long."""
    taken: list[Taken] = []
    elapsed = 0.0
    while (plan := pace.next(taken, elapsed)).groups:
        taken.append(Taken(plan.groups, wait_s, plan.groups * group_s))
        elapsed += wait_s + plan.groups * group_s
    return taken, elapsed


def test_a_fast_processor_takes_whole_steps_and_all_of_them() -> None:
    taken, elapsed = played(PACE, wait_s=3, group_s=2)
    assert [step.groups for step in taken] == [4] * 10
    assert elapsed == pytest.approx(110)


def test_a_slow_one_takes_fewer_prompts_so_that_all_steps_fit() -> None:
    taken, elapsed = played(PACE, wait_s=3, group_s=8)
    assert len(taken) == 10
    assert {step.groups for step in taken} == {2, 3, 4}, "the first by a guess that was too good"
    assert elapsed <= 240


def test_a_first_guess_spares_the_first_step() -> None:
    assert Pace(10, 240.0, 4, 2, group_s=8.0).next([], 0.0).groups == 2
    assert PACE.next([], 0.0).groups == 4


@pytest.mark.parametrize("group_s", [15.0, 30.0, 60.0])
def test_a_very_slow_one_takes_fewer_steps_within_the_budget(group_s: float) -> None:
    taken, elapsed = played(PACE, wait_s=5, group_s=group_s)
    assert 1 <= len(taken) < 10
    assert elapsed <= 240 + 2 * group_s, "the first step was the guess's"


@pytest.mark.parametrize("elapsed", [0.0, 1000.0])
def test_the_first_step_is_always_taken(elapsed: float) -> None:
    assert Pace(10, 1.0, 4, 2, group_s=500.0).next([], elapsed).groups == 2


def test_the_last_decision_says_why_and_every_one_when_the_run_ends() -> None:
    plan = PACE.next([Taken(4, 10.0, 40.0)], 50.0)
    assert (plan.groups, plan.steps) == (2, 1 + 190 // 30)
    assert plan.end_s == pytest.approx(50 + 6 * 30)
    assert plan.reason == "2 of 4 prompts: some 30 s, where a step has 21 s"
    over = PACE.next([Taken(2, 5.0, 60.0)] * 3, 195.0)
    assert (over.groups, over.steps, over.end_s) == (0, 3, 195.0)
    assert over.reason == "another step would take some 65 s, and 45 s of the budget are left"
    done = PACE.next([Taken(4, 1.0, 1.0)] * 10, 20.0)
    assert (done.groups, done.reason) == (0, "all 10 steps are done")


def test_without_a_budget_every_step_is_whole() -> None:
    taken, _ = played(Pace(5, math.inf, 4, 2, group_s=0.0), wait_s=1, group_s=1000)
    assert [step.groups for step in taken] == [4] * 5
