"""Which connections are taken, refused, or make way."""

from __future__ import annotations

import random

import pytest

from gateway.core.connections import STRANGER_S, STRANGERS_MAX, Connections, Opened

ELSEWHERE = "192.0.2.1"


def test_beyond_the_total_a_connection_is_refused() -> None:
    found = Connections[int](2, 100, STRANGER_S)
    for number in range(2):
        assert found.opened(number, ELSEWHERE, 0.0) == Opened()
        found.known(number)
    assert found.opened(2, ELSEWHERE, 100.0) == Opened(refused="total")
    found.closed(2)
    found.closed(0)
    assert found.opened(3, ELSEWHERE, 100.0) == Opened()


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::2:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
    ],
)
def test_connections_are_counted_by_address(one: str, other: str, together: bool) -> None:
    found = Connections[int](100, 1, STRANGER_S)
    assert found.opened(0, one, 0.0) == Opened()
    assert found.opened(1, other, 0.0) == Opened(refused="per_address" if together else None)
    found.closed(0)
    assert found.opened(2, one, 0.0) == Opened()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", ""])
def test_those_of_this_host_are_not_counted_by_address(address: str) -> None:
    found = Connections[int](100, 1, STRANGER_S)
    assert [found.opened(number, address, 0.0).refused for number in range(3)] == [None] * 3


def test_a_stranger_makes_way_only_once_it_had_its_time() -> None:
    found = Connections[int](2, 100, STRANGER_S)
    found.opened(0, ELSEWHERE, 0.0)
    found.opened(1, ELSEWHERE, 1.0)
    assert found.opened(2, ELSEWHERE, STRANGER_S - 0.1) == Opened(refused="total")
    assert found.opened(3, ELSEWHERE, STRANGER_S) == Opened(leaves=0)
    found.known(1)
    found.known(3)
    assert found.opened(4, ELSEWHERE, 1000.0) == Opened(refused="total")


def test_many_strangers_make_way_before_there_is_no_room() -> None:
    found = Connections[int](10**6, 10**6, STRANGER_S)
    for number in range(STRANGERS_MAX):
        assert found.opened(number, ELSEWHERE, 0.0).leaves is None
    assert found.opened(-1, ELSEWHERE, 0.1).leaves is None, "an honest crowd begins at once"
    for number in range(10):
        assert found.opened(-2 - number, ELSEWHERE, STRANGER_S).leaves == number
    assert found.counts().strangers == STRANGERS_MAX + 1
    assert found.counts().made_way == 10


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_is_ever_exceeded_and_nothing_is_left(seed: int) -> None:
    chance = random.Random(seed)
    found, open_, known = Connections[int](20, 8, STRANGER_S), dict[int, str](), set[int]()
    for number in range(2000):
        now = number / 10
        if open_ and chance.random() < 0.45:
            gone = chance.choice(list(open_))
            found.closed(gone)
            del open_[gone]
        elif open_ and chance.random() < 0.5:
            known.add(one := chance.choice(list(open_)))
            found.known(one)
        else:
            address = f"192.0.2.{chance.randrange(5)}"
            opened = found.opened(number, address, now)
            if opened.leaves is not None:
                assert opened.leaves not in known
                del open_[opened.leaves]
            if opened.refused is None:
                open_[number] = address
        assert found.counts().open == len(open_) <= 20
        assert max([list(open_.values()).count(one) for one in set(open_.values())] or [0]) <= 8
    for connection in list(open_):
        found.closed(connection)
    assert (found.counts().open, found.counts().strangers, dict(found._of_address)) == (0, 0, {})
