"""What a running turn will still need, from those that ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.state import TurnLoad
from gateway.core.packing.engine_views import SessionLoad, weigh
from gateway.core.packing.lengths import KEPT, SEEN_MIN, TurnLengths
from gateway.core.types import SessionId, TurnId
from tests.bench.repack.trace import lengths
from tests.support.quick import examples
from tests.unit.gateway_core.scanned_lengths import turn_load


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
    assert known.growth(1000, 0, 500, np.array([200, 0]), frees=False).tolist() == [150, 0]
    assert known.growth(1000, 0, 50, 200, frees=False) == 38, "no more than its budget"


TOKENS = st.integers(0, 6000)
LENGTHS = st.lists(st.integers(0, 5000), max_size=300)
EXPECTED = st.just(0) | st.integers(1, 9000) | st.just(2**53 - 1)


@given(LENGTHS, TOKENS, st.integers(1, 6000), TOKENS, EXPECTED)
@examples(200)
def test_expectations_stay_within_what_can_be(
    values: list[int], generated: int, left: int, further: int, expected: int
) -> None:
    known = learnt(values)
    assert 1 <= known.remaining(generated, left, expected) <= max(1, left)
    assert 0.0 <= known.alive(generated, further, expected) <= 1.0
    assert 0 <= known.growth(77, generated, left, further, frees=False, expected=expected) <= min(left, further)
    assert -77 <= known.growth(77, generated, left, further, frees=True, expected=expected) <= min(left, further)


@given(st.lists(st.integers(1, 5000), max_size=300), st.integers(1, 9000), st.integers(1, 20_000))
@examples(200)
def test_a_turn_that_begins_is_as_long_as_its_client_expects(values: list[int], expected: int, left: int) -> None:
    assert learnt(values).remaining(0, left, expected) == min(left, expected)


@given(LENGTHS, TOKENS, TOKENS, TOKENS, st.integers(1, 6000))
@examples(200)
def test_a_turn_that_outlived_what_was_expected_is_as_any_other(
    values: list[int], expected: int, more: int, further: int, left: int
) -> None:
    known, generated = learnt(values), expected + more
    assert known.remaining(generated, left, expected) == known.remaining(generated, left)
    assert known.alive(generated, further, expected) == known.alive(generated, further)


@given(st.lists(st.integers(1, 999), min_size=SEEN_MIN, max_size=60), st.integers(1, 8), st.data(), TOKENS)
@examples(200)
def test_a_turn_of_so_many_times_the_length_has_a_tail_of_so_many_times_the_length(
    drawn: list[int], times: int, data: st.DataObject, further: int
) -> None:
    """It is guessed as if all turns that ended had been so many times as long."""
    values = [*drawn, *(1000 - value for value in drawn)]
    known, longer, expected = learnt(values), learnt([times * value for value in values]), 500 * times
    assert (known.mean, longer.mean) == (500, expected)
    generated = data.draw(st.integers(0, expected - 1))
    assert known.remaining(generated, 10**6, expected) == longer.remaining(generated, 10**6)
    assert known.alive(generated, further, expected) == longer.alive(generated, further)


def test_what_is_expected_of_a_turn_weighs_in_plans() -> None:
    def weighs(known: TurnLengths, expected: int | None, generated: int = 0) -> SessionLoad:
        turn = running(100 + generated, 10_000 - generated, generated, ends=True, expected=expected)
        return weighed(known, [turn])[0]

    known = learnt([100, 300] * 50)
    assert [weighs(known, e).remaining_s for e in (None, 50, 2000)] == [20.0, 5.0, 200.0]
    short, usual, long = (weighs(known, e).kv_at for e in (50, None, 2000))
    assert short[3] < usual[3] < long[3] == 300, "by when others have typically ended"
    assert weighs(known, 50, 60) == weighs(known, None, 60), "it has outlived that"
    assert [weighs(learnt([]), e).remaining_s for e in (None, 400)] == [500.0, 40.0], "before anything was learnt"
    assert weighs(learnt([]), 400).kv_at == [100, *[500] * 4]


def running(tokens: int, left: int, generated: int, *, ends: bool, expected: int | None) -> TurnLoad:
    turn_id, session_id = TurnId("t"), SessionId("s")
    more: dict[str, Any] = {"ends_session": ends, "expected_tokens": expected or 0}
    return TurnLoad(turn_id, session_id, tokens, tokens + left, generated=generated, **more)


def weighed(known: TurnLengths, turns: list[TurnLoad]) -> list[SessionLoad]:
    each_s = np.full(len(turns), 0.1)
    return weigh(turns, lengths=known, each_s=each_s, back_s=7.0, context=0).sessions()


TURNS = st.tuples(TOKENS, st.integers(1, 500), st.integers(0, 6000), st.booleans(), st.none() | st.integers(1, 9000))


@given(LENGTHS, st.lists(TURNS, min_size=1, max_size=20))
@examples(200)
def test_many_turns_at_once_weigh_what_each_weighs(values: list[int], drawn: list[Any]) -> None:
    generated, prompts, left, ends, expected = map(list, zip(*drawn, strict=True))
    tokens = [a + b for a, b in zip(generated, prompts, strict=True)]
    turns = [
        running(*each, ends=end, expected=e)
        for *each, end, e in zip(tokens, left, generated, ends, expected, strict=True)
    ]
    expected_loads = [
        turn_load(
            turn,
            values,
            generated=generated[i],
            moves=0,
            ends_session=ends[i],
            each_s=0.1,
            back_s=7.0,
            stays=False,
            expected=expected[i],
        )
        for i, turn in enumerate(turns)
    ]
    assert weighed(learnt(values), turns) == expected_loads


def test_memory_is_bounded_and_old_lengths_fade() -> None:
    known = learnt([5000] * KEPT + [10] * KEPT)
    assert known.mean == 10
    assert known.remaining(0, 9999) == 10
