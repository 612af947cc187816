"""How long an event loop is held: by the steps of its own tasks, and by threads that hold the interpreter's lock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

BEAT_S = 0.002
HOLD_S_MAX = 0.05
"""What the gateway promises."""


@dataclass
class Holds:
    longest_s: float = 0.0


@contextlib.asynccontextmanager
async def beating() -> AsyncIterator[Holds]:
    """Beats while the block runs, and notes the longest time between two beats.

    A beat is late on a busy machine, too. So of each the smaller counts of the time that passed and the processor time
    that this process used meanwhile, by whichever thread: what other processes take is not in it.
    """
    found = Holds()

    async def beat() -> None:
        while True:
            wall, used = time.monotonic(), time.process_time()
            await asyncio.sleep(BEAT_S)
            found.longest_s = max(found.longest_s, min(time.monotonic() - wall, time.process_time() - used) - BEAT_S)

    task = asyncio.create_task(beat())
    await asyncio.sleep(0)
    try:
        yield found
        await asyncio.sleep(BEAT_S)
    finally:
        task.cancel()
