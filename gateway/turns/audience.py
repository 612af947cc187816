"""The audience of a turn: any number of clients that read it, each from the first token on.

Invariants:
- the turn's record is the only copy of its tokens: a reader is a position in it, so memory does not grow with readers;
- a delta never crosses segments; the finish is shown once, with or after the last token;
- a reader that has caught up gets new tokens within the call that shows them: no task is woken in between. What a
  reader raises stays with that reader, and never reaches the turn;
- a turn counts as read for each client separately: from its claim until it attaches, while it is attached, and from its
  last token until it leaves. What one client does ends no other's part;
- while clients read along, the engine's stream waits at `UNREAD_TOKENS_MAX` tokens ahead of the slowest one, for
  `PATIENCE_S` at most. Then the turn goes on without that reader, which may read on from the record at any time.
  Readers `at_end` never delay the stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.core.retries import Attention
from gateway.core.types import EngineName, TokenDelta, TurnRecord, Version

UNREAD_TOKENS_MAX = 1024
"""Tokens that wait for a slow client before its engine's stream is held back."""
READ_TOKENS_MAX = 512
"""Tokens of a record that a reader gets in one step: with stop strings and tools each takes some 30 us."""
PATIENCE_S = 2.0
"""For a client that has not read on: other turns need the engine's place."""

CLAIM_S = 5.0
"""From a client's claim until it attaches: mostly some rounds of the event loop. A handler that was cancelled in
between never attaches, and its claim expires."""

TakeDelta = Callable[[TokenDelta], Awaitable[object] | None]
"""Gets a delta; returns what to await before the next one, or None."""


@dataclass(eq=False, slots=True)
class _Reader:
    """`waiting`: set once the reader has caught up; resolved with what `take` returned, or None after a failure."""

    take: TakeDelta
    at_end: bool = False  # gets nothing before the turn is over, then all of it
    left_behind: bool = False  # `PATIENCE_S` are over: the turn goes on without it
    position: int = 0
    segment: int = 0
    over: bool = False  # it has read the finish
    waiting: asyncio.Future[Awaitable[object] | None] | None = None


class Audience:
    def __init__(self, record: TurnRecord, attention: Attention = "unread") -> None:
        self._record = record
        self._attention = attention
        self._attached = 0
        self._claims: deque[float] = deque()  # when the claim of each client that joined expires, in order
        self._num_answering = 0  # clients that have read all of it and have not left
        self._readers: list[_Reader] = []
        self._shown = self._slowest = len(record.token_ids)
        self._over = record.finish_reason is not None  # a turn in flight has none
        self._started = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    # -- the turn's side

    def start(self) -> None:
        """An engine has begun to stream the turn."""
        self._started = True
        self._changed.set()

    def show(self) -> bool:
        """Gives readers everything in the record. Returns whether a reader `lags`."""
        shown = slowest = self._shown = len(self._record.token_ids)
        for reader in self._readers:
            if reader.at_end and not self._over:
                continue
            if reader.waiting is not None and not reader.waiting.done():
                self._wake(reader, reader.waiting)
            if reader.position < slowest:
                slowest = reader.position
        self._slowest = slowest
        return slowest <= shown - UNREAD_TOKENS_MAX and self.lags

    def _wake(self, reader: _Reader, waiting: asyncio.Future[Awaitable[object] | None]) -> None:
        """Gives a waiting reader what is there. Wakes its task only if it has to await, end or raise."""
        try:
            held = self._hand(reader)
        except Exception as e:  # noqa: BLE001 (raised where it reads)
            waiting.set_exception(e)
            return
        if held is None and not reader.over and self._failure is None:
            return
        waiting.set_result(held)

    def end(self, failure: Exception | None = None) -> None:
        """Nothing more comes: the record has its finish reason, or every reader gets `failure`."""
        self._over, self._failure = True, failure
        self.show()
        self._changed.set()

    @property
    def lags(self) -> bool:
        """Whether a reader was too far behind when something was last shown, and still is."""
        far = self._shown - UNREAD_TOKENS_MAX
        return self._slowest <= far and any(self._holds_up(reader, far) for reader in self._readers)

    @staticmethod
    def _holds_up(reader: _Reader, far: int) -> bool:
        return reader.position <= far and not (reader.at_end or reader.left_behind)

    async def keep_up(self) -> None:
        """Returns when no reader is too far behind: it has read on, has left, or is left behind."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.lags:
                    self._taken.clear()
                    await self._taken.wait()
        except TimeoutError:
            for reader in self._readers:
                reader.left_behind |= self._holds_up(reader, self._shown - UNREAD_TOKENS_MAX)

    # -- the clients' side

    @property
    def attached(self) -> int:
        return self._attached

    @property
    def attention(self) -> Attention:
        return "read" if self._attached or self.claimed or self._num_answering else self._attention

    def claim(self) -> None:
        """A client is about to attach: until it has, or `CLAIM_S` are over, the turn counts as read."""
        now = asyncio.get_running_loop().time()
        while self._claims and self._claims[0] <= now:
            self._claims.popleft()
        self._claims.append(now + CLAIM_S)

    @property
    def claimed(self) -> bool:
        return bool(self._claims) and asyncio.get_running_loop().time() < self._claims[-1]

    def answering(self) -> None:
        """A client has read all of the turn, and its answer is being sent: a sibling must not take the turn for unread.

        There is no timeout: the last bytes to a slow client take long, and its handler always calls `left`.
        """
        self._num_answering += 1

    def left(self) -> None:
        """The client of one `answering` has the answer, or is gone. Others may still be answered."""
        assert self._num_answering, "no client has read all of it"
        self._num_answering -= 1

    def attach(self) -> None:
        if self._claims:
            self._claims.popleft()
        self._attached += 1

    def detach(self) -> None:
        self._attached -= 1
        self._changed.set()

    async def all_left(self) -> None:
        """Returns when no client reads."""
        while self._attached:
            self._changed.clear()
            await self._changed.wait()

    def answered(self) -> None:
        """A client has received the whole answer."""
        self._attention = "answered"

    @property
    def has_started(self) -> bool:
        return self._started

    async def started(self) -> None:
        """Returns when an engine streams the turn, or it is over; raises what ended it."""
        while not (self._started or self._over):
            self._changed.clear()
            await self._changed.wait()
        self.check()

    def check(self) -> None:
        """Raises the turn's failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    async def read(self, take: TakeDelta, *, at_end: bool = False) -> None:
        """Gives `take` every delta, from first token to finish. Raises what it raises, or what ended the turn.

        `at_end`: not before the turn is over, one delta a segment; a token costs such a reader nearly nothing.
        """
        reader = self._enter(_Reader(take, at_end))
        try:
            held = self._hand(reader, READ_TOKENS_MAX)
            while True:
                if held is not None:
                    await held
                if reader.over:
                    return
                if held is None and not self._has_more(reader):
                    held = await self._wait(reader)
                    continue
                if held is None:
                    await asyncio.sleep(0)  # others go on between the pieces of a long record
                held = self._hand(reader, READ_TOKENS_MAX)
        finally:
            self._leave(reader)

    def _enter(self, reader: _Reader) -> _Reader:
        self._readers.append(reader)
        return reader

    def _leave(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        self._taken.set()

    async def _wait(self, reader: _Reader) -> Awaitable[object] | None:
        """Waits, for a reader that has caught up."""
        self.check()
        reader.waiting = asyncio.get_running_loop().create_future()
        try:
            return await reader.waiting
        finally:
            reader.waiting = None

    def _has_more(self, reader: _Reader) -> bool:
        return reader.position < self._shown and (self._over or not reader.at_end)

    def _hand(self, reader: _Reader, most: int | None = None) -> Awaitable[object] | None:
        """Gives the reader what is there, or `most` tokens, until it has to await something, which is returned."""
        if reader.at_end and not self._over:
            return None
        while (delta := self._next(reader, None if reader.at_end else most)) is not None:
            reader.over = delta.finish_reason is not None
            held = reader.take(delta)
            if held is not None or reader.over:
                return held
            if most is not None or (reader.position >= self._shown and not self._over):
                return None
        return None

    def _next(self, reader: _Reader, most: int | None) -> TokenDelta | None:
        record, start = self._record, reader.position
        segments = record.segments
        while reader.segment + 1 < len(segments) and segments[reader.segment + 1].start <= start:
            reader.segment += 1
        end = self._shown if reader.segment + 1 >= len(segments) else segments[reader.segment + 1].start
        if most is not None:
            end = min(end, start + most)
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
