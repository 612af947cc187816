"""The partial-response pool: the tokens of every turn in flight, so that no death of an engine or gateway loses them.

It is a write-behind store. `append` only adds to memory, in the event loop and without waiting; one task moves all that
is unwritten to the database at a time. A `_Landing` stands for the set that the next write will take: whoever needs the
disk (`end`, `flush`) keeps the landing of that moment and waits for it, so a later write can neither satisfy it early
nor make it wait longer. The writer exchanges set and landing in one step, without an await between.

Invariants:
- tokens of a turn are kept in the order appended, each once;
- begun turns and appended tokens are on disk within `flush_interval_s` plus one commit, and at `end` before it returns;
- while the disk cannot be written no turn begins, and those in flight continue in memory: their tokens are written, in
  order, once the disk recovers, and `end` waits for that;
- a turn that cannot be written for another reason costs that turn alone;
- an ended turn is kept until its session is forgotten; one that ended without an answer can be reopened and continues;
- at most one write is in progress, and at most `BUFFERED_TOKENS_MAX` tokens wait for it before `drain` holds the
  appender back;
- everything that one round of the event loop wants on disk is one commit: a turn's end and its messages, for example.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.core.types import SessionId, TopLogprob, TurnId, TurnRecord, TurnRequest
from gateway.store import partial_rows as store
from gateway.store.database import Database, Operation
from gateway.store.partial_rows import KeptTurn, Message, Outcome, Tokens, Unwritten
from protos.errors import LaminarError, NotFound
from protos.trajectories import Segment

log = logging.getLogger(__name__)

BUFFERED_TOKENS_MAX = 1_000_000
"""About 16 MB that wait for the disk; beyond it appenders wait, and with them the engines' streams. While the disk
cannot be written, the write that waits holds as many again."""
ALTERNATIVE_TOKENS = 9
"""What each of a token's `top_logprobs` counts as: an object of 140 bytes."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    in_flight: int
    buffered_tokens: int
    flushes: int
    appended_tokens: int


class _Landing:
    """The result of one write. Any number of callers wait for it, and any of them may be cancelled."""

    __slots__ = ("_error", "_over")

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._error: LaminarError | None = None

    def landed(self, error: LaminarError | None = None) -> None:
        self._error = error
        self._over.set()

    async def wait(self) -> None:
        """Raises the error that kept the data from the disk."""
        await self._over.wait()
        if self._error is not None:
            raise self._error


class PartialResponsePool:
    """One writer (the gateway's event loop): `begin`, `open_segment`, `append`, `end`; `in_flight` after a restart."""

    def __init__(self, database: Database, *, flush_interval_s: float = 0.1) -> None:
        self._database = database
        self._flush_interval_s = flush_interval_s
        self._open: dict[TurnId, int] = {}  # turns in flight, with the segments seen of each
        self._unwritten = Unwritten()
        self._buffered_tokens = 0
        self._buffered_cost = 0  # in tokens, alternatives included
        self._wanted = asyncio.Event()  # a write: a caller waits for it, or the interval is over
        self._due: asyncio.TimerHandle | None = None  # the interval's end, while something is unwritten
        self._landing = _Landing()  # of `_unwritten`
        self._under_way: _Landing | None = None  # of the write in progress
        self.full = False  # `drain` would wait
        self._room = asyncio.Event()
        self._room.set()
        self._writer: asyncio.Task[None] | None = None
        self._closing = False
        self._damaged: dict[TurnId, LaminarError] = {}  # turns under way that could not be written
        self._next_end = 1  # orders ended turns: clocks may go back
        self._flushes = 0
        self._journal_cost = 0  # in tokens, alternatives included; an upper bound: reads fold the journal, too
        self._written_tokens = 0
        self.committed_tokens = 0  # of `appended_tokens`, on disk

    async def open(self) -> None:
        """Creates the tables, and takes over the turns that the previous process left in flight."""
        await self._database.run(store.make_tables)
        await self._database.run(store.fold)
        self._open = dict(await self._database.run(store.count_segments))
        self._next_end = await self._database.run(store.last_end) + 1
        self._writer = asyncio.create_task(self._write_whenever_wanted(), name="partial-response-writer")

    async def close(self) -> None:
        """Writes everything buffered. The database stays open. Raises Unavailable if that is impossible."""
        if self._writer is not None and not self._closing:
            self._closing = True
            landing = self._landing if self._unwritten else self._under_way
            self._wanted.set()
            await asyncio.wait([self._writer])
            self._writer.result()
            if landing is not None:
                await landing.wait()

    def begin(self, request: TurnRequest, num_inherited: int = 0) -> None:
        """Opens a turn: on disk with its first tokens at the latest. Unavailable while nothing can be written.

        The first `num_inherited` ids of its prompt are those of its parent's path, which ended.
        """
        self._database.check()
        self._open[request.turn_id] = 0
        kept = request
        if num_inherited:
            kept = dataclasses.replace(request, prompt_ids=request.prompt_ids[num_inherited:])
        begun = (request.turn_id, request.session_id, msgspec.msgpack.encode(kept), time.time(), num_inherited)
        self._unwritten_of(request.turn_id).begun.append(begun)

    async def reopen(self, request: TurnRequest) -> None:
        """A turn in flight, or one that ended without an answer, continues where it was."""
        turn_id = request.turn_id
        self._open[turn_id] = 0  # at once: the caller may be cancelled during the read, and end the turn
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

        Raises OverflowError for an id of more than 64 bits, and the error that kept the turn from being written.
        """
        if self._damaged and turn_id in self._damaged:
            raise self._damaged[turn_id]
        ids = array("q", token_ids)  # all of them, or none
        tokens = self._unwritten.tokens.get(turn_id)
        if tokens is None:
            tokens = self._unwritten_of(turn_id).tokens[turn_id] = Tokens()
        tokens.token_ids += ids
        tokens.logprobs.extend(logprobs)
        self._buffered_tokens += len(token_ids)
        self._buffered_cost += len(token_ids)
        if top_logprobs:
            tokens.top_logprobs += top_logprobs
            self._buffered_cost += ALTERNATIVE_TOKENS * sum(map(len, top_logprobs))
        if self._buffered_cost > BUFFERED_TOKENS_MAX:
            self.full = True
            self._room.clear()

    def open_segment(self, turn_id: TurnId, segment: Segment) -> None:
        """The tokens from `segment.start` (counted within the turn's generated ones) on are of this segment."""
        unwritten = self._unwritten_of(turn_id)
        unwritten.segments.append((turn_id, self._open[turn_id], msgspec.msgpack.encode(segment)))
        self._open[turn_id] += 1

    def close_segment(self, turn_id: TurnId, segment: Segment) -> None:
        """Replaces the last segment at its end: with its time, and the version that its engine reported."""
        unwritten = self._unwritten_of(turn_id)
        unwritten.segments.append((turn_id, self._open[turn_id] - 1, msgspec.msgpack.encode(segment)))

    async def drain(self) -> None:
        """Returns at once while the disk keeps up, else when there is room."""
        if not self._room.is_set():
            await self._room.wait()

    async def end(self, turn_id: TurnId, outcome: Outcome, num_tokens: int | None = None) -> None:
        """Closes the turn. Its `num_tokens` tokens are on disk when this returns, and stay until its session is
        forgotten.

        Waits while the disk cannot be written. Raises the error that kept this turn alone from being written.
        """
        ended = outcome, num_tokens, time.time(), self._next_end, turn_id
        self._unwritten_of(turn_id).ended.append(ended)
        self._next_end += 1
        await self.flush()
        self._open.pop(turn_id, None)
        if (damaged := self._damaged.pop(turn_id, None)) is not None:
            raise damaged

    async def note_messages(
        self, session_id: SessionId, turn_id: TurnId, head: Message, messages: Sequence[Message]
    ) -> None:
        """Records the messages of the turn's ids; on disk when this returns."""
        row = msgspec.msgpack.encode(head), msgspec.msgpack.encode(messages), session_id, turn_id
        self._changed().messages.append(row)
        await self.flush()

    async def shorten(self, turn_id: TurnId, num_tokens: int) -> None:
        """Cuts an ended turn to its first `num_tokens` tokens: a stop string ended it there."""
        await self._database.owe(
            lambda connection: (
                connection.execute(
                    "UPDATE turns SET outcome='stop', num_tokens=? WHERE turn_id=?", (num_tokens, turn_id)
                )
                and None
            )
        )

    def note_seen(self, turn_id: TurnId, num_tokens: int | None) -> None:
        """Records how many tokens of an ended turn a client was sent; None: all. On disk with the next write."""
        self._changed().seen.append((num_tokens, turn_id))

    def forgetting(self, session_id: SessionId) -> Operation[object]:
        """The operation that drops all turns of a session, none of which runs: its trajectory is in the experience
        buffer, or is not wanted."""
        return lambda connection: store.delete_sessions(connection, [session_id])

    async def forget_sessions(self, session_ids: Sequence[SessionId]) -> None:
        """Drops all turns of these sessions, in one commit."""
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
        """Returns when everything appended before the call is on disk, however long the disk fails."""
        if self._unwritten:
            landing = self._landing
            self._wanted.set()
            await landing.wait()
        elif self._under_way is not None:
            await self._under_way.wait()

    async def _write_whenever_wanted(self) -> None:
        while not self._closing or self._unwritten:
            await self._wanted.wait()
            self._wanted.clear()
            if self._unwritten:
                await self._write()

    async def _write(self) -> None:
        """Writes everything unwritten in one commit."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        # One step without an await: what is appended from here on belongs to the next write, and to its landing.
        taken, self._unwritten = self._unwritten, Unwritten()
        landing, self._landing = self._landing, _Landing()
        num_tokens, self._buffered_tokens = self._buffered_tokens, 0
        cost, self._buffered_cost = self._buffered_cost, 0
        self._written_tokens += num_tokens
        self._under_way = landing
        failure: LaminarError | None = None
        try:
            await self._database.owe(lambda connection: store.write(connection, taken))
        except LaminarError as e:
            if self._database.failure:
                failure = e  # the gateway ends while the disk cannot be written: the tokens are lost with the process
                log.error("the partial-response pool: %s", e)
            else:
                await self._write_apart(taken, e)
        finally:
            self.full = False
            self._room.set()
            self._under_way = None
            landing.landed(failure)
        if failure is None:
            self._flushes += 1
            self.committed_tokens = self._written_tokens
            await self._fold_in_time(cost)

    async def _write_apart(self, taken: Unwritten, why: LaminarError) -> None:
        """Writes turn by turn, so that a turn that cannot be written costs no other."""
        log.error("the partial-response pool: %s; its turns are written one by one", why)
        for turn_id, part in taken.by_turn().items():
            try:
                await self._database.owe(lambda connection, part=part: store.write(connection, part))  # type: ignore[misc]
            except LaminarError as e:
                log.error("turn %s cannot be written: %s", turn_id, e)
                self._damaged[turn_id] = e

    async def _fold_in_time(self, cost: int) -> None:
        self._journal_cost += cost
        if self._journal_cost <= store.JOURNAL_TOKENS_MAX:
            return
        self._journal_cost = 0
        try:
            await self._database.owe(store.fold)
        except LaminarError as e:  # every read of the journal folds it first
            log.error("the partial-response pool: %s", e)

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            len(self._open), self._buffered_tokens, self._flushes, self._written_tokens + self._buffered_tokens
        )

    def _unwritten_of(self, turn_id: TurnId) -> Unwritten:
        if turn_id not in self._open:
            raise NotFound(f"turn {turn_id} is not in flight")
        return self._changed()

    def _changed(self) -> Unwritten:
        """The set to add to; it is written within `flush_interval_s`."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._flush_interval_s, self._wanted.set)
        return self._unwritten
