"""The event loop behind the synchronous faces."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import threading
import warnings
import weakref

import pytest

from protos.errors import Conflict, Unavailable
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


def test_an_error_keeps_nothing_alive_once_it_was_handled() -> None:
    """Not only when the collector of cycles next runs: a failed publish would hold tensors and the relay's memory."""
    loop = LoopThread("test-loop")
    held: list[weakref.ref[threading.Event]] = []

    async def fail() -> None:
        large = threading.Event()
        held.append(weakref.ref(large))
        raise ValueError(f"{large} is in this frame")

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            loop.run(fail())
        assert loop.run(answer(1)) == 1  # the loop is done with the coroutine
        assert held[0]() is None
    finally:
        gc.enable()
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
    assert entered.wait(60.0)
    loop.close()
    loop.close()
    assert cancelled.is_set()
    assert future.cancelled()
    assert not any(thread.name == "test-loop" for thread in threading.enumerate())
    with pytest.raises(Conflict, match="closed"):
        loop.run(answer(1))


def test_a_forked_process_is_told_and_does_not_wait_for_ever() -> None:
    """The thread stays behind in the parent: whoever waits for it in the child waits for nobody."""
    loop = LoopThread("test-loop")

    def child(answers: multiprocessing.connection.Connection) -> None:
        try:
            loop.run(answer(1))
        except Conflict as error:
            answers.send(str(error))
        loop.close()
        answers.send("closed")

    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks: it is what is tested
        process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
        process.start()
    try:
        assert ours.poll(60.0)
        assert "was opened in another process" in ours.recv()
        assert ours.poll(60.0)
        assert ours.recv() == "closed"
    finally:
        process.kill()
        process.join()
    assert loop.run(answer(2)) == 2, "the parent's goes on"
    loop.close()


def test_a_close_that_waits_too_long_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.loop.CLOSE_TIMEOUT_S", 0.2)
    loop, entered, go_on = LoopThread("test-loop"), threading.Event(), threading.Event()

    def read() -> None:
        entered.set()
        go_on.wait(60.0)

    future = loop.start(asyncio.to_thread(read))
    assert entered.wait(60.0)
    with pytest.raises(Unavailable, match=r"test-loop .* after 0\.2 s: .*read\(\)"):
        loop.close()
    with pytest.raises(Conflict, match="closed"):
        loop.run(answer(1))
    go_on.set()
    assert future.cancelled()
    loop._thread.join(60.0)
    assert not loop._thread.is_alive(), "it ends once that is over"


def test_callers_from_many_threads_share_the_loop() -> None:
    loop = LoopThread("test-loop")
    results: list[int] = []
    threads = [threading.Thread(target=lambda n=n: results.append(loop.run(answer(n)))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
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
