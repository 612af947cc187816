"""The committed workload of `make bench-repack` is what it says it is."""

from __future__ import annotations

import pytest

from tests.bench.repack.trace import COMMITTED, decode_ms, digest, lengths, token, units


def test_the_trace_is_the_committed_one() -> None:
    assert digest(lengths(4096)) == COMMITTED["trace"]["sha256_of_first_4096"]


def test_its_p99_is_ten_times_its_median() -> None:
    drawn = sorted(lengths(40_000))
    assert drawn[39_600] / drawn[20_000] == pytest.approx(10.0, rel=0.05)
    assert drawn[20_000] == pytest.approx(COMMITTED["trace"]["median_tokens"], rel=0.03)
    assert drawn[-1] == COMMITTED["trace"]["cap_tokens"]


@pytest.mark.parametrize(
    ("batch", "ms"), [(1, 10.6), (64, 18.2), (48, (14.9 + 18.2) / 2), (256, 37.3), (384, 37.3 + 11.4)]
)
def test_the_decode_curve_runs_through_the_papers_points(batch: int, ms: float) -> None:
    assert decode_ms(batch) == pytest.approx(ms)


def test_tokens_tell_their_trajectory_and_place() -> None:
    assert len({tuple(token(i, k) for k in range(8)) for i in range(2000)}) == 2000
    assert [token(5, k) for k in range(4)] != [token(5, k + 1) for k in range(4)]
    assert units(1) == 1
    assert units(16384) == 512
