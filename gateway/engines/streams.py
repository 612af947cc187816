"""One turn's stream from an engine: events into chunks, up to the finish.

Invariants:
- tokens before an error are handed over before the error is raised;
- a stream that ends without a finish reason is a cut; anything after the finish is ignored;
- an event that its reader cannot handle is a cut, too: a malformed event costs that engine's stream alone;
- events that came in one read become one chunk, if they report the same versions: the more the gateway lags behind,
  the less a token costs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Protocol

from gateway.engines.base import EngineChunk, StreamCut, TakeChunk
from gateway.engines.connections import Take
from protos.errors import LaminarError


class Events(Protocol):
    """As `gateway.engines.connections.Events`."""

    async def deliver(self, take: Take) -> None: ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def complete(self) -> None: ...


class EventReader(Protocol):
    """A dialect's events, one after the other."""

    def chunk(self, data: bytes) -> EngineChunk | None:
        """None: the event has no tokens. Raises StreamCut or RequestRefused."""
        ...


class EventChunks:
    """Implements `gateway.engines.base.EngineStream`."""

    def __init__(self, events: Events, reader: EventReader, url: str) -> None:
        self._events, self._reader, self._url = events, reader, url
        self._finished = False

    async def deliver(self, take: TakeChunk) -> None:
        def take_events(events: Sequence[bytes]) -> Awaitable[object] | None:
            if len(events) == 1:
                only = self._chunk(events[0])
                return None if only is None else give(only)
            held = None
            for chunk in self._merged(events):
                held = give(chunk) or held
            return held

        def give(chunk: EngineChunk) -> Awaitable[object] | None:
            held = take(chunk)
            if chunk.finish_reason is not None or chunk.failure is not None:
                self._end_with(chunk)
            return held

        await self._events.deliver(take_events)
        self._check_finished()

    async def __aiter__(self) -> AsyncIterator[EngineChunk]:
        async for data in self._events:
            chunk = self._chunk(data)
            if chunk is not None:
                yield chunk
                self._end_with(chunk)
        self._check_finished()

    def _chunk(self, data: bytes) -> EngineChunk | None:
        try:
            return self._reader.chunk(data)
        except LaminarError:
            raise
        except Exception as e:
            raise StreamCut("protocol", f"{self._url} sent an unexpected event: {e!r}") from e

    def _end_with(self, chunk: EngineChunk) -> None:
        """Ends the stream if the chunk finishes it or failed."""
        if chunk.failure is not None:
            raise chunk.failure
        if chunk.finish_reason is not None:
            self._finished = True
            self._events.complete()

    def _check_finished(self) -> None:
        if not self._finished:
            raise StreamCut("early_end", f"{self._url} ended a stream without a finish reason")

    def _merged(self, events: Sequence[bytes]) -> Iterator[EngineChunk]:
        """The events as chunks, up to the one that finishes or fails."""
        last: EngineChunk | None = None
        failure: LaminarError | None = None
        for data in events:
            try:
                chunk = self._chunk(data)
            except LaminarError as e:
                failure = e
                break
            if chunk is None:
                continue
            if last is not None and last.versions != chunk.versions:
                yield last
                last = None
            last = chunk if last is None else merged(last, chunk)
            if last.finish_reason is not None or last.failure is not None:
                break
        if last is not None:
            yield last
        if failure is not None:
            raise failure


def merged(first: EngineChunk, then: EngineChunk) -> EngineChunk:
    """Both in one. Alternatives are there for every token or for none."""
    tops = None
    if first.top_logprobs or then.top_logprobs:
        tops = (
            *(first.top_logprobs or ((),) * len(first.token_ids)),
            *(then.top_logprobs or ((),) * len(then.token_ids)),
        )
    return EngineChunk(
        (*first.token_ids, *then.token_ids),
        (*first.logprobs, *then.logprobs),
        tops,
        then.finish_reason,
        first.versions,
        then.failure,
    )
