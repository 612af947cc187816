"""When a request is sent again: only if the server surely did not begin it, and never longer than its patience.

Not begun: the connection was never made, or the answer was 429 or 503. A connection that broke later may have left a
turn behind, and a session must not see a turn twice: that rollout fails, and starts anew in a session of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import openai

RETRIED_STATUSES = frozenset({429, 503})
NEVER_CONNECTED = frozenset({"ConnectError", "ConnectTimeout"})
"""By name: which HTTP library raised them below the client depends on the client's version."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.25, 8.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NotBegun:
    """A request that may be sent again, after `retry_after_s` where the server said so."""

    retry_after_s: float | None


def not_begun(error: openai.APIError) -> NotBegun | None:
    """None when the request may have been begun, or would fail again."""
    if isinstance(error, openai.APIStatusError) and error.status_code in RETRIED_STATUSES:
        return NotBegun(parse_retry_after_s(error.response.headers.get("retry-after")))
    if isinstance(error, openai.APIConnectionError) and type(error.__cause__).__name__ in NEVER_CONNECTED:
        return NotBegun(None)
    return None


def parse_retry_after_s(header: str | None) -> float | None:
    """Seconds only: a date, which the header may hold as well, counts as absent."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


async def with_retries(
    request: Callable[[], Awaitable[T]], *, patience_s: float, on_retry: Callable[[], None], rng: random.Random
) -> T:
    """The answer to `request`, sent again until `patience_s` is over; then its last error."""
    deadline = time.monotonic() + patience_s
    backoff_s = BACKOFF_MIN_S
    while True:
        try:
            return await request()
        except openai.APIError as error:
            again = not_begun(error)
            if again is None:
                raise
            wait_s = backoff_s * rng.uniform(0.5, 1.0) if again.retry_after_s is None else again.retry_after_s
            if time.monotonic() + wait_s > deadline:
                raise
        on_retry()
        await asyncio.sleep(wait_s)
        backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
