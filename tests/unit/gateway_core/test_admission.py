"""Whose batches bound admission, and which groups wait for whom."""

from __future__ import annotations

import random

from gateway.core.admission import READER_S, READERS_MAX, Readers, stranded, waiting_groups


def test_a_look_decides_nothing_and_a_reader_that_waits_or_comes_again_does() -> None:
    readers = Readers()
    readers.requested("by hand", 1, None, 4, 0.0, waits=False)
    assert readers.deciding(1.0) is None
    readers.requested("trainer", 32, None, 4, 1.0, waits=True)
    readers.requested("by hand", 1, None, 4, 2.0, waits=False)  # again: but it takes less
    decides = readers.deciding(3.0)
    assert decides is not None
    assert (decides.name, decides.bound) == ("trainer", 160)


def test_who_takes_most_decides_while_it_comes_and_the_last_one_when_none_does() -> None:
    readers = Readers()
    readers.requested("large", 100, None, 0, 0.0, waits=True)
    readers.requested("small", 10, None, 1, READER_S, waits=True)
    first, then = readers.deciding(READER_S), readers.deciding(READER_S + 1)
    assert first is not None
    assert then is not None
    assert (first.name, then.name) == ("large", "small")
    later = readers.deciding(READER_S * 9)
    assert later is not None
    assert later.name == "small", "a trainer that is away for long still bounds what is made for it"


def test_readers_are_bounded() -> None:
    readers = Readers()
    for number in range(READERS_MAX + 5):
        readers.requested(f"r{number}", 1, None, 0, 0.0, waits=True)
    assert len(readers._of) == READERS_MAX


def test_groups_that_lack_members_name_who_is_awaited() -> None:
    live = [("s1", "a"), ("s0", "a"), ("x", "whole")]
    found = waiting_groups({"a": 2, "b": 3, "whole": 4, "closed": 2}, {"closed": 2}, 4, live)
    assert [(g.group_id, g.live, g.stranded) for g in found] == [("a", ["s0", "s1"], False), ("b", [], True)]
    assert str(found[0]) == "group a: 2 of 4 are buffered; it waits for s0, s1"
    assert "no member is running" in str(found[1])


def test_what_is_stranded_is_counted_as_the_groups_tell_it() -> None:
    draw = random.Random(1)
    for _ in range(200):
        buffered = {name: draw.randint(1, 5) for name in "abcdef" if draw.random() < 0.7}
        closed = {name: draw.randint(1, 5) for name in "abc" if draw.random() < 0.5}
        live = [(f"s{i}", draw.choice("abcdefgh")) for i in range(draw.randint(0, 4))]
        told = waiting_groups(buffered, closed, 4, live)
        found = stranded(buffered, closed, 4, {group for _, group in live})
        assert found == sum(group.buffered for group in told if group.stranded)
