"""Retries of requests: only of those that the server certainly did not begin, or that may be sent twice, and within the
given patience.

Not begun means that the connection was never made, or that the response was 429 or 503. A connection that broke later
may have begun a turn, and a session must not have a turn twice: only with a key that names the turn is it sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import openai

from protos.retries import Backoff, refused_tls

FULL_STATUS = 429
RETRIED_STATUSES = frozenset({FULL_STATUS, 503})
PROXY_STATUSES = frozenset({502, 504})
"""What a proxy answers that got none."""
NEVER_CONNECTED = frozenset({"ConnectError", "ConnectTimeout"})
"""Names of exceptions: the HTTP library that raises them depends on the version of the OpenAI client."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.25, 8.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NotBegun:
    """A request that may be sent again; `retry_after_s` is the server's Retry-After, if there was one."""

    retry_after_s: float | None


def not_begun(error: openai.APIError) -> NotBegun | None:
    """Whether a failed request may be sent again; None when the server may have begun it, or it would fail again."""
    if isinstance(error, openai.APIStatusError) and error.status_code in RETRIED_STATUSES:
        return NotBegun(parse_retry_after_s(error.response.headers.get("retry-after")))
    if isinstance(error, openai.APIConnectionError) and type(error.__cause__).__name__ in NEVER_CONNECTED:
        return None if refused_tls(error) else NotBegun(None)
    return None


def _is_lost(error: openai.APIError) -> bool:
    """Whether the answer did not come."""
    by_proxy = isinstance(error, openai.APIStatusError) and error.status_code in PROXY_STATUSES
    return by_proxy or isinstance(error, openai.APIConnectionError)


def _is_full(error: openai.APIError) -> bool:
    return isinstance(error, openai.APIStatusError) and error.status_code == FULL_STATUS


def parse_retry_after_s(header: str | None) -> float | None:
    """The header's seconds; None for a date, which is its other form."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


async def with_retries(
    request: Callable[[], Awaitable[T]],
    *,
    patience_s: float,
    on_retry: Callable[[openai.APIError, float], None],
    repeatable: bool = False,
    limited: bool = False,
) -> T:
    """The result of `request`, which is retried until tries have failed for `patience_s`; raises the last error.
    `on_retry` gets each error before, and the seconds until the next try.

    `repeatable`: it may have been begun, because sent twice it has the effect of once. `limited`: the caller limits
    the time of the whole, so a server that is full is waited for without regard to the patience: it is not away.
    """
    backoff = Backoff(BACKOFF_MIN_S, BACKOFF_MAX_S, patience_s)
    while True:
        try:
            return await request()
        except openai.APIError as error:
            again = not_begun(error)
            if again is None and repeatable and _is_lost(error) and not refused_tls(error):
                again = NotBegun(None)
            if again is None:
                raise
            wait_s = backoff.pause_s(again.retry_after_s or 0.0, limited=limited and _is_full(error))
            if wait_s is None:
                raise
            on_retry(error, wait_s)
        await asyncio.sleep(wait_s)
