"""The event loop behind the synchronous faces."""

from __future__ import annotations

import asyncio
import threading

import pytest

from protos.errors import Conflict
from trainer_client.loop import LoopThread


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_results_and_errors_come_out_of_run() -> None:
    loop = LoopThread("test-loop")
    assert loop.run(answer(3)) == 3

    async def fail() -> None:
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        loop.run(fail())
    loop.close()


def test_close_cancels_what_runs_and_ends_the_thread() -> None:
    loop = LoopThread("test-loop")
    entered, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    future = loop.start(forever())
    assert entered.wait(10)
    loop.close()
    loop.close()
    assert cancelled.is_set()
    assert future.cancelled()
    assert not any(thread.name == "test-loop" for thread in threading.enumerate())
    with pytest.raises(Conflict, match="closed"):
        loop.run(answer(1))


def test_callers_from_many_threads_share_the_loop() -> None:
    loop = LoopThread("test-loop")
    results: list[int] = []
    threads = [threading.Thread(target=lambda n=n: results.append(loop.run(answer(n)))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    loop.close()
    assert sorted(results) == list(range(8))


def test_calling_the_sync_face_from_its_own_loop_is_a_bug_that_is_seen() -> None:
    loop = LoopThread("test-loop")

    async def reenter() -> None:
        work = answer(1)
        try:
            loop.run(work)
        finally:
            work.close()

    with pytest.raises(AssertionError, match="own event loop"):
        loop.run(reenter())
    loop.close()
