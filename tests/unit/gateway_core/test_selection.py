"""Which entries of the experience buffer a sample gets, and in which order."""

from __future__ import annotations

import pytest

from gateway.core.selection import STRATEGIES, Entry, check_wanted, ordered, whole_groups
from protos.errors import InvalidRequest


def entry(seq: int, group: str = "g") -> Entry:
    return Entry(seq, f"s{seq}", group, seq)


def test_fifo_is_the_order_of_finishes_and_newest_its_reverse() -> None:
    entries = [entry(2), entry(3), entry(1)]
    assert [e.seq for e in ordered(entries)] == [1, 2, 3]
    assert [e.seq for e in ordered(entries, "newest")] == [3, 2, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_are_whole_and_stand_by_the_member_that_ranks_first(strategy: str) -> None:
    entries = [entry(1, "a"), entry(2, "b"), entry(3, "c"), entry(4, "b"), entry(5, "a"), entry(6, "d")]
    expected = {"newest": [5, 1]}.get(strategy, [1, 5])
    assert [e.seq for e in whole_groups(entries, 1, 2, {}, strategy)] == expected  # type: ignore[arg-type]
    both = whole_groups(entries, 9, 2, {"d": 1}, strategy)  # type: ignore[arg-type]
    assert sorted(e.seq for e in both) == [1, 2, 4, 5, 6], "d was closed with one member; c lacks one"


def test_whole_groups_need_groups() -> None:
    with pytest.raises(InvalidRequest, match="group_size"):
        check_wanted(8, None, None, "complete_groups")
    assert check_wanted(None, 2, 4, "complete_groups") == 2
