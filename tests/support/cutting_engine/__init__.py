"""The fault kit's engines, as tests name them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.faultkit.engine import (
    BLOCK_TOKENS,
    BLOCKS,
    CONTEXT_TOKENS,
    LOAD_STEPS,
    MODEL,
    Answer,
    Asked,
    CuttingEngine,
)
from gateway.faultkit.script import Cut, CutKind, said

__all__ = [
    "BLOCKS",
    "BLOCK_TOKENS",
    "CONTEXT_TOKENS",
    "LOAD_STEPS",
    "MODEL",
    "Answer",
    "Asked",
    "Cut",
    "CutKind",
    "CuttingEngine",
    "pass_time",
    "said",
    "until",
]


def pass_time(seconds: float) -> None:
    """Sets the running loop's clock forward: what waited so long in it is due, though nothing had to wait.

    A short timeout instead would run out of itself on a busy machine, before the silence that it is for.
    """
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Looks again at every turn of the event loop; fails naming what never came."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0)
