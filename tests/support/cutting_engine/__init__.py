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
    "said",
    "until",
]


async def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Looks again at every turn of the event loop; fails naming what never came."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0)
