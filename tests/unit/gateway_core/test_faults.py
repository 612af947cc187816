"""Faults that repeat: which engine is out, for how long, and which turn is lost."""

from __future__ import annotations

import pytest

from gateway.core.faults import CUTS_IN_PLACE_MAX, CUTS_MAX, OUT_MAX_S, Cuts, Faults, soonest_s
from gateway.core.types import EngineName, TurnId

A, B, C, D = (TurnId(name) for name in "abcd")


@pytest.mark.parametrize(
    ("turns", "out"),
    [([A, B], False), ([A, A, A, A], False), ([A, B, A, C], True), ([A, B, None, C], False), ([None, A, B, C], True)],
)
def test_an_engine_is_out_once_different_turns_failed_and_none_ended_well(
    turns: list[TurnId | None], out: bool
) -> None:
    faults = Faults()
    for turn in turns:
        if turn is None:
            faults.ended_well()
        else:
            faults.failed(turn, 10.0)
    assert (faults.left_s(10.0) > 0) is out


def test_it_comes_back_by_itself_and_each_failure_doubles_the_time() -> None:
    faults, now, times = Faults(), 0.0, []
    for turn in (A, B, C, *[D] * 20):
        if out_s := faults.failed(turn, now):
            times.append(out_s)
            assert faults.failed(TurnId("one that ran already"), now) == 0.0
            assert (faults.left_s(now + out_s / 2), faults.left_s(now + out_s)) == (out_s / 2, 0.0)
            now += out_s
    assert times[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert max(times) == OUT_MAX_S
    assert len(faults.turns) == 3, "and it stays small"
    faults.ended_well()
    assert [faults.failed(turn, now) for turn in (A, B, C)] == [0.0, 0.0, 1.0]


def test_who_waits_for_the_first_of_them() -> None:
    assert soonest_s([], 5.0) == 0.0
    assert soonest_s([Faults(until=9.0), Faults(until=7.0)], 5.0) == 2.0
    assert soonest_s([Faults(until=9.0), Faults()], 5.0) == 0.0


def test_a_turn_is_lost_where_it_does_not_get_on_or_is_cut_too_often() -> None:
    cuts = Cuts()
    for number in range(CUTS_IN_PLACE_MAX - 1):
        assert cuts.add(EngineName(f"e{number % 2}"), 4) == ""
    assert cuts.add(EngineName("e0"), 5) == "", "it got on"
    found = [cuts.add(EngineName("e1"), 5) for _ in range(CUTS_IN_PLACE_MAX - 1)]
    assert found[:-1] == [""] * (CUTS_IN_PLACE_MAX - 2)
    assert found[-1] == f"it failed {CUTS_IN_PLACE_MAX} times in a row after 5 tokens, on e0, e1"
    cuts = Cuts()
    full = [bool(cuts.add(EngineName("e0"), 0, full=True)) for _ in range(CUTS_MAX)]
    assert full == [False] * (CUTS_MAX - 1) + [True], "where it waits for room, no engine failed it"
    cuts = Cuts()
    assert [bool(cuts.add(EngineName("e0"), at)) for at in range(CUTS_MAX)] == [False] * (CUTS_MAX - 1) + [True]
