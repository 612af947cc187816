"""What the holders of keys may have at once."""

from __future__ import annotations

import pytest

from gateway.core.access import NOBODY
from gateway.core.key_bounds import SHOWN_MAX, KeyBounds
from protos.errors import OutOfCapacity


def test_a_holder_has_so_many_sessions_and_others_theirs() -> None:
    bounds = KeyBounds(sessions_max=2)
    for _ in range(2):
        bounds.check_session("alice")
        bounds.session_began("alice")
    with pytest.raises(OutOfCapacity, match=r"alice has 2 live sessions .*--sessions-per-key") as refused:
        bounds.check_session("alice")
    assert refused.value.retry_after_s > 0
    bounds.check_session("bob")
    bounds.session_ended("alice")
    bounds.check_session("alice")
    assert bounds.refused == 1


def test_choices_of_a_request_count_each() -> None:
    bounds = KeyBounds(turns_max=4)
    bounds.check_turns("alice", 4)
    bounds.turn_began("alice")
    with pytest.raises(OutOfCapacity, match=r"1 turns run .*, and this request has 4 .*--turns-per-key"):
        bounds.check_turns("alice", 4)
    bounds.check_turns("alice", 3)


def test_without_a_bound_or_a_holder_nothing_is_refused() -> None:
    for bounds, owner in ((KeyBounds(), "alice"), (KeyBounds(1, 1), NOBODY)):
        for _ in range(10):
            bounds.check_session(owner)
            bounds.session_began(owner)
            bounds.check_turns(owner, 10)
            bounds.turn_began(owner)


def test_the_holders_with_the_most_are_shown_and_none_that_has_nothing() -> None:
    bounds = KeyBounds()
    for number in range(2 * SHOWN_MAX):
        for _ in range(number + 1):
            bounds.session_began(f"h{number}")
    bounds.session_began(NOBODY)
    bounds.turn_began("h0")
    shown = bounds.by_holder()
    assert len(shown) == SHOWN_MAX
    assert shown[f"h{2 * SHOWN_MAX - 1}"] == (2 * SHOWN_MAX, 0)
    for _ in range(2 * SHOWN_MAX):
        bounds.session_ended(f"h{2 * SHOWN_MAX - 1}")
    assert f"h{2 * SHOWN_MAX - 1}" not in bounds.by_holder()
