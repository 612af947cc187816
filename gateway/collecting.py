"""When the garbage collector looks through everything: by the clock, not by the number of objects.

A turn in flight is some 230 objects, and a full pass over a thousand of them held the event loop for 60 to 150 ms (a
first byte's p99 beside 1,000 streams was that). Python begins such a pass whenever a quarter more objects came to stay;
what becomes garbage here goes by its reference count, but for a few cycles (tasks that failed). So young objects are
looked through as ever, and all of them every `FULL_PASS_S`.
"""

from __future__ import annotations

import asyncio
import gc

YOUNG, OLDER = 5_000, 10
"""Objects more before the young ones are looked through, and how often before those that outlived one pass are, too:
some 3 ms, and 20 to 40 while a thousand turns begin."""
NEVER = 2**31 - 1
FULL_PASS_S = 60.0
"""What ended turns may leave in cycles meanwhile is some 20 KB each."""


async def collect_regularly(interval_s: float = FULL_PASS_S) -> None:
    """What exists now stays, and is never looked through again; of what comes, everything is each `interval_s`. Runs
    until cancelled; then the collector works as before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, NEVER)
    try:
        while True:
            await asyncio.sleep(interval_s)
            gc.collect()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
