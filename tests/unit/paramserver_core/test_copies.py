"""Which relay makes a copy that is missing, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramserver.core.copies import COPY_AFTER_S, NEXT_AFTER_S, MissingCopies, PinnedVersion

NAMES = st.frozensets(st.sampled_from("abcdef"))


def seen_by(relays: str, pin: PinnedVersion, staying: str, *at: float) -> list[str]:
    """Of `relays`, those that copy it at the last of these times, having looked at each."""
    found = []
    for me in relays:
        missing = MissingCopies()
        due: set[int] = set()
        for now in at:
            due = missing.due(me, {7: pin}, staying, now)
        found += [me] if due else []
    return found


def test_the_first_by_name_makes_it_unless_the_relay_that_left_comes_back() -> None:
    pin = PinnedVersion(2, "c")
    assert seen_by("abcd", pin, "abcd", 100.0, 100.0 + COPY_AFTER_S - 0.1) == []
    assert seen_by("abcd", pin, "abcd", 100.0, 100.0 + COPY_AFTER_S) == ["a"]
    back = MissingCopies()
    assert back.due("a", {7: pin}, "abcd", 100.0) == set()
    assert back.due("a", {7: PinnedVersion(2, "bc")}, "abcd", 100.0 + COPY_AFTER_S) == set()
    assert back.due("a", {7: pin}, "abcd", 200.0) == set(), "a new absence begins anew"
    assert back.due("a", {7: pin}, "abcd", 200.0 + COPY_AFTER_S) == {7}


def test_who_cannot_is_passed_over_after_a_while() -> None:
    pin = PinnedVersion(2, "c")
    assert seen_by("abcd", pin, "abcd", 0.0, COPY_AFTER_S + NEXT_AFTER_S) == ["a", "b"]
    assert seen_by("abcd", PinnedVersion(3, "c"), "abcd", 0.0, COPY_AFTER_S) == ["a", "b"], "two are missing"


def test_one_that_leaves_soon_is_copied_from_and_copies_nothing() -> None:
    assert seen_by("abc", PinnedVersion(2, "ab"), "ac", 0.0, COPY_AFTER_S) == ["c"], "b holds it, and goes"
    assert seen_by("abc", PinnedVersion(2, "c"), "bc", 0.0, COPY_AFTER_S) == ["b"], "a goes"


def test_what_nobody_has_is_copied_by_nobody() -> None:
    assert seen_by("abc", PinnedVersion(2, ""), "abc", 0.0, 1000.0) == []


@given(NAMES, NAMES, st.integers(1, 4), st.floats(0, 500))
def test_whoever_copies_stays_has_it_not_and_is_needed(
    holders: frozenset[str], staying: frozenset[str], copies: int, waited_s: float
) -> None:
    pin = PinnedVersion(copies, holders)
    copying = seen_by("abcdef", pin, "".join(sorted(staying)), 0.0, waited_s)
    missing = copies - len(holders & staying)
    assert set(copying) <= staying - holders
    assert not copying or (missing > 0 and holders and waited_s >= COPY_AFTER_S)
    if missing > 0 and holders and waited_s >= COPY_AFTER_S:
        assert len(copying) >= min(missing, len(staying - holders))
