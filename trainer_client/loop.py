"""The bases of the SDK's clients, and the event loop in a thread that runs an asyncio client for synchronous callers.

Invariants:
- every coroutine of a client runs on its one loop, so the asyncio client needs no locks against threads;
- `run` returns the coroutine's result or raises its error; an interrupted caller cancels its coroutine;
- `close` cancels what is still running, waits for it, and joins the thread; it may be called twice;
- a forked process, in which the thread does not exist, gets Conflict instead of waiting for it.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Generic, Self, TypeVar

from protos.errors import Conflict, Unavailable

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for cancelled work to end before it raises Unavailable."""


class LoopThread:
    """Runs coroutines for synchronous callers, on a daemon thread: a trainer that crashes still exits."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `work` and returns at once; the future has its result or error."""
        if self.closed:
            work.close()
            raise Conflict("this client is closed", hint="open a new one; a closed client is not used again")
        if not self._thread.is_alive():
            work.close()
            raise Conflict("this client was opened in another process", hint="open one after the fork")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end. A coroutine of this loop must not call it: it would wait for itself."""
        assert threading.current_thread() is not self._thread, "the client was called from its own event loop"
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # stops the coroutine of an interrupted caller; no effect on one that has ended
            raise
        finally:
            del future  # its error's traceback has this frame, and through those below it the relay's memory

    def close(self) -> None:
        """Raises Unavailable when work goes on after CLOSE_TIMEOUT_S; the thread then ends together with that work."""
        if self.closed:
            return
        self._closed = True
        if not self._thread.is_alive():
            return
        cancelled = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        cancelled.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise Unavailable(
                f"{self._thread.name} is still at work after {CLOSE_TIMEOUT_S:g} s: a tensor's read(), or a copy",
                hint="it ends by itself; its result is dropped",
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


class AsyncClient(ABC):
    """A client that is closed when its `async with` block ends."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


ClientT = TypeVar("ClientT", bound=AsyncClient)


class SyncClient(Generic[ClientT]):
    """A synchronous client: runs the coroutines of an asyncio client on a loop thread. A context manager."""

    def __init__(self, client: ClientT, thread_name: str) -> None:
        self._client = client
        self._loop = LoopThread(thread_name)

    def close(self) -> None:
        if not self._loop.closed:
            try:
                self._loop.run(self._client.close())
            finally:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
