"""Memory that is allocated while nobody waits for it any more."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.memory.allocator import PoolAllocator
from paramserver.memory.pool import Allotment, Pool
from protos.errors import Preparing
from protos.tasks import Tasks

MIB = 1 << 20


class SlowPool(Pool):
    """Memory comes once `let_go` is set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 16 * MIB)
        self.let_go = threading.Event()

    def fill(self, allotment: Allotment) -> None:
        assert self.let_go.wait(60.0)
        super().fill(allotment)


@pytest.fixture
def pool() -> Iterator[SlowPool]:
    directory = Path(tempfile.mkdtemp(prefix="laminar-pool-", dir="/dev/shm"))
    found = SlowPool(directory / "pool")
    yield found
    found.let_go.set()
    found.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("second", [2 * MIB, 3 * MIB])
async def test_what_several_left_while_it_was_allocated_all_comes_back(pool: SlowPool, second: int) -> None:
    tasks = Tasks(logging.getLogger(__name__))
    allocator = PoolAllocator(pool, tasks)
    takes = [allocator.take("policy", [size], "a version", patience_s=0.05) for size in (2 * MIB, second)]
    assert [type(one) for one in await asyncio.gather(*takes, return_exceptions=True)] == [Preparing, Preparing]
    assert pool.statistics().used_bytes == 2 * MIB + second
    pool.let_go.set()
    await tasks.join()
    assert pool.statistics().used_bytes == 0, "nobody holds it any more"


async def test_who_asks_again_gets_what_was_left(pool: SlowPool) -> None:
    tasks = Tasks(logging.getLogger(__name__))
    allocator = PoolAllocator(pool, tasks)
    for _ in range(2):
        with pytest.raises(Preparing):
            await allocator.take("policy", [2 * MIB], "a version", patience_s=0.05)
    pool.let_go.set()
    allotment = await allocator.take("policy", [2 * MIB], "a version")
    await tasks.join()
    assert pool.statistics().used_bytes == 2 * MIB
    pool.release(allotment)
