"""What is learnt of engines from their streams: the paper's curve is found again, B from it, C_max from reports."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.curves import GAP_TOKENS, KV_MAX, KV_MIN, SPAN_MIN, DecodeCurve, Gaps, KvCeiling
from tests.bench.repack.trace import decode_ms
from tests.support.quick import examples


def learnt(batches: list[int], *, noise: float = 0.0, scale: float = 1.0, tokens: int = 200) -> DecodeCurve:
    curve, rng = DecodeCurve(), random.Random(1)
    for _ in range(tokens):
        for batch in batches:
            curve.observe(batch, 1, scale * decode_ms(batch) / 1000 * rng.uniform(1 - noise, 1 + noise))
    return curve


def test_the_papers_curve_is_found_again_under_noise() -> None:
    curve = learnt([1, 2, 4, 8, 16, 32, 64], noise=0.5)
    for batch in (1, 4, 8, 16, 32, 64):
        assert curve.seconds_per_token(batch) == pytest.approx(decode_ms(batch) / 1000, rel=0.1)
    assert curve.seconds_per_token(24) == pytest.approx(decode_ms(24) / 1000, rel=0.1)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_b_is_where_the_requests_own_work_equals_the_weights(scale: float) -> None:
    """Figure 4, 32B TP4: about 10.9 ms and 0.11 ms for each request; whatever the clock's scale."""
    batches = [1, 2, 4, 8, 16, 32, 64, 128]
    assert learnt(batches, scale=scale).roofline_batch(256) == pytest.approx(92, abs=8)
    assert learnt(batches, scale=scale).roofline_batch(64) == 64, "never above what is configured"


def test_before_batches_lie_far_enough_apart_the_configured_value_stands() -> None:
    assert DecodeCurve().roofline_batch(48) == 48
    assert DecodeCurve().seconds_per_token(8) is None
    assert learnt([30, 32]).roofline_batch(48) == 48
    assert learnt([1, 128], tokens=10).roofline_batch(48) == 48, "too few tokens"
    flat = DecodeCurve()
    for batch in (1, 100) * 100:
        flat.observe(batch, 1, 0.01)
    assert flat.roofline_batch(48) == 48, "it never turns compute-bound"


def test_a_pause_in_a_stream_is_no_slow_engine() -> None:
    curve = learnt([8], tokens=500)
    curve.observe(8, 1, 60.0)
    assert curve.seconds_per_token(8) == pytest.approx(decode_ms(8) / 1000, rel=0.02)


def test_what_an_engine_became_is_learnt_again() -> None:
    curve = learnt([8], tokens=5000)
    for _ in range(6000):
        curve.observe(8, 1, 0.03)
    assert curve.seconds_per_token(8) == pytest.approx(0.03, rel=0.1)


@given(
    st.lists(
        st.tuples(st.integers(-1, 400), st.integers(0, 64), st.floats(-1, 1e6, allow_subnormal=False)), max_size=200
    ),
    st.integers(1, 99),
)
@examples(100)
def test_whatever_is_seen_b_stays_within_its_bounds(seen: list[tuple[int, int, float]], configured: int) -> None:
    curve = DecodeCurve()
    for batch, tokens, seconds in seen:
        curve.observe(batch, tokens, seconds)
    assert 1 <= curve.roofline_batch(configured) <= configured
    points = curve.points()
    assert len(points) <= 40
    if len(points) < 2 or points[-1][0] < SPAN_MIN * points[0][0]:
        assert curve.roofline_batch(configured) == configured
    for batch in (1, 10, 500):
        seconds = curve.seconds_per_token(batch)
        assert (seconds is None) == (not points)
        assert seconds is None or seconds > 0


def test_c_max_falls_to_where_turns_had_to_wait_and_comes_back() -> None:
    ceiling = KvCeiling(0.9)
    ceiling.observe(0.95, 10, 2)
    assert ceiling.value == 0.9, "above it everything is full"
    ceiling.observe(0.8, 10, 2)
    assert ceiling.value == pytest.approx(0.784)
    ceiling.observe(0.5, 10, 0)
    assert ceiling.value == pytest.approx(0.784), "an idle look says nothing"
    ceiling.observe(0.85, 10, 0)
    assert ceiling.value == pytest.approx(0.9), "what is configured holds again"
    ceiling.observe(0.97, 10, 0)
    assert ceiling.value == 0.97, "it was full to here, and nothing waited"
    ceiling.observe(1.0, 10, 0)
    assert ceiling.value == KV_MAX


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 3)), max_size=50), st.floats(0.1, 1))
def test_c_max_stays_within_its_bounds(reports: list[tuple[float, int, int]], configured: float) -> None:
    ceiling = KvCeiling(configured)
    for report in reports:
        ceiling.observe(*report)
        assert min(KV_MIN, configured) <= ceiling.value <= max(configured, KV_MAX)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=50))
def test_a_turns_tokens_are_told_with_the_time_they_took(events: list[int]) -> None:
    """At a token every second: none counted twice, fewer than `GAP_TOKENS` left out."""
    gaps, now, told = Gaps(), 100.0, []

    def came(tokens: int) -> tuple[int, float] | None:
        return gaps.measure(now) if gaps.count(tokens) else None

    gaps.begin()
    assert came(3) is None, "the first follow a prefill"
    for tokens in events:
        now += tokens
        told.append(came(tokens))
    seen = [one for one in told if one is not None]
    assert all(tokens == seconds and tokens >= GAP_TOKENS for tokens, seconds in seen)
    assert 0 <= sum(events) - sum(tokens for tokens, _ in seen) < GAP_TOKENS
    gaps.begin()
    now += 1000
    assert came(GAP_TOKENS) is None, "nor does a pause count"
