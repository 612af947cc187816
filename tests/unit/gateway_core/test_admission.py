"""Whose batches bound admission, and which groups wait for whom."""

from __future__ import annotations

import random

from gateway.core.admission import READER_S, READERS_MAX, Readers, stranded, waiting_groups


def test_a_look_decides_nothing_and_a_reader_that_waits_or_comes_again_does() -> None:
    readers = Readers()
    readers.requested("by hand", 1, None, 4, 0.0, waits=False)
    assert not readers.counting(1.0)
    readers.requested("trainer", 32, None, 4, 1.0, waits=True)
    readers.requested("by hand", 1, None, 4, 2.0, waits=False)  # again: but it takes less
    decides = readers.counting(3.0)[0]
    assert (decides.name, decides.bound) == ("trainer", 160)


def test_one_small_sample_under_the_trainers_name_lowers_nothing_and_a_second_one_does() -> None:
    readers = Readers()
    for now, batch in enumerate((64, 2, 64, 2)):
        readers.requested("trainer", batch, None, 4, float(now), waits=True, version=now)
        [found] = readers.counting(float(now))
        assert (found.batch, found.version) == (64, now)
    readers.requested("trainer", 2, None, 4, 5.0, waits=True)
    assert [found.batch for found in readers.counting(5.0)] == [2]


def test_who_takes_most_decides_while_it_comes_and_who_went_does_not_count() -> None:
    readers = Readers()
    readers.requested("large", 100, None, 0, 0.0, waits=True)
    readers.requested("small", 10, None, 1, READER_S, waits=True)
    assert [r.name for r in readers.counting(READER_S)] == ["large", "small"]
    assert [r.name for r in readers.counting(READER_S + 1)] == ["small"]
    assert [r.name for r in readers.counting(READER_S * 9, {"large"}.__contains__)] == ["large"], "a long step"
    assert not readers.counting(READER_S * 9)


def test_readers_are_bounded() -> None:
    readers = Readers()
    for number in range(READERS_MAX + 5):
        readers.requested(f"r{number}", 1, None, 0, 0.0, waits=True)
    assert len(readers._of) == READERS_MAX


def test_groups_that_lack_members_name_who_is_awaited() -> None:
    live = {"a": {"s1", "s0"}, "whole": {"x"}}
    found = waiting_groups({"a": 2, "b": 3, "whole": 4, "closed": 2}, {"closed": 2}, 4, live)
    assert [(g.group_id, g.live, g.stranded) for g in found] == [("a", ["s0", "s1"], False), ("b", [], True)]
    assert str(found[0]) == "group a: 2 of 4 are buffered; it waits for s0, s1"
    assert "no member is running" in str(found[1])


def test_what_is_stranded_is_counted_as_the_groups_tell_it() -> None:
    draw = random.Random(1)
    for _ in range(200):
        buffered = {name: draw.randint(1, 5) for name in "abcdef" if draw.random() < 0.7}
        closed = {name: draw.randint(1, 5) for name in "abc" if draw.random() < 0.5}
        live = {draw.choice("abcdefgh"): {f"s{i}"} for i in range(draw.randint(0, 4))}
        told = waiting_groups(buffered, closed, 4, live)
        found = stranded(buffered, closed, 4, live.keys())
        assert found == sum(group.buffered for group in told if group.stranded)
