"""Retry-After from how fast places come free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.placing.retry_after import (
    RETRY_MAX_S,
    RETRY_MIN_S,
    UNKNOWN_S,
    Pace,
    retry_for_a_batch,
    retry_for_a_place,
)


def pace(*times: float) -> Pace:
    found = Pace()
    for time in times:
        found.happened(time)
    return found


@pytest.mark.parametrize(("ahead", "seconds"), [(0, 2.0), (9, 20.0), (1000, RETRY_MAX_S)])
def test_a_place_comes_after_those_ahead(ahead: int, seconds: float) -> None:
    assert retry_for_a_place(ahead, pace(0, 2, 4, 6), 6.0) == seconds


def test_a_pace_that_stopped_is_slow() -> None:
    assert retry_for_a_place(0, pace(0, 2, 4, 6), 46.0) == 46 / 4


@pytest.mark.parametrize(("now", "seconds"), [(60.0, 30.0), (70.0, 20.0), (89.5, RETRY_MIN_S)])
def test_a_batch_is_taken_an_interval_after_the_last(now: float, seconds: float) -> None:
    assert retry_for_a_batch(pace(0, 30, 60), now) == seconds


def test_before_anything_was_measured() -> None:
    assert retry_for_a_batch(pace(1.0), 2.0) == retry_for_a_place(3, pace(), 2.0) == UNKNOWN_S


@given(st.lists(st.floats(0, 1e6), max_size=100), st.floats(0, 1e6), st.integers(0, 10_000))
def test_it_is_always_within_its_bounds(gaps: list[float], since: float, ahead: int) -> None:
    now, found = 0.0, Pace()
    for gap in gaps:
        found.happened(now := now + gap)
    for seconds in (retry_for_a_place(ahead, found, now + since), retry_for_a_batch(found, now + since)):
        assert RETRY_MIN_S <= seconds <= RETRY_MAX_S
