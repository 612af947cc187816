"""What an engine can carry, learnt from its streams and reports: seconds per token against batch, B and C_max. Pure.

Invariants:
- before enough was seen the configured value stands; B as learnt never exceeds it, C_max never `KV_MAX`;
- memory is bounded: one bucket for every 1/4 octave of batch sizes.

B is where decode turns compute-bound: fitting seconds = t0 + c x batch, it is t0 / c, the batch whose own work takes as
long as reading the weights does (the paper's "roofline batch bound", figure 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BUCKETS_PER_OCTAVE = 4
TOKENS_MIN = 64
"""Tokens seen before a bucket counts."""
TOKENS_KEPT = 2048.0
"""Weight of the past in a bucket: older tokens fade."""
GAP_TOKENS = 8
"""Tokens of one turn between two clock readings: a reading for each event costs more than it gives."""
SPAN_MIN = 4.0
"""Ratio of the largest batch seen to the smallest before a line is fitted through them."""
OUTLIER = 4.0
"""A gap so many times the usual is a pause, a prefill or a late event: counted as this."""
PACE_SHARE = 1 / 64
"""Weight of one observation in the mean pace."""
SECONDS_PER_TOKEN = 1 / 15
"""Pace of one turn before anything was measured."""
KV_MIN = 0.5
"""C_max never falls below: a wrong report must not stop all packing."""
KV_MAX = 0.99
"""The paper's C_max; never more, whatever an engine bears."""
KV_MARGIN = 0.98


@dataclass(slots=True)
class _Bucket:
    batch: float
    seconds: float
    tokens: float


@dataclass(slots=True)
class DecodeCurve:
    """Seconds per token of one engine against the turns that run at once."""

    _buckets: dict[int, _Bucket] = field(default_factory=dict)
    _points: list[tuple[float, float]] | None = None  # `points`, until the next tokens

    def observe(self, batch: int, tokens: int, seconds: float) -> None:
        """`tokens` of one turn came `seconds` after those before them, while `batch` turns ran."""
        if batch < 1 or tokens < 1 or seconds <= 0:
            return
        each = seconds / tokens
        bucket = self._buckets.setdefault(_bucket(batch), _Bucket(float(batch), each, 0.0))
        each = min(each, OUTLIER * bucket.seconds)
        share = tokens / (min(bucket.tokens, TOKENS_KEPT) + tokens)
        bucket.seconds += share * (each - bucket.seconds)
        bucket.batch += share * (batch - bucket.batch)
        bucket.tokens += tokens
        self._points = None

    def points(self) -> list[tuple[float, float]]:
        """(batch, seconds per token), smallest batch first; only of batches seen often enough."""
        if self._points is None:
            self._points = sorted((b.batch, b.seconds) for b in self._buckets.values() if b.tokens >= TOKENS_MIN)
        return self._points

    def seconds_per_token(self, batch: int) -> float | None:
        """By the line through the two nearest points; None before anything was learnt."""
        points = self.points()
        if not points:
            return None
        if len(points) == 1 or batch <= points[0][0]:
            return points[0][1]
        above = next((i for i, (b, _) in enumerate(points) if b >= batch), len(points) - 1)
        (low, low_s), (high, high_s) = points[above - 1], points[above]
        return max(low_s + (high_s - low_s) * (batch - low) / (high - low), min(low_s, high_s))

    def roofline_batch(self, configured: int) -> int:
        """B; `configured` until batches far enough apart were seen, and never more."""
        line = self._line()
        if line is None:
            return configured
        start, slope = line
        return configured if slope <= 0 else max(1, min(configured, int(start / slope)))

    def seconds_per_turn(self, configured: int) -> float:
        """How much longer a token takes for each further turn; before that was learnt, what makes `configured` B."""
        line = self._line()
        if line is not None:
            return max(0.0, line[1])
        return (self.seconds_per_token(1) or SECONDS_PER_TOKEN) / configured

    def _line(self) -> tuple[float, float] | None:
        """t0 and c by least squares."""
        points = self.points()
        if len(points) < 2 or points[-1][0] < SPAN_MIN * points[0][0]:
            return None
        mean_b = sum(b for b, _ in points) / len(points)
        mean_s = sum(s for _, s in points) / len(points)
        slope = sum((b - mean_b) * (s - mean_s) for b, s in points) / sum((b - mean_b) ** 2 for b, _ in points)
        return mean_s - slope * mean_b, slope


@dataclass(slots=True)
class Gaps:
    """Measures the time between one turn's tokens, `GAP_TOKENS` at a time, for the curve of its engine."""

    _last_at: float | None = None
    _tokens: int = 0  # since then

    def begin(self) -> None:
        """The next tokens follow none: what lies before them is a queue and a prefill."""
        self._last_at = None

    def count(self, tokens: int) -> bool:
        """Counts tokens. Returns whether it is time to read the clock and call `measure`."""
        self._tokens += tokens
        return self._tokens >= GAP_TOKENS or self._last_at is None

    def measure(self, now: float) -> tuple[int, float] | None:
        """Tokens, and the seconds that they took; None of the first, which follow none."""
        last_at, tokens = self._last_at, self._tokens
        self._last_at, self._tokens = now, 0
        return None if last_at is None else (tokens, now - last_at)


@dataclass(slots=True)
class KvCeiling:
    """C_max of one engine: the share of its KV that it fills before turns have to wait in it."""

    configured: float
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.configured

    def observe(self, usage: float, running: int, waiting: int) -> None:
        """Takes one report of the engine."""
        if running and waiting and usage < self.value:
            self.value = max(min(KV_MIN, self.configured), usage * KV_MARGIN)
        elif not waiting and usage > self.value:
            self.value = max(self.configured, min(KV_MAX, usage))


def mean_pace(token_s: float, num_tokens: int, seconds: float) -> float:
    """`token_s` after `num_tokens` of one turn took `seconds`; a pause counts as no more than the usual four times."""
    each = min(seconds / num_tokens, OUTLIER * token_s)
    return token_s + PACE_SHARE * (each - token_s)


def _bucket(batch: int) -> int:
    return round(BUCKETS_PER_OCTAVE * math.log2(batch))
