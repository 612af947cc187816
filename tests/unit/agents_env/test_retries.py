"""Which requests are sent again, how long after, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents_env.retries import NotBegun, not_begun, parse_retry_after_s, with_retries

REQUEST = httpx.Request("POST", "http://server/v1")


def refused(status: int, **headers: str) -> openai.APIStatusError:
    response = httpx.Response(status, headers={k.replace("_", "-"): v for k, v in headers.items()}, request=REQUEST)
    return openai.APIStatusError("refused", response=response, body=None)


def unconnected(cause: Exception) -> openai.APIConnectionError:
    error = openai.APIConnectionError(request=REQUEST)
    error.__cause__ = cause
    return error


def failing(*errors: openai.APIError) -> Callable[[], Awaitable[str]]:
    """A request that raises these one after another, and then answers."""
    rest = list(errors)

    async def request() -> str:
        if rest:
            raise rest.pop(0)
        return "answer"

    return request


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused(429, retry_after="2.5"), NotBegun(2.5)),
        (refused(503), NotBegun(None)),
        (refused(500), None),
        (refused(409), None),
        (unconnected(httpx.ConnectError("refused")), NotBegun(None)),
        (unconnected(httpx.ReadError("reset")), None),
        (unconnected(httpx.ReadTimeout("late")), None),
    ],
)
def test_only_what_the_server_did_not_begin_may_be_sent_again(
    error: openai.APIError, expected: NotBegun | None
) -> None:
    assert not_begun(error) == expected


@pytest.mark.parametrize("header", [None, "", "soon", "-1", "nan", "inf", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_header_without_seconds_counts_as_absent(header: str | None) -> None:
    assert parse_retry_after_s(header) is None


@given(st.floats(0, 1e6))
def test_seconds_are_taken_as_they_are(seconds: float) -> None:
    assert parse_retry_after_s(str(seconds)) == seconds


async def send(request: Callable[[], Awaitable[str]], patience_s: float) -> tuple[str, int]:
    retries = 0

    def count(_: openai.APIError, __: float) -> None:
        nonlocal retries
        retries += 1

    answer = await with_retries(request, patience_s=patience_s, on_retry=count)
    return answer, retries


async def test_is_sent_again_until_it_is_answered() -> None:
    request = failing(refused(429, retry_after="0"), refused(503, retry_after="0.01"))
    assert await send(request, 5.0) == ("answer", 2)


async def test_gives_up_at_once_when_the_server_wants_more_time_than_there_is() -> None:
    with pytest.raises(openai.APIStatusError):
        await send(failing(refused(429, retry_after="3600")), 5.0)


async def test_does_not_repeat_what_may_have_been_begun() -> None:
    with pytest.raises(openai.APIStatusError):
        await send(failing(refused(500)), 5.0)


async def test_the_patience_begins_with_the_first_failure() -> None:
    tries = 0

    async def slow_then_away() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            await asyncio.sleep(1.0)
            raise refused(503, retry_after="0")
        return "answer"

    assert await send(slow_then_away, 0.9) == ("answer", 1)
