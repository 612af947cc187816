"""Tasks that fail apart: what one raises is said once with its cause, reaches no other, and is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.runtime import supervisor
from gateway.runtime.supervisor import Supervisor, rpc_result
from protos.errors import Unavailable
from tests.support.scripted_engine import until


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RETRY_S", 0.001)
    monkeypatch.setattr(supervisor, "RETRY_MAX_S", 0.002)


@asynccontextmanager
async def tasks() -> AsyncIterator[Supervisor]:
    made = Supervisor()
    try:
        yield made
    finally:
        await made.close()


async def test_what_is_kept_begins_again_after_every_error_and_the_same_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[Exception] = [KeyError("a"), KeyError("a"), KeyError("a"), ValueError("b"), KeyError("a")]
    left, told, running = list(errors), list[Exception](), asyncio.Event()

    async def work() -> None:
        if left:
            raise left.pop(0)
        running.set()
        await asyncio.Event().wait()

    async with tasks() as made:
        made.keep_running(work, "work", told.append)
        await asyncio.wait_for(running.wait(), 60)
    assert told == errors
    said = [r for r in caplog.records if r.levelname == "ERROR"]
    assert [str(r.args[1]) if isinstance(r.args, tuple) else "" for r in said] == [
        "KeyError: 'a'",
        "ValueError: b",
        "KeyError: 'a'",
    ]
    assert all(r.exc_info is not None for r in said)


async def test_an_error_reaches_no_other_task(caplog: pytest.LogCaptureFixture) -> None:
    turns = 0

    async def sound() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def fails() -> None:
        raise KeyError("nobody thought of it")

    async with tasks() as made:
        made.keep_running(sound, "sound")
        broken = made.start(fails(), "broken")
        await asyncio.wait([broken])
        before = turns
        await until(lambda: turns > before + 10, "the other goes on")
    assert "broken failed: KeyError: 'nobody thought of it'" in caplog.text


async def test_what_returns_is_over_and_close_ends_the_rest() -> None:
    ended = asyncio.Event()

    async def returns() -> None:
        return None

    async def stays() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with tasks() as made:
        over = made.keep_running(returns, "returns")
        await asyncio.wait_for(over, 60)
        stayed = made.keep_running(stays, "stays")
        await asyncio.sleep(0)
    assert ended.is_set()
    assert stayed.cancelled()


async def test_a_cancellation_that_nobody_asked_for_is_an_error_and_one_that_was_is_an_end() -> None:
    """gRPC cancels a call when its channel is closed under it."""
    call = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(_owned(call))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(Unavailable, match="its connection was closed meanwhile"):
        await waiting
    waiting = asyncio.create_task(_owned(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def _owned(call: asyncio.Future[None]) -> None:
    await rpc_result(call)
