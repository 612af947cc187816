"""How many tokens engines gather for one event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.curves import mean_pace
from gateway.core.placing.event_size import (
    EVENT_S_MAX,
    EVENTS_PER_S,
    TOKENS_PER_EVENT_MAX,
    TOKENS_UNREAD,
    TURNS_FEW,
    tokens_per_event,
)

TURNS = st.integers(0, 10_000)
PACES = st.floats(1e-5, 10.0)


@given(TURNS, PACES, st.booleans(), st.integers(1, 100))
def test_what_was_configured_stands(turns: int, token_s: float, streamed: bool, configured: int) -> None:
    assert tokens_per_event(turns, token_s, streamed=streamed, configured=configured) == configured


@given(TURNS, PACES)
def test_nobody_reads_along_so_the_engine_gathers(turns: int, token_s: float) -> None:
    streamed, whole = (tokens_per_event(turns, token_s, streamed=read, configured=None) for read in (True, False))
    assert whole == max(TOKENS_UNREAD, streamed)


@given(TURNS, TURNS, PACES, st.booleans())
def test_more_turns_never_mean_smaller_events_and_a_bound_holds(
    one: int, other: int, token_s: float, streamed: bool
) -> None:
    few, many = (tokens_per_event(n, token_s, streamed=streamed, configured=None) for n in sorted((one, other)))
    assert 1 <= few <= many <= TOKENS_PER_EVENT_MAX


@given(TURNS, PACES)
def test_a_reader_waits_about_a_second_at_most_for_what_is_there(turns: int, token_s: float) -> None:
    gathered = tokens_per_event(turns, token_s, streamed=True, configured=None)
    assert gathered == 1 or gathered * token_s <= EVENT_S_MAX + token_s / 2 + 1e-9


@given(st.integers(0, TURNS_FEW - 1), PACES)
def test_few_readers_see_every_token_at_once(turns: int, token_s: float) -> None:
    assert tokens_per_event(turns, token_s, streamed=True, configured=None) == 1


@given(st.integers(TURNS_FEW, EVENTS_PER_S), st.sampled_from([0.005, 0.02, 0.125]))
def test_turns_of_any_speed_make_as_many_events(turns: int, token_s: float) -> None:
    """Within half a token of each event, where no bound stands in between."""
    gathered = tokens_per_event(turns, token_s, streamed=True, configured=None)
    if 1 < gathered < TOKENS_PER_EVENT_MAX:
        assert abs(gathered * token_s - turns / EVENTS_PER_S) <= token_s / 2 + 1e-9


def test_a_pace_that_was_measured_a_little_slow_costs_no_token_of_an_event() -> None:
    assert tokens_per_event(512, 0.1251, streamed=True, configured=None) == 8


@given(PACES, PACES, st.integers(1, 64))
def test_the_mean_pace_goes_where_what_is_seen_stays(start: float, token_s: float, num_tokens: int) -> None:
    pace = start
    for _ in range(2_000):
        pace = mean_pace(pace, num_tokens, token_s * num_tokens)
    assert abs(pace - token_s) <= 0.01 * token_s + 1e-6
    assert mean_pace(token_s, 8, 1e6) < 2 * token_s, "a pause is no pace"
