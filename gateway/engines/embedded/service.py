"""The asyncio side of the engine: requests in, each request's deltas out, over the model loop's bounded inbox.

Invariants:
- at most `max_num_seqs + max_waiting` requests are open; the next is refused with 429 before anything is queued;
- a request that is left early (its client disconnected) is aborted and its KV freed;
- a stream buffers at most the tokens that its request may generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.engines.embedded.batching.sequence import Delta, GenerationRequest
from gateway.engines.embedded.engine import Engine
from gateway.engines.embedded.loop import ModelLoop
from protos.errors import Conflict, OutOfCapacity, Unavailable


class DeltaStream:
    """Deltas of one request, in order, until the one with a finish reason."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None
        self.finished = False

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._arrived.set()

    async def take(self) -> list[Delta]:
        """All deltas that have arrived, at least one; raises when the engine died."""
        await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        self._arrived.clear()
        deltas, self._deltas = self._deltas, []
        self.finished = deltas[-1].finish_reason is not None
        return deltas


class EngineService:
    def __init__(self, engine: Engine) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._streams: dict[str, DeltaStream] = {}
        self._open_max = engine.config.max_num_seqs + engine.config.max_waiting
        self.config = engine.config
        self.shape = engine.shape
        self.loop = ModelLoop(engine, self._deliver, self._on_failure)

    @property
    def num_open(self) -> int:
        """Requests between their arrival and their last byte."""
        return len(self._streams)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[DeltaStream]:
        """Runs a request while the context is open; leaving before its end aborts it."""
        if len(self._streams) >= self._open_max:
            raise OutOfCapacity(
                f"{self._open_max} requests are open", hint="wait, or raise --max-waiting", retry_after_s=1.0
            )
        if request.request_id in self._streams:
            raise Conflict(f"request_id {request.request_id!r} is in use", hint="give each request its own id")
        stream = self._streams[request.request_id] = DeltaStream()
        try:
            await asyncio.wrap_future(self.loop.submit(request))
            yield stream
        finally:
            del self._streams[request.request_id]
            if not stream.finished:  # also when it was left during the submit, which the loop carries out all the same
                self.loop.abort([request.request_id])

    def _deliver(self, deltas: list[Delta]) -> None:
        """On the model thread: one hand-over per step."""
        self._asyncio.call_soon_threadsafe(self._dispatch, deltas)

    def _dispatch(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put(delta)

    def _on_failure(self, error: BaseException) -> None:
        self._asyncio.call_soon_threadsafe(self._fail_all, error)

    def _fail_all(self, error: BaseException) -> None:
        for stream in self._streams.values():
            stream.fail(Unavailable(f"the engine died: {error!r}", hint="start it again"))
