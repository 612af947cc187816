"""The fault kit's scripted engine, for tests: in their own event loop, or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from gateway.faultkit.engine import (
    BLOCK_TOKENS,
    BLOCKS,
    CONTEXT_TOKENS,
    LOAD_STEPS,
    MODEL,
    Answer,
    ReceivedRequest,
    ScriptedEngine,
)
from gateway.faultkit.script import Cut, CutKind, scripted

__all__ = [
    "BLOCKS",
    "BLOCK_TOKENS",
    "CONTEXT_TOKENS",
    "LOAD_STEPS",
    "MODEL",
    "Answer",
    "Cut",
    "CutKind",
    "ReceivedRequest",
    "ScriptedEngine",
    "in_thread",
    "pass_time",
    "scripted",
    "until",
]


SPIN_S = 0.02
NAP_S = 0.001


@contextlib.contextmanager
def in_thread(engine: ScriptedEngine) -> Iterator[str]:
    """Serves in a thread with an event loop of its own, so that the test may block; yields the URL."""
    address: Future[str] = Future()
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with engine:
            address.set_result(engine.url)
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield address.result(60.0)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60.0)
        loop.close()


def pass_time(seconds: float) -> None:
    """Sets the running loop's clock forward: what waited so long in it is due, though nothing had to wait.

    A short timeout instead would run out of itself on a busy machine, before the silence that it is for.
    """
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Looks again at every turn of the event loop, and every millisecond once it takes longer: what is waited for is
    often another process, which needs the processor. Fails naming what never came.
    """
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0 if waited_s < SPIN_S else NAP_S)
