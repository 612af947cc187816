"""What a turn weighs, reckoned for one turn at a time: the reference of `test_lengths`."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from gateway.core.fleet.state import TurnLoad
from gateway.core.packing.engine_views import HORIZONS, SessionLoad
from gateway.core.packing.lengths import SEEN_MIN


def turn_load(
    turn: TurnLoad,
    ended: Sequence[int],
    *,
    generated: int,
    moves: int,
    ends_session: bool,
    each_s: float,
    back_s: float,
    stays: bool,
    expected: int | None,
) -> SessionLoad:
    lengths, left = sorted(ended), turn.tokens_max - turn.tokens
    remaining = _remaining(lengths, generated, left, expected)
    known, mean = len(lengths) >= SEEN_MIN, sum(lengths) / max(1, len(lengths))
    kv_at = [turn.tokens]
    for share in HORIZONS:
        further = round(share * mean) if known else remaining
        alive = _alive(lengths, generated, further, expected)
        grown = min(further, left)
        if ends_session:
            kv_at.append(round(alive * (turn.tokens + grown)))
        else:
            kv_at.append(turn.tokens + round(alive * grown + (1 - alive) * grown / 2))
    remaining_s = max(remaining * each_s, 0.0 if ends_session else back_s)
    return SessionLoad(turn.session_id, turn.turn_id, kv_at, remaining_s, moves, stays)


def _remaining(lengths: Sequence[int], generated: int, left: int, expected: int | None) -> int:
    known = len(lengths) >= SEEN_MIN
    if not known and expected is not None and expected > generated:
        return max(1, min(left, expected - generated))
    scale = _scale(lengths, generated, expected)
    longer = [n for n in lengths if n > generated / scale] if known else []
    if not longer:
        return max(1, left // 2)
    return max(1, min(left, round(scale * sum(longer) / len(longer)) - generated))


def _alive(lengths: Sequence[int], generated: int, further: int, expected: int | None) -> float:
    if len(lengths) < SEEN_MIN:
        return 1.0
    scale = _scale(lengths, generated, expected)
    now = len(lengths) - bisect.bisect_right(lengths, generated / scale)
    return (len(lengths) - bisect.bisect_right(lengths, (generated + further) / scale)) / now if now else 0.5


def _scale(lengths: Sequence[int], generated: int, expected: int | None) -> float:
    if expected is None or generated >= expected or not sum(lengths):
        return 1.0
    return expected / (sum(lengths) / len(lengths))
