"""Who reads a turn, and how far: any number of clients, each from its first token on.

Invariants:
- the turn's record is the only copy of its tokens: a reader is a position in it, so memory does not grow with readers;
- a delta never crosses segments; the finish is shown once, with or after the last token;
- while somebody reads, the engine's stream is never more than `UNREAD_TOKENS_MAX` tokens ahead of the slowest reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.core.joining import Attention
from gateway.core.types import EngineName, TokenDelta, TurnRecord, Version

UNREAD_TOKENS_MAX = 1024
"""Tokens that wait for a slow client before its engine's stream is held back."""


@dataclass(eq=False, slots=True)
class _Reader:
    position: int = 0
    segment: int = 0


class Audience:
    def __init__(self, record: TurnRecord, attention: Attention = "unread") -> None:
        self._record = record
        self._attention = attention
        self._attached = 0
        self._readers: set[_Reader] = set()
        self._shown = len(record.token_ids)
        self._over = record.finish_reason is not None  # a turn in flight has none
        self._started = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    # -- the turn's side

    def start(self) -> None:
        """An engine streams the turn."""
        self._started = True
        self._changed.set()

    def show(self) -> None:
        """Everything in the record may be read."""
        self._shown = len(self._record.token_ids)
        self._changed.set()

    def end(self, failure: Exception | None = None) -> None:
        """Nothing more comes: the record has its finish reason, or `failure` is told to every reader."""
        self._over, self._failure = True, failure
        self.show()

    async def keep_up(self) -> None:
        """Returns at once unless a reader is too far behind; else when it has read on, or left."""
        while self._readers and self._shown - min(r.position for r in self._readers) >= UNREAD_TOKENS_MAX:
            self._taken.clear()
            await self._taken.wait()

    # -- the clients' side

    @property
    def attached(self) -> int:
        return self._attached

    @property
    def attention(self) -> Attention:
        return "read" if self._attached else self._attention

    def attach(self) -> None:
        self._attached += 1

    def detach(self) -> None:
        self._attached -= 1
        self._changed.set()

    async def gone(self) -> None:
        """Until no client reads."""
        while self._attached:
            self._changed.clear()
            await self._changed.wait()

    def answered(self) -> None:
        """A client has got the whole answer."""
        self._attention = "answered"

    @property
    def has_started(self) -> bool:
        return self._started

    async def started(self) -> None:
        """Until an engine streams the turn, or it is over; raises what ended it."""
        while not (self._started or self._over):
            self._changed.clear()
            await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        """From the first token to the finish; raises what ended the turn before."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                while (delta := self._next(reader)) is not None:
                    yield delta
                    if delta.finish_reason is not None:
                        return
                self._raise_failure()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._readers.discard(reader)
            self._taken.set()

    def _next(self, reader: _Reader) -> TokenDelta | None:
        record, start = self._record, reader.position
        segments = record.segments
        while reader.segment + 1 < len(segments) and segments[reader.segment + 1].start <= start:
            reader.segment += 1
        end = self._shown if reader.segment + 1 >= len(segments) else segments[reader.segment + 1].start
        last = self._over and self._failure is None and end >= self._shown
        if end <= start and not last:
            return None
        reader.position = max(start, end)
        self._taken.set()
        segment = segments[reader.segment] if segments else None
        return TokenDelta(
            tuple(record.token_ids[start:end]),
            tuple(record.logprobs[start:end]),
            Version(segment.version if segment is not None else 0),
            EngineName(segment.engine if segment is not None else ""),
            reader.segment,
            tuple(record.top_logprobs[start:end]) if record.top_logprobs else None,
            record.finish_reason if last else None,
        )
