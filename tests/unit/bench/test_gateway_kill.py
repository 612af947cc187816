"""What a kill of the gateway cost, from what engines were asked before and after it and from the journal's commits."""

from __future__ import annotations

import pytest

from tests.bench.gateway.kill import NAMING, generated, lags, outcome, sent_at, share_of
from tests.bench.gateway.mock_engine import Turn


def turn(number: int = 1, *, interval: int = 4, ended_at: float | None = None, sent: int = 0) -> Turn:
    """One of 400 tokens at 50 tokens/s, begun at 100 s."""
    return Turn((1, number, 7), NAMING, 400, interval, 100.0, sent, ended_at)


def resumed(number: int, kept: int, begun_at: float = 110.0) -> Turn:
    return Turn((1, number, 7), NAMING + kept, 400 - kept, 4, begun_at)


@pytest.mark.parametrize(("token", "at"), [(1, 100.0), (2, 100.08), (5, 100.08), (6, 100.16), (400, 107.98)])
def test_a_token_leaves_with_its_event(token: int, at: float) -> None:
    assert sent_at(turn(), token) == pytest.approx(at)


def test_what_an_event_still_gathers_was_generated() -> None:
    assert generated(turn(ended_at=101.15, sent=57)) == 58


def test_no_more_was_generated_than_was_asked_for() -> None:
    assert generated(turn(ended_at=120.0, sent=400)) == 400


def test_the_share_kept_is_of_all_tokens_generated() -> None:
    before = [turn(1, ended_at=102.0, sent=101), turn(2, ended_at=102.0, sent=97)]
    found = outcome(before, [resumed(1, 90), resumed(2, 97)], [])
    assert (found.generated, found.sent, found.kept) == (202, 198, 187)
    assert found.share == pytest.approx(187 / 202)
    assert (found.cut, found.resumed) == (2, 2)


def test_a_turn_that_is_cut_again_counts_as_it_was_resumed_first() -> None:
    before = [turn(1, ended_at=102.0, sent=101)]
    assert outcome(before, [resumed(1, 90), resumed(1, 99, 112.0)], []).kept == 90


def test_a_turn_that_was_not_cut_is_no_measurement() -> None:
    with pytest.raises(AssertionError, match="was not cut"):
        outcome([turn(1)], [], [])


def test_a_lag_is_from_the_event_to_the_commit_that_has_it() -> None:
    commits = [(100.1, {(1, 1, 7): 5}), (100.2, {(1, 1, 7): 4, (9, 9, 9): 3})]
    found = lags({(1, 1, 7): turn()}, commits)
    assert found == pytest.approx([0.1, *[0.02] * 4, *[0.04] * 4])


def test_shares_of_lags() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [share_of(values, share) for share in (0.5, 0.99, 1.0)] == [51.0, 100.0, 100.0]
