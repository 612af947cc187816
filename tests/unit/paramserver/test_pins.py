"""Pins: held until released or lapsed, never both."""

from __future__ import annotations

import pytest

from paramserver.core.pins import PINS_MAX, Pins
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
    with pytest.raises(InvalidRequest, match="without a holder"):
        pins.add("x", "policy", 1, "", 1.0, now=0.0)
    for number in range(PINS_MAX):
        pins.add(str(number), "policy", 1, "engine", 1.0, now=0.0)
    with pytest.raises(OutOfCapacity, match="pins are held"):
        pins.add("one more", "policy", 1, "engine", 1.0, now=0.0)
