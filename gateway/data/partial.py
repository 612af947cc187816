"""The partial-response pool: what is known of every turn in flight, so that no death of an engine or gateway loses it.

Invariants:
- tokens of a turn are kept in the order appended, each once;
- what was begun and appended is on disk within `flush_interval_s` plus one commit, and at `end` before it returns;
- while the disk cannot be written no turn begins, and those under way go on in memory: what they said is written, in
  order, as soon as it can be, and `end` waits for that;
- what cannot be written of one turn, for no fault of the disk, costs that turn alone;
- an ended turn is kept until its session is forgotten; one that came to nothing can be reopened and goes on;
- at most one write of the pool is under way, and at most `BUFFERED_TOKENS_MAX` tokens wait for it before `drain` holds
  the appender back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.core.types import Segment, SessionId, TopLogprob, TurnId, TurnRecord, TurnRequest
from gateway.data import partial_store as store
from gateway.data.database import Database
from gateway.data.partial_store import KeptTurn, Outcome, Tokens, Unwritten
from protos.errors import LaminarError, NotFound

log = logging.getLogger(__name__)

BUFFERED_TOKENS_MAX = 1_000_000
"""About 16 MB waiting for the disk; beyond it appenders wait, and with them the engines' streams. While the disk
cannot be written, as many again are held by the write that waits."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    in_flight: int
    buffered_tokens: int
    flushes: int
    appended_tokens: int


class PartialResponsePool:
    """One writer (the gateway's event loop): `begin`, `open_segment`, `append`, `end`; `in_flight` after a restart."""

    def __init__(self, database: Database, *, flush_interval_s: float = 0.1) -> None:
        self._database = database
        self._flush_interval_s = flush_interval_s
        self._open: dict[TurnId, int] = {}  # turns in flight, with the segments seen of each
        self._unwritten = Unwritten()
        self._buffered_tokens = 0
        self._dirty = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._writing = asyncio.Lock()
        self._flusher: asyncio.Task[None] | None = None
        self._damaged: dict[TurnId, LaminarError] = {}  # turns under way that could not be written
        self._next_end = 1  # numbers ends: clocks go back
        self._flushes = 0
        self._journal_tokens = 0  # at most: what was read meanwhile is folded
        self._written_tokens = 0
        self.committed_tokens = 0  # of `appended_tokens`, on disk

    async def open(self) -> None:
        """Makes the tables, and takes over the turns that an earlier life left in flight."""
        await self._database.run(store.make_tables)
        await self._database.run(store.fold)
        self._open = dict(await self._database.run(store.count_segments))
        self._next_end = await self._database.run(store.last_end) + 1
        self._flusher = asyncio.create_task(self._flush_regularly(), name="partial-response-flush")

    async def close(self) -> None:
        """Writes what is buffered. The database stays open. Raises Unavailable if that cannot be."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.wait([self._flusher])
        await self.flush()

    def begin(self, request: TurnRequest) -> None:
        """Opens a turn: on disk with its first tokens at the latest. Unavailable while nothing can be written."""
        self._database.check()
        self._open[request.turn_id] = 0
        begun = (request.turn_id, request.session_id, msgspec.msgpack.encode(request), time.time())
        self._unwritten_of(request.turn_id).begun.append(begun)

    async def reopen(self, request: TurnRequest) -> None:
        """A turn in flight, or one that came to nothing, goes on where it was."""
        turn_id = request.turn_id
        self._open[turn_id] = 0  # from now on: who asked may be cancelled, and end it
        try:
            num_segments = await self._database.run(lambda connection: store.reopen(connection, turn_id))
        except LaminarError:
            self._open.pop(turn_id, None)
            raise
        if turn_id in self._open:
            self._open[turn_id] = num_segments

    def append(
        self,
        turn_id: TurnId,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[tuple[TopLogprob, ...]] = (),
    ) -> None:
        """Adds tokens that arrived together. Never waits: `drain` afterwards, as with an asyncio stream's write.

        Raises OverflowError for an id that is no 64-bit number, and what kept the turn from being written.
        """
        if self._damaged and turn_id in self._damaged:
            raise self._damaged[turn_id]
        ids = array("q", token_ids)  # all of them, or none
        tokens = self._unwritten.tokens.get(turn_id)
        if tokens is None:
            tokens = self._unwritten_of(turn_id).tokens[turn_id] = Tokens()
        tokens.token_ids += ids
        tokens.logprobs.extend(logprobs)
        if top_logprobs:
            tokens.top_logprobs += top_logprobs
        self._buffered_tokens += len(token_ids)
        if self._buffered_tokens > BUFFERED_TOKENS_MAX:
            self._room.clear()

    def open_segment(self, turn_id: TurnId, segment: Segment) -> None:
        """The tokens from `segment.start` (counted within the turn's generated ones) on are of this segment."""
        unwritten = self._unwritten_of(turn_id)
        unwritten.segments.append((turn_id, self._open[turn_id], msgspec.msgpack.encode(segment)))
        self._open[turn_id] += 1

    def close_segment(self, turn_id: TurnId, segment: Segment) -> None:
        """The last segment, as it ended: its time, and the version that its engine told."""
        unwritten = self._unwritten_of(turn_id)
        unwritten.segments.append((turn_id, self._open[turn_id] - 1, msgspec.msgpack.encode(segment)))

    @property
    def full(self) -> bool:
        """Whether `drain` would wait."""
        return not self._room.is_set()

    async def drain(self) -> None:
        """Returns at once while the disk keeps up, else when there is room."""
        if not self._room.is_set():
            await self._room.wait()

    async def end(self, turn_id: TurnId, outcome: Outcome, num_tokens: int | None = None) -> None:
        """Closes the turn; its tokens, so many, are on disk when this returns, and stay until `forget_session`.

        Waits for a disk that cannot be written. Raises what kept this turn alone from being written.
        """
        ended = outcome, num_tokens, time.time(), self._next_end, turn_id
        self._unwritten_of(turn_id).ended.append(ended)
        self._next_end += 1
        await self.flush()
        self._open.pop(turn_id, None)
        if (damaged := self._damaged.pop(turn_id, None)) is not None:
            raise damaged

    async def shorten(self, turn_id: TurnId, num_tokens: int) -> None:
        """An ended turn turns out to have stopped after its first `num_tokens` tokens."""
        await self._database.owe(
            lambda connection: (
                connection.execute(
                    "UPDATE turns SET outcome='stop', num_tokens=? WHERE turn_id=?", (num_tokens, turn_id)
                )
                and None
            )
        )

    def note_seen(self, turn_id: TurnId, num_tokens: int | None) -> None:
        """So many tokens of an ended turn were sent to a client; None: all. On disk with the next write."""
        self._unwritten.seen.append((num_tokens, turn_id))
        self._dirty.set()

    async def forget_session(self, session_id: SessionId) -> None:
        """Drops all turns of a session: its trajectory is in the experience buffer, or nobody wants it."""
        await self.forget_sessions([session_id])

    async def forget_sessions(self, session_ids: Sequence[SessionId]) -> None:
        """The same for many, in one commit."""
        if not session_ids:
            return
        await self.flush()
        for turn_id in await self._database.owe(lambda connection: store.delete_sessions(connection, session_ids)):
            self._open.pop(turn_id, None)

    async def in_flight(self) -> list[TurnRecord]:
        """Every turn without an end, oldest first."""
        await self.flush()
        return await self._database.run(store.read_in_flight)

    async def sessions(self) -> list[SessionId]:
        """Every session that has a turn here."""
        return await self._database.run(store.read_sessions)

    async def kept_turns(self, session_id: SessionId) -> list[KeptTurn]:
        """All turns kept of one session, in the order in which they ended; those in flight last.

        Raises Corrupt, with its name, when one of them cannot be read.
        """
        return await self._database.run(lambda connection: store.read_kept(connection, session_id))

    async def flush(self) -> None:
        """Returns when everything appended before the call is on disk, however long it cannot be written."""
        async with self._writing:
            if not self._unwritten:
                return
            taken, self._unwritten = self._unwritten, Unwritten()
            num_tokens, self._buffered_tokens = self._buffered_tokens, 0
            self._written_tokens += num_tokens
            self._dirty.clear()
            try:
                await self._database.owe(lambda connection: store.write(connection, taken))
            except LaminarError as e:
                if self._database.failure:
                    raise  # the gateway ends, and the disk cannot be written: it goes with the process
                await self._write_apart(taken, e)
            finally:
                self._room.set()
            self._flushes += 1
            self.committed_tokens = self._written_tokens
            await self._fold_in_time(num_tokens)

    async def _write_apart(self, taken: Unwritten, why: LaminarError) -> None:
        """Turn by turn, so that what cannot be written of one takes no other along."""
        log.error("the partial-response pool: %s; its turns are written one by one", why)
        for turn_id, part in taken.by_turn().items():
            try:
                await self._database.owe(lambda connection, part=part: store.write(connection, part))  # type: ignore[misc]
            except LaminarError as e:
                log.error("turn %s cannot be written: %s", turn_id, e)
                self._damaged[turn_id] = e

    async def _fold_in_time(self, num_tokens: int) -> None:
        self._journal_tokens += num_tokens
        if self._journal_tokens > store.JOURNAL_TOKENS_MAX:
            self._journal_tokens = 0
            await self._database.owe(store.fold)

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            len(self._open), self._buffered_tokens, self._flushes, self._written_tokens + self._buffered_tokens
        )

    async def _flush_regularly(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(self._flush_interval_s)
            try:
                await self.flush()
            except LaminarError as e:  # its turns have heard of it; the others go on
                log.error("the partial-response pool: %s", e)

    def _unwritten_of(self, turn_id: TurnId) -> Unwritten:
        if turn_id not in self._open:
            raise NotFound(f"turn {turn_id} is not in flight")
        if not self._dirty.is_set():
            self._dirty.set()
        return self._unwritten
