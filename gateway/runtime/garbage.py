"""Schedules full garbage collections for when nothing runs, instead of by the number of objects.

A turn in flight is some 230 objects, one that is kept for a retry some 40, and a full pass over thousands of turns held
the event loop for 0.1 to 0.7 s. Python begins such a pass whenever the number of long-lived objects has grown by a
quarter. Most garbage here is freed by reference counts: a turn that ended leaves no cycle, only one that was cut or
failed may. So young objects are collected as usual, and all of them when no turn runs, at the latest after
`AT_LATEST_S`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

YOUNG, OLDER = 5_000, 10
"""New objects before the young ones are collected, and passes before those that outlived one are, too: some 3 ms, and
20 to 40 while a thousand turns begin."""
NEVER = 2**31 - 1
LOOK_S = 60.0
AT_LATEST_S = 3600.0
"""A turn that was cut leaves some 20 KB in cycles until then."""


async def collect_regularly(
    busy: Callable[[], bool], *, look_s: float = LOOK_S, at_latest_s: float = AT_LATEST_S
) -> None:
    """Freezes the objects that exist now. Collects all later ones every `look_s` unless `busy`, and every
    `at_latest_s`. Runs until cancelled; then the collector works as before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, NEVER)
    last = time.monotonic()
    try:
        while True:
            await asyncio.sleep(look_s)
            if not busy() or time.monotonic() - last >= at_latest_s:
                gc.collect()
                last = time.monotonic()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
