"""How many tokens engines gather for one event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.pacing import TOKENS_PER_EVENT_MAX, TOKENS_UNREAD, TURNS_PER_TOKEN, tokens_per_event

TURNS = st.integers(0, 10_000)


@given(TURNS, st.booleans(), st.integers(1, 100))
def test_what_was_configured_stands(turns: int, streamed: bool, configured: int) -> None:
    assert tokens_per_event(turns, streamed=streamed, configured=configured) == configured


@given(TURNS)
def test_nobody_reads_along_so_the_engine_gathers(turns: int) -> None:
    streamed, whole = (tokens_per_event(turns, streamed=read, configured=None) for read in (True, False))
    assert whole == max(TOKENS_UNREAD, streamed)


@given(TURNS, TURNS, st.booleans())
def test_more_turns_never_mean_smaller_events_and_a_bound_holds(one: int, other: int, streamed: bool) -> None:
    few, many = (tokens_per_event(turns, streamed=streamed, configured=None) for turns in sorted((one, other)))
    assert 1 <= few <= many <= TOKENS_PER_EVENT_MAX


def test_few_readers_see_every_token_at_once() -> None:
    assert tokens_per_event(2 * TURNS_PER_TOKEN - 1, streamed=True, configured=None) == 1
