"""How many tokens an engine should send per event. Pure.

An event costs the gateway about the same whatever it holds (some 60 us of one core: bench-gateway), so its cost per
token falls in proportion; tokens that the engine gathers meanwhile are what its death may lose, and a reader waits for.
"""

from __future__ import annotations

from gateway.core.curves import OUTLIER

TOKENS_PER_EVENT_MAX = 48
EVENT_S_MAX = 1.0
"""What a cut may cost a turn, and a reader may wait, while hundreds of turns run."""
TOKENS_UNREAD = 16
"""Of an answer that is sent whole, however few run: nobody waits for its events, but a cut may cost so much."""
TURNS_PER_TOKEN = 10
"""Turns under way for which every event may bring one token more: up to 480 at 50 tokens/s are 500 events/s."""
PACE_SHARE = 1 / 64
"""Of the mean pace, that one observation is."""


def tokens_per_event(turns: int, token_s: float, *, streamed: bool, configured: int | None) -> int:
    """`turns` run now, a token of one takes `token_s`; `streamed`: a client reads along. Few turns stream token by
    token: there the core is idle."""
    if configured is not None:
        return configured
    most = min(TOKENS_PER_EVENT_MAX, int(EVENT_S_MAX / token_s))
    return max(1 if streamed else TOKENS_UNREAD, min(most, turns // TURNS_PER_TOKEN))


def mean_pace(token_s: float, num_tokens: int, seconds: float) -> float:
    """`token_s` after `num_tokens` of one turn took `seconds`; a pause counts as no more than the usual four times."""
    each = min(seconds / num_tokens, OUTLIER * token_s)
    return token_s + PACE_SHARE * (each - token_s)
