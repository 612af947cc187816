"""Which entries of the experience buffer a sample gets, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.selection import (
    STRATEGIES,
    Bound,
    Entry,
    Strategy,
    check_wanted,
    of_equal_rewards,
    ordered,
    whole_groups,
)
from protos.errors import InvalidRequest
from protos.packed import Facts


def entry(seq: int, group: str = "g", uses: int = 0, **facts: Any) -> Entry:
    return Entry(seq, f"s{seq}", group, seq, Facts(**facts), uses)


def test_fifo_is_the_order_of_finishes_and_newest_its_reverse() -> None:
    entries = [entry(2), entry(3), entry(1)]
    assert [e.seq for e in ordered(entries)] == [1, 2, 3]
    assert [e.seq for e in ordered(entries, "newest")] == [3, 2, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_are_whole_and_stand_by_the_member_that_ranks_first(strategy: Strategy) -> None:
    entries = [entry(1, "a"), entry(2, "b"), entry(3, "c"), entry(4, "b"), entry(5, "a"), entry(6, "d")]
    expected = {"newest": [5, 1]}.get(strategy, [1, 5])
    assert [e.seq for e in whole_groups(ordered(entries, strategy), 1, 2, {})] == expected
    both = whole_groups(ordered(entries, strategy), 9, 2, {"d": 1})
    assert sorted(e.seq for e in both) == [1, 2, 4, 5, 6], "d was closed with one member; c lacks one"


def test_whole_groups_need_groups() -> None:
    with pytest.raises(InvalidRequest, match="group_size"):
        check_wanted(8, None, None, "complete_groups")
    assert check_wanted(None, 2, 4, "complete_groups") == 2


def test_the_highest_priority_is_first_and_equals_stand_as_they_finished() -> None:
    entries = [entry(1), entry(2, metrics={"priority": 2.0}), entry(3, metrics={"priority": 2.0}), entry(4)]
    entries.append(entry(5, metrics={"priority": -1.0}))
    assert [e.seq for e in ordered(entries, "priority")] == [2, 3, 1, 4, 5]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_is_used_once_before_any_is_used_again(strategy: Strategy) -> None:
    entries = [entry(1, uses=1), entry(2), entry(3, uses=2), entry(4)]
    assert {e.seq for e in ordered(entries, strategy)} == {2, 4}, "once, unless asked otherwise"
    assert [e.uses for e in ordered(entries, strategy, uses_max=3)] == [0, 0, 1, 2]


def test_staleness_is_bounded_by_the_oldest_token_or_by_each() -> None:
    mixed = entry(1, versions={1: 900, 4: 3})
    assert not Bound(5, 2).allows(mixed)
    assert Bound(5, 2, by_token=True).allows(mixed), "its newest tokens are within the bound"
    assert not Bound(7, 2, by_token=True).allows(mixed)
    assert Bound(7).allows(mixed), "no bound"


def test_groups_of_equal_rewards_are_found_by_all_leaves() -> None:
    same = [entry(1, "same", rewards=[1.0]), entry(2, "same", rewards=[1.0, 1.0])]
    mixed = [entry(3, "mixed", rewards=[0.0]), entry(4, "mixed", rewards=[0.0, 1.0])]
    assert of_equal_rewards([*same, *mixed]) == same
