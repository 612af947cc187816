"""Bypass skips to the next tier and never reorders; nobody is left alone for ever."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from paramserver.core.bypass import BUSY_S, BYPASS_S, Bypasses


@dataclass(frozen=True)
class Source:
    name: str


A, B, C, D = (Source(name) for name in "abcd")


def test_the_nearest_upstream_is_asked_until_it_fails_then_the_next_one_up_and_then_the_first_again() -> None:
    bypasses = Bypasses()
    assert bypasses.pick([[A], [B]], 0, 0.0) is A
    bypasses.failed("a", 0.0)
    assert bypasses.pick([[A], [B]], 0, 0.1) is B
    assert bypasses.at(0.1) == {"a"}
    assert bypasses.pick([[A], [B]], 0, BYPASS_S[0]) is A


def test_who_fails_again_is_left_alone_for_longer_and_never_for_ever() -> None:
    bypasses, now, waits = Bypasses(), 0.0, []
    for _ in range(2 * len(BYPASS_S)):
        bypasses.failed("a", now)
        wait = next(t / 100 for t in range(10_000) if bypasses.pick([[A]], 0, now + t / 100) is A)
        waits.append(wait)
        now += wait
    assert waits == sorted(waits)
    assert max(waits) == BYPASS_S[-1]
    assert bypasses.num_failures == 2 * len(BYPASS_S)


def test_a_busy_holder_is_asked_again_soon_and_has_not_failed() -> None:
    bypasses = Bypasses()
    bypasses.busy("a", 0.0)
    assert bypasses.pick([[A]], 0, BUSY_S / 2) is None
    assert bypasses.pick([[A]], 0, BUSY_S) is A
    assert bypasses.num_failures == 0


def test_stripes_spread_over_one_tier() -> None:
    assert [Bypasses().pick([[A, B], [C]], stripe, 0.0) for stripe in range(4)] == [A, B, A, B]


@given(failed=st.lists(st.sampled_from("abcd"), max_size=12), stripe=st.integers(0, 7), now=st.floats(0, 20))
def test_the_best_tier_that_has_anybody_left_is_asked(failed: list[str], stripe: int, now: float) -> None:
    bypasses = Bypasses()
    for name in failed:
        bypasses.failed(name, 0.0)
    tiers = [[A], [B, C], [D]]
    free = [[source for source in tier if source.name not in bypasses.at(now)] for tier in tiers]
    best = next((tier for tier in free if tier), [])
    found = bypasses.pick(tiers, stripe, now)
    assert found in best if best else found is None
