"""How many tokens an engine should send per event. Pure.

An event costs the gateway about the same whatever it holds (some 60 us of one core: bench-gateway), so its cost per
token falls in proportion; tokens that the engine gathers meanwhile are what its death may lose, and a reader waits for.
"""

from __future__ import annotations

TOKENS_PER_EVENT_MAX = 16
"""A third of a second at 50 tokens/s: what a cut may cost a turn, and a reader may wait."""
TURNS_PER_TOKEN = 16
"""Turns under way for which every event may bring one token more: 2,000 at 50 tokens/s are then 6,250 events/s."""


def tokens_per_event(turns: int, *, streamed: bool, configured: int | None) -> int:
    """`turns` run now; `streamed`: a client reads along. Few turns stream token by token: there the core is idle."""
    if configured is not None:
        return configured
    if not streamed:
        return TOKENS_PER_EVENT_MAX
    return max(1, min(TOKENS_PER_EVENT_MAX, turns // TURNS_PER_TOKEN))
