"""Who reads a turn, and how far: any number of clients, each from its first token on.

Invariants:
- the turn's record is the only copy of its tokens: a reader is a position in it, so memory does not grow with readers;
- a delta never crosses segments; the finish is shown once, with or after the last token;
- a reader that has caught up is given what comes at once, by who shows it: no task is woken in between. What a reader
  raises is its own, and never reaches the turn;
- while somebody reads along, the engine's stream is never more than `UNREAD_TOKENS_MAX` tokens ahead of the slowest of
  them; who reads at the end holds nobody up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.core.joining import Attention
from gateway.core.types import EngineName, TokenDelta, TurnRecord, Version

UNREAD_TOKENS_MAX = 1024
"""Tokens that wait for a slow client before its engine's stream is held back."""

TakeDelta = Callable[[TokenDelta], Awaitable[object] | None]
"""Is given a delta; returns what to wait for before the next one, or None."""


@dataclass(eq=False, slots=True)
class _Reader:
    """`waiting`: it has read all there is; set to what `take` returned, or None when there is something to look at."""

    take: TakeDelta
    at_end: bool = False  # is given nothing before the turn is over, then all of it
    position: int = 0
    segment: int = 0
    over: bool = False  # it has read the finish
    waiting: asyncio.Future[Awaitable[object] | None] | None = None


class Audience:
    def __init__(self, record: TurnRecord, attention: Attention = "unread") -> None:
        self._record = record
        self._attention = attention
        self._attached = 0
        self._readers: list[_Reader] = []
        self._shown = self._slowest = len(record.token_ids)
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
        shown = self._shown = len(self._record.token_ids)
        self._slowest = shown
        for reader in self._readers:
            if reader.at_end and not self._over:
                continue
            if reader.waiting is not None and not reader.waiting.done():
                self._wake(reader, reader.waiting)
            if reader.position < self._slowest:
                self._slowest = reader.position

    def _wake(self, reader: _Reader, waiting: asyncio.Future[Awaitable[object] | None]) -> None:
        """Its task, only if it has to see to something."""
        try:
            held = self._hand(reader)
        except Exception as e:  # noqa: BLE001 (raised where it reads)
            waiting.set_exception(e)
            return
        if held is None and not reader.over and self._failure is None:
            return
        waiting.set_result(held)

    def end(self, failure: Exception | None = None) -> None:
        """Nothing more comes: the record has its finish reason, or `failure` is told to every reader."""
        self._over, self._failure = True, failure
        self.show()
        self._changed.set()

    @property
    def lags(self) -> bool:
        """Whether a reader was too far behind when something was last shown, and still is."""
        far = self._shown - UNREAD_TOKENS_MAX
        return self._slowest <= far and any(reader.position <= far and not reader.at_end for reader in self._readers)

    async def keep_up(self) -> None:
        """Until no reader is too far behind: it has read on, or left."""
        while self.lags:
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

    async def read(self, take: TakeDelta, *, at_end: bool = False) -> None:
        """Gives `take` every delta, first token to finish. Raises what it raises, or what ended the turn.

        `at_end`: not before the turn is over, one delta a segment; a token costs such a reader next to nothing.
        """
        reader = self._enter(_Reader(take, at_end))
        try:
            held = self._hand(reader)
            while True:
                if held is not None:
                    await held
                if reader.over:
                    return
                if held is not None:
                    held = self._hand(reader)
                else:
                    held = await self._wait(reader)
        finally:
            self._leave(reader)

    def _enter(self, reader: _Reader) -> _Reader:
        self._readers.append(reader)
        return reader

    def _leave(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        self._taken.set()

    async def _wait(self, reader: _Reader) -> Awaitable[object] | None:
        """For a reader that has read all there is."""
        self._raise_failure()
        reader.waiting = asyncio.get_running_loop().create_future()
        try:
            return await reader.waiting
        finally:
            reader.waiting = None

    def _hand(self, reader: _Reader) -> Awaitable[object] | None:
        """What is there for it, up to where it wants to wait."""
        if reader.at_end and not self._over:
            return None
        while (delta := self._next(reader)) is not None:
            reader.over = delta.finish_reason is not None
            held = reader.take(delta)
            if held is not None or reader.over:
                return held
            if reader.position >= self._shown and not self._over:
                return None
        return None

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
        if not self._taken.is_set():
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
