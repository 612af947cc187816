"""What a running turn will still need, from those that ended."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.lengths import KEPT, SEEN_MIN, TurnLengths
from tests.bench.repack.trace import lengths


def learnt(values: list[int]) -> TurnLengths:
    known = TurnLengths()
    for value in values:
        known.ended(value)
    return known


def test_before_enough_turns_ended_half_of_the_budget_is_expected() -> None:
    few = learnt([10] * (SEEN_MIN - 1))
    assert (few.remaining(0, 1000), few.alive(0, 500)) == (500, 1.0)
    few.ended(10)
    assert (few.remaining(0, 1000), few.alive(0, 500)) == (10, 0.0)


def test_who_is_past_the_median_has_longer_to_go() -> None:
    """The long tail: of those that live at ten times the median half as long again is to come; of all, 1.6 medians."""
    drawn = lengths(KEPT)
    known = learnt(drawn)
    assert known.remaining(0, 16384) == pytest.approx(sum(drawn) / KEPT, rel=0.01)
    assert known.remaining(4800, 16384) > known.remaining(0, 16384)
    assert known.alive(0, 1600) == pytest.approx(0.5, abs=0.05)


def test_a_call_frees_its_kv_and_a_session_keeps_it() -> None:
    known = learnt([100] * 50 + [300] * 50)
    assert known.growth(1000, 0, 500, 200, frees=True) == -400  # half are gone, the others hold 200 more
    assert known.growth(1000, 0, 500, 200, frees=False) == 150
    assert known.growth(1000, 0, 50, 200, frees=False) == 38, "no more than its budget"


@given(st.lists(st.integers(1, 5000), max_size=300), st.integers(0, 6000), st.integers(1, 6000), st.integers(0, 6000))
@settings(max_examples=100, deadline=None)
def test_expectations_stay_within_what_can_be(values: list[int], generated: int, left: int, further: int) -> None:
    known = learnt(values)
    assert 1 <= known.remaining(generated, left) <= max(1, left)
    assert 0.0 <= known.alive(generated, further) <= 1.0
    assert 0 <= known.growth(77, generated, left, further, frees=False) <= min(left, further)
    assert -77 <= known.growth(77, generated, left, further, frees=True) <= min(left, further)


def test_memory_is_bounded_and_old_lengths_fade() -> None:
    known = learnt([5000] * KEPT + [10] * KEPT)
    assert known.mean == 10
    assert known.remaining(0, 9999) == 10
