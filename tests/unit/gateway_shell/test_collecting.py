"""Full passes of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref

from gateway.collecting import collect_regularly
from tests.support.cutting_engine import until


class Cycle:
    def __init__(self) -> None:
        self.itself = self


async def test_old_cycles_go_by_the_clock_and_never_by_the_number_of_objects() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    passes: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            passes.append(info["collected"])

    collecting = asyncio.create_task(collect_regularly(0.5))
    await asyncio.sleep(0)
    gc.callbacks.append(note)
    try:
        cycle = Cycle()
        gone = weakref.ref(cycle)
        gc.collect(1)  # it grows old
        del cycle
        kept = [[] for _ in range(300_000)]  # more than what would begin a pass
        assert passes == []
        assert gone() is not None
        await until(lambda: gone() is None, "the cycle is gone")
        assert passes
        assert kept
    finally:
        gc.callbacks.remove(note)
        collecting.cancel()
        await asyncio.wait([collecting])
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() <= frozen
