"""One event loop in a thread of its own, so that a synchronous training loop can use the asyncio SDK.

Invariants:
- every coroutine runs on this loop and nowhere else, so the asynchronous side needs no locks;
- `run` returns the coroutine's result or raises its error; an interrupted caller cancels its coroutine;
- `close` cancels what is still running, waits for it, and joins the thread; it may be called twice;
- nobody waits for a thread that is not there: a forked process is told that the client is its parent's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from protos.errors import Conflict, Unavailable

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for cancelled work to end before it says so."""


class LoopThread:
    """Runs coroutines for synchronous callers; a daemon thread, so a crashed trainer still exits."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins `work` and returns at once; errors come out of the future."""
        if self.closed:
            work.close()
            raise Conflict("this client is closed", hint="open a new one; a closed client is not used again")
        if not self._thread.is_alive():
            work.close()
            raise Conflict("this client was opened in another process", hint="open one after the fork")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end. Must not be called from a coroutine of this loop: it would wait for itself."""
        assert threading.current_thread() is not self._thread, "the sync face was called from its own event loop"
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect on a coroutine that ended by itself; stops one whose caller was interrupted
            raise

    def close(self) -> None:
        """Unavailable when something is still at work after CLOSE_TIMEOUT_S: the thread ends when that does."""
        if self.closed:
            return
        self._closed = True
        if not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise Unavailable(
                f"{self._thread.name} is still at work after {CLOSE_TIMEOUT_S:g} s: a tensor's read(), or a copy",
                hint="it ends by itself; nothing more comes of it",
            )

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
