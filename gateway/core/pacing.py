"""How many tokens an engine should send per event. Pure.

An event costs the gateway about the same whatever it holds (some 60 us of one core: bench-gateway), so its cost per
token falls in proportion; tokens that the engine gathers meanwhile are what its death may lose, and a reader waits for.
"""

from __future__ import annotations

TOKENS_PER_EVENT_MAX = 32
"""Some 0.6 s at 50 tokens/s: what a cut may cost a turn, and a reader may wait, while hundreds of turns run."""
TOKENS_UNREAD = 16
"""Of an answer that is sent whole, however few run: nobody waits for its events, but a cut may cost so much."""
TURNS_PER_TOKEN = 16
"""Turns under way for which every event may bring one token more: up to 512 at 50 tokens/s are 800 events/s."""


def tokens_per_event(turns: int, *, streamed: bool, configured: int | None) -> int:
    """`turns` run now; `streamed`: a client reads along. Few turns stream token by token: there the core is idle."""
    if configured is not None:
        return configured
    return max(1 if streamed else TOKENS_UNREAD, min(TOKENS_PER_EVENT_MAX, turns // TURNS_PER_TOKEN))
