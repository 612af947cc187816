"""Who goes to the tail, who comes back, and that the order never flaps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import pytest

from paramserver.core.stragglers import GOOD_AFTER, SLOW_AFTER, Hop, Stragglers

CHAIN = ("m", "a", "b", "c", "d")


def pass_on(
    judged: Stragglers, versions: range, chain: Sequence[str] = CHAIN, *, slow: Collection[tuple[str, str]] = ()
) -> list[frozenset[str]]:
    """Each version goes down the chain; `slow` pairs (upstream, relay) run at a tenth. Who is slow after each."""
    after = []
    for version in versions:
        for upstream, relay in pairwise(chain):
            is_slow = (upstream, relay) in slow or (upstream, "*") in slow or ("*", relay) in slow
            judged.observe(Hop(version, upstream, relay, 1e8 if is_slow else 1e9))
        after.append(judged.slow)
    return after


def test_one_slow_version_moves_nobody() -> None:
    judged = Stragglers()
    assert set(pass_on(judged, range(1, 2), slow=[("*", "b")])) == {frozenset()}
    assert set(pass_on(judged, range(2, 9))) == {frozenset()}


def test_a_relay_slow_for_several_versions_goes_to_the_tail_and_the_reason_says_so() -> None:
    judged = Stragglers()
    pass_on(judged, range(1, SLOW_AFTER + 2), slow=[("*", "b")])
    assert judged.reasons == {"b": "its hop ran at 10% of the others for 2 versions"}


def test_it_comes_back_after_good_versions_and_the_next_time_after_more() -> None:
    judged, version, waited = Stragglers(), 1, []
    for _ in range(3):
        pass_on(judged, range(version, version + SLOW_AFTER + 1), slow=[("*", "b")])
        version += SLOW_AFTER + 1
        assert judged.slow == {"b"}
        back = pass_on(judged, range(version, version + 40), ("m", "a", "c", "d", "b")).index(frozenset())
        version += 40
        waited.append(back)
    assert waited == [GOOD_AFTER, 2 * GOOD_AFTER, 4 * GOOD_AFTER]


def test_a_slow_uplink_is_found_behind_the_second_downstream() -> None:
    judged = Stragglers()
    pass_on(judged, range(1, 4), slow=[("a", "*")])
    assert judged.slow == {"b"}, "the downstream is suspected first"
    pass_on(judged, range(4, 8), ("m", "a", "c", "d", "b"), slow=[("a", "*")])
    assert judged.reasons == {"a": "2 relays were slow behind it"}, "b is cleared"


def test_those_behind_a_slow_relay_are_blameless() -> None:
    """Their rates count active time only, so only the slow hop itself is slow."""
    judged = Stragglers()
    pass_on(judged, range(1, 12), slow=[("m", "a")])
    assert judged.slow <= {"a"}


@pytest.mark.parametrize("members", [2, 3])
def test_with_too_few_hops_there_is_nothing_to_compare(members: int) -> None:
    judged = Stragglers()
    pass_on(judged, range(1, 9), CHAIN[:members], slow=[("*", "a")])
    assert not judged.slow


def test_who_leaves_is_forgotten() -> None:
    judged = Stragglers()
    pass_on(judged, range(1, 4), slow=[("*", "b")])
    judged.forget(frozenset("mac"))
    assert not judged.slow
    pass_on(judged, range(4, 6), slow=[("*", "b")])
    assert not judged.slow, "it begins anew"


def test_old_versions_come_too_late() -> None:
    judged = Stragglers()
    pass_on(judged, range(5, 6))
    pass_on(judged, range(1, 4), slow=[("*", "b")])
    pass_on(judged, range(6, 8))
    assert not judged.slow
