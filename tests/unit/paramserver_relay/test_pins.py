"""Pins: held until released or lapsed, never both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.core.pins import COPIES_MAX, PINS_MAX, Pins, keepers
from protos.errors import InvalidRequest, NotFound, OutOfCapacity


def test_a_pin_counts_until_it_is_released() -> None:
    pins = Pins()
    pins.add("x", "policy", 3, "engine", 10.0, now=0.0)
    pins.add("y", "policy", 3, "other", 10.0, now=0.0)
    assert pins.counts("policy") == {3: 2}
    assert pins.release("x", now=5.0).holder == "engine"
    assert pins.counts("policy") == {3: 1}
    assert pins.counts("critic") == {}


def test_renewing_counts_from_the_renewal() -> None:
    pins = Pins()
    pins.add("x", "policy", 1, "engine", 10.0, now=0.0)
    pins.renew("x", now=9.0)
    assert pins.expire(now=18.9) == []
    assert [pin.lease_id for pin in pins.expire(now=19.0)] == ["x"]


@pytest.mark.parametrize("use", ["renew", "release"])
def test_a_lapsed_pin_stays_lapsed(use: str) -> None:
    pins = Pins()
    pins.add("x", "policy", 1, "engine", 1.0, now=0.0)
    with pytest.raises(NotFound, match="does not count"):
        getattr(pins, use)("x", now=1.0)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 3601.0, float("nan")])
def test_a_ttl_out_of_range_is_refused(ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match="ttl_s is"):
        Pins().add("x", "policy", 1, "engine", ttl_s, now=0.0)


def test_pins_are_bounded_and_need_a_holder() -> None:
    pins = Pins()
    with pytest.raises(InvalidRequest, match="the holder of a pin is named in 0 characters"):
        pins.add("x", "policy", 1, "", 1.0, now=0.0)
    for number in range(PINS_MAX):
        pins.add(str(number), "policy", 1, "engine", 1.0, now=0.0)
    with pytest.raises(OutOfCapacity, match="pins are held"):
        pins.add("one more", "policy", 1, "engine", 1.0, now=0.0)


def test_only_pins_for_the_fleet_give_way_the_oldest_version_first() -> None:
    pins = Pins()
    pins.add("loading", "policy", 2, "engine", 60.0, now=0.0, copies=0)
    for number, version in enumerate((2, 5, 3, 5)):
        pins.add(f"fleet-{number}", "policy", version, "gateway", 60.0, now=1.0, copies=2)
    pins.renew("fleet-1", now=2.0)
    assert [p.lease_id for p in pins.give_way({("policy", 9)})] == ["fleet-1", "fleet-3"], "2 is being loaded"
    assert [p.version for p in pins.give_way({("policy", 3)})] == [], "3 stays anyway: it would free nothing"
    assert [p.version for p in pins.give_way(())] == [3]
    assert pins.give_way(()) == []
    assert pins.counts("policy") == {2: 2}


def test_a_pin_ends_with_its_version() -> None:
    pins = Pins()
    pins.add("x", "policy", 1, "engine", 60.0, now=0.0)
    pins.add("y", "policy", 2, "engine", 60.0, now=0.0, copies=2)
    pins.add("z", "critic", 2, "engine", 60.0, now=0.0)
    assert [pin.lease_id for pin in pins.dropped("policy", 2)] == ["y"]
    with pytest.raises(NotFound, match="its version is here no more"):
        pins.renew("y", now=1.0)
    assert [pin.lease_id for pin in pins.all()] == ["z", "x"]


@pytest.mark.parametrize("copies", [-1, COPIES_MAX + 1])
def test_copies_out_of_range_are_refused(copies: int) -> None:
    with pytest.raises(InvalidRequest, match="copies is"):
        Pins().add("x", "policy", 1, "engine", 1.0, now=0.0, copies=copies)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 4), max_size=3), st.frozensets(st.sampled_from("abcdef"))
)
def test_enough_holders_keep_a_version_and_whoever_has_the_pin_is_one(
    pinned: dict[str, int], holders: frozenset[str]
) -> None:
    keep = keepers(pinned, holders)
    assert sorted(keep) == sorted(set(keep) & holders)
    assert holders & pinned.keys() <= set(keep)
    wanted = max(max(pinned.values(), default=0), len(holders & pinned.keys()))
    assert len(keep) == min(wanted, len(holders))
    assert keepers(pinned, set(keep)) == keep, "when all others have gone, the same stay"


@pytest.mark.parametrize("holder", ["", "x" * 257])
def test_a_holder_is_named_in_few_words(holder: str) -> None:
    """It is kept for each pin, and stands in everybody's status."""
    with pytest.raises(InvalidRequest, match="holder"):
        Pins().add("x", "policy", 1, holder, 10.0, now=0.0)
