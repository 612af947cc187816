"""How many tokens an engine should send per event. Pure.

An event costs the gateway about the same whatever it holds, so the number of events a second is what counts: all turns
together get `EVENTS_PER_S`, however fast they are. The price: tokens that an engine gathers are lost when it dies, and
a reader waits for them.
"""

from __future__ import annotations

EVENTS_PER_S = 500
"""Events of all turns together: some 3 % of one core (bench-gateway)."""
TURNS_FEW = 20
"""Fewer stream token by token, however fast: there the core is idle."""
EVENT_S_MAX = 1.0
"""Longest time between events: so long may a reader wait, and so much may a cut cost, while hundreds of turns run."""
TOKENS_PER_EVENT_MAX = 48
TOKENS_UNREAD = 16
"""Tokens per event of an answer that is sent whole: no client waits for its events, but a cut costs as many."""


def tokens_per_event(turns: int, token_s: float, *, streamed: bool, configured: int | None) -> int:
    """`turns` run now, a token of one takes `token_s`, as measured; `streamed`: a client reads along."""
    if configured is not None:
        return configured
    event_s = min(EVENT_S_MAX, turns / EVENTS_PER_S) if turns >= TURNS_FEW else 0.0
    # Rounded: a pace as measured is never quite the engine's, and 7 tokens where 8 were due are a seventh more events.
    gathered = min(TOKENS_PER_EVENT_MAX, round(event_s / token_s))
    return max(1 if streamed else TOKENS_UNREAD, gathered)
