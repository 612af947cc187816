"""The committed workload: answer lengths with a long tail, and how long a decode step takes. Pure.

Invariants:
- trajectory `i` has the same prompt, length and tokens whatever engine, mode or order it runs in;
- lengths are lognormal with the committed median and p99, capped as an answer's budget caps them.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import random
import statistics
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMITTED: Mapping[str, Any] = json.loads((Path(__file__).parent / "committed.json").read_text())
Z_P99 = statistics.NormalDist().inv_cdf(0.99)
TOKENS_PER_UNIT = 32
"""One scripted token stands for so many of the paper's: what Python has to carry shrinks, the shape stays."""


def lengths(count: int, trace: Mapping[str, Any] = COMMITTED["trace"]) -> list[int]:
    """Answer lengths in tokens."""
    rng = random.Random(trace["seed"])
    sigma = math.log(trace["p99_over_median"]) / Z_P99
    drawn = (rng.lognormvariate(math.log(trace["median_tokens"]), sigma) for _ in range(count))
    return [max(1, min(trace["cap_tokens"], round(length))) for length in drawn]


def units(tokens: int) -> int:
    """Scripted tokens that stand for `tokens`."""
    return max(1, round(tokens / TOKENS_PER_UNIT))


def digest(values: Sequence[int]) -> str:
    return hashlib.sha256(array("q", values).tobytes()).hexdigest()


def decode_ms(batch: int, curve: Mapping[str, float] = COMMITTED["decode_ms_by_batch"]) -> float:
    """One decode step of `batch` sequences: the committed points, straight lines between and beyond them."""
    points = sorted((int(b), ms) for b, ms in curve.items())
    at = min(max(bisect.bisect_left(points, (batch,)), 1), len(points) - 1)
    (low, low_ms), (high, high_ms) = points[at - 1], points[at]
    return low_ms + (high_ms - low_ms) * (batch - low) / (high - low)


def token(trajectory: int, position: int) -> int:
    """The scripted token at `position` of the answer of `trajectory`; two positions rarely agree."""
    mixed = (trajectory * 2654435761 + position * 40503 + 977) & 0xFFFFFFFF
    return 3 + (mixed ^ (mixed >> 15)) % 997
