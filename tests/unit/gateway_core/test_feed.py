"""Deltas of tables, and the mailbox of a client that is slow."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.feed import BYTES_MAX, FRAMES_MAX, Mailbox, TableDelta, Tables, apply, compare, whole

KEYS = st.sampled_from("abcdef")
ROWS = st.dictionaries(KEYS, st.integers(0, 2))
TABLES = st.fixed_dictionaries({"engines": ROWS, "sessions": ROWS})


def delta(before: Tables, after: Tables) -> dict[str, TableDelta]:
    found: dict[str, TableDelta] = {}
    assert all(pause is None for pause in compare(before, after, found))
    return found


@given(st.lists(TABLES, min_size=1, max_size=6))
def test_a_snapshot_and_the_deltas_after_it_give_the_tables(states: list[dict[str, Any]]) -> None:
    shown: dict[str, dict[str, Any]] = {"engines": {"of another life": 1}}
    apply(shown, whole(states[0]), snapshot=True)
    assert shown == states[0]
    for before, after in itertools.pairwise(states):
        apply(shown, delta(before, after), snapshot=False)
        assert shown == after


@given(TABLES, TABLES)
def test_a_delta_has_what_differs_and_no_more(before: dict[str, Any], after: dict[str, Any]) -> None:
    kept = copy.deepcopy((before, after))
    found = delta(before, after)
    for name, change in found.items():
        assert change.set or change.gone
        assert all(before[name].get(key) != row for key, row in change.set.items())
        assert set(change.gone) == before[name].keys() - after[name].keys()
    assert (before, after) == kept


def test_a_row_that_takes_the_place_of_another_is_new_and_the_other_is_gone() -> None:
    assert delta({"t": {"a": 1}}, {"t": {"b": 1}}) == {"t": TableDelta({"b": 1}, ["a"])}


def test_a_client_begins_behind_and_gets_no_frame_before_its_snapshot() -> None:
    box = Mailbox()
    box.put(b"in the snapshot")
    assert box.take() is None
    box.behind = False
    box.put(b"after it")
    assert [box.take(), box.take()] == [b"after it", None]


def test_a_client_that_takes_nothing_is_behind_after_so_many_frames_and_holds_none() -> None:
    box = Mailbox(behind=False)
    for _ in range(FRAMES_MAX):
        box.put(b"x")
    assert not box.behind
    box.put(b"x")
    assert box.behind
    assert box.take() is None
    box.behind = False
    box.put(b"new")
    assert [box.take(), box.take()] == [b"new", None]


def test_the_bytes_of_a_mailbox_are_bounded_too_and_what_was_taken_does_not_count() -> None:
    box, half = Mailbox(behind=False), b"x" * (BYTES_MAX // 2)
    for _ in range(10):
        box.put(half)
        assert box.take() == half
    box.put(half)
    box.put(half)
    assert not box.behind
    box.put(b"x")
    assert box.behind
