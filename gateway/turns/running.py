"""A turn from its beginning to its end, and the clients that read it.

Invariants:
- before readers get the turn's finish, the turn has left its engine and is in its session's tree: the client's next
  request, sent at once, finds both. Its end is on disk before readers leave the turn, and so before they show the
  finish; what they write meanwhile (`record_turn`) is one commit with the end;
- a turn that nobody reads goes on for `disconnect_grace_s` and is then aborted. It keeps its tokens: a retry gets
  them, and the rest;
- while an end is in progress (`ending`), nothing joins, revives or ends the turn a second time.

One task owns the turn, from `begin` on, and runs its driver (`gateway.turns.driver`). Clients are its audience, which
comes and goes. Its tokens so far are in its transcript (`gateway.turns.transcript`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec

from gateway.core.retries import Attention
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, TurnRecord, TurnRequest
from gateway.engines.base import RequestRefused
from gateway.fleet.fleet import Fleet
from gateway.runtime.counters import Counters
from gateway.runtime.shielded import ShieldedTasks
from gateway.runtime.supervisor import log_failure
from gateway.store import PartialResponsePool, Timeline
from gateway.turns.audience import CLAIM_S, Audience, TakeDelta
from gateway.turns.driver import Driver
from gateway.turns.transcript import Transcript
from protos.errors import Conflict, LaminarError, OutOfCapacity, Unavailable, VersionLost
from protos.telemetry.spans import Tracer
from protos.trajectories import Segment, VersionChange

log = logging.getLogger(__name__)


class TurnOwner(Protocol):
    """The session side of a turn: notified when the turn begins and how it ended."""

    counters: Counters
    tracer: Tracer | None
    eos_ids: frozenset[int]
    vocab_size: int

    def turn_began(self, run: RunningTurn) -> SessionState: ...

    def turn_ended(self, run: RunningTurn) -> None: ...

    def turn_dropped(self, run: RunningTurn, why: Exception) -> None: ...

    def turn_suspended(self, run: RunningTurn) -> None: ...


class RunningTurn:
    """Implements `gateway.ports.TurnHandle`."""

    def __init__(
        self,
        request: TurnRequest,
        *,
        owner: TurnOwner,
        fleet: Fleet,
        pool: PartialResponsePool,
        timeline: Timeline,
        record: TurnRecord | None = None,
        attention: Attention = "unread",
        over: bool = False,
    ) -> None:
        """`record`: of an earlier attempt; it is in the pool, too. `over`: the turn has ended, complete or not."""
        self.request = request
        self.record = TurnRecord(request) if record is None else record
        self.audience = Audience(self.record, attention)
        self.session: SessionState
        self.began_unix_s = 0.0  # in this life of the gateway
        self._owner, self._fleet, self._pool = owner, fleet, pool
        self._resumed = record is not None
        self._transcript = Transcript(
            self.record,
            pool=pool,
            timeline=timeline,
            counters=owner.counters,
            eos_ids=owner.eos_ids,
            vocab_size=owner.vocab_size,
            logprobs_kind=fleet.config.logprobs_kind,
        )
        self._driver = Driver(
            self._transcript,
            self.audience,
            counters=owner.counters,
            fleet=fleet,
            pool=pool,
            timeline=timeline,
            resumed=self._resumed,
            tracer=owner.tracer,
        )
        self._task: asyncio.Task[None] | None = None
        self._shielded = ShieldedTasks()
        self._in_pool = False
        self._ended = over
        self._sent: int | None = None  # tokens that were sent to a client; None: not known
        self.attempt = 0.0  # the highest number of the attempts that requested it: see `core.retries`
        self._grace: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._num_ends = 0
        self._settled = asyncio.Event()

    # -- the clients' side

    def begin(self) -> None:
        """Puts the turn into its session and starts its driver. Raises Conflict or NotFound if the session refuses."""
        self.session = self._owner.turn_began(self)
        self._task = asyncio.create_task(self._drive(), name=f"turn-{self.request.turn_id}")
        self._task.add_done_callback(log_failure)

    async def __aenter__(self) -> Self:
        """The first client begins the turn, others join it. Raises what ended the turn before it started."""
        if self._task is None and not self._ended:
            self.begin()
        self._attach()
        try:
            await self.audience.started()
        except BaseException:
            await self._detach()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._detach()
        if error is None and self.record.finish_reason is not None:
            self.audience.check()  # raises if its end could not be written

    async def read(self, take: TakeDelta, *, at_end: bool = False) -> None:
        await self.audience.read(take, at_end=at_end)
        self.audience.answering()

    def left(self) -> None:
        self.audience.left()

    def _attach(self) -> None:
        self.audience.attach()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    async def _detach(self) -> None:
        self.audience.detach()
        self._note_seen()
        if self._ended:
            if self._task is not None:
                await asyncio.wait({self._task})  # until the end is on disk: a client must not show the finish before
        elif not self.audience.attached:
            self.orphan(self._fleet.config.disconnect_grace_s)
            if self._giving_up is not None:  # without a grace period: the turn has left its engine when this returns
                await asyncio.wait({self._giving_up})

    def orphan(self, grace_s: float) -> None:
        """Nobody reads the turn: unless a client comes within `grace_s`, it is aborted."""
        self._owner.counters.turns_orphaned += 1
        if grace_s == 0:
            self._grace_over(grace_s)
        else:
            self._grace = asyncio.get_running_loop().call_later(grace_s, self._grace_over, grace_s)

    def claim(self, attempt: float) -> None:
        """A client joins, and is about to read: until then no other joins, and the turn is not aborted.

        The race: a retry finds the turn, and the grace period ends before its handler reads. The claim covers the time
        in between, for `CLAIM_S` at most, since a handler that was cancelled never reads.
        """
        self.attempt = max(self.attempt, attempt)
        self.audience.claim()
        if not self._ended and not self.audience.attached and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(CLAIM_S, self._grace_over, CLAIM_S)

    def _grace_over(self, grace_s: float) -> None:
        self._grace = None
        if self._ended or self.audience.attached:
            return
        if self.audience.claimed:
            self._grace = asyncio.get_running_loop().call_later(CLAIM_S, self._grace_over, grace_s)
            return
        self._giving_up = asyncio.create_task(self._give_up_orphan(grace_s), name=f"orphan-{self.request.turn_id}")
        self._giving_up.add_done_callback(log_failure)

    async def _give_up_orphan(self, grace_s: float) -> None:
        if not self.audience.attached and not self.audience.claimed:
            await self.abort(f"its client left, and nobody requested it again within {grace_s:g} s")

    @property
    def ending(self) -> bool:
        """An end is in progress: its outcome is not known yet, and nothing new may begin on the record."""
        return self._num_ends > 0

    async def settled(self) -> None:
        """Returns when no end is in progress."""
        while self.ending:
            self._settled.clear()
            await self._settled.wait()

    @contextlib.contextmanager
    def _ends(self) -> Iterator[None]:
        self._num_ends += 1
        try:
            yield
        finally:
            self._num_ends -= 1
            self._settled.set()

    @property
    def dropped(self) -> bool:
        return self._ended and self.record.finish_reason is None

    async def give_up(self, why: str) -> None:
        if self._task is not None and not self.audience.attached:
            await self.abort(why)

    def sent(self, num_tokens: int) -> None:
        self._sent = max(self._sent or 0, num_tokens)

    def delivered(self) -> None:
        self.audience.answered()
        self._note_seen()

    def _note_seen(self) -> None:
        """Records how much of the answer a client was sent: the rest is not trained on, unless a retry reads it."""
        if self._ended and self.record.finish_reason is not None:
            seen = self._sent if self.audience.attention == "unread" else None
            if self.session.seen(self.request.turn_id, seen) and self.session.spec.trains:
                self._pool.note_seen(self.request.turn_id, seen)

    async def finish_early(self, num_tokens: int) -> None:
        """Completes also when its client leaves: record, session, disk and other readers end at the same token."""
        await self._shielded.run(self._finish_early(num_tokens), f"finish-early-{self.request.turn_id}")

    async def _finish_early(self, num_tokens: int) -> None:
        with self._ends():
            await self._end_at(num_tokens)

    async def _end_at(self, num_tokens: int) -> None:
        await self._stop_driver()
        record = self.record
        if self._ended and record.finish_reason == "stop" and len(record.token_ids) <= num_tokens:
            return  # another reader found the same stop
        del record.token_ids[num_tokens:], record.logprobs[num_tokens:], record.top_logprobs[num_tokens:]
        record.segments = [
            msgspec.structs.replace(segment, end=min(segment.end, num_tokens))
            for segment in record.segments
            if segment.start < num_tokens
        ]
        record.finish_reason = "stop"
        try:
            if self._ended:  # the engine was faster than the reader: the whole answer is in the session
                shortened = self.session.shorten_turn(self.request.turn_id, num_tokens)
            else:
                self._complete()
                await self._store_end()
                shortened = True
            if shortened:
                await self._pool.shorten(self.request.turn_id, num_tokens)
        except LaminarError as e:
            await self._fail(e)  # other readers wait for an end, too
            raise
        self.audience.end()

    async def conclude(self, patience_s: float) -> None:
        """The session is to end: once nobody reads the turn, it ends with what its client was sent.

        Waits `patience_s` for clients to leave: a client may have left without the gateway having noticed.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self.audience.all_left()
        except TimeoutError:
            return  # a client reads it
        if self._ended:
            await self.released()
        elif self._sent:
            await self.finish_early(self._sent)
        else:
            await self.abort("its client left, and its session ends")

    async def abort(self, why: str) -> None:
        """Ends the turn upstream and here; readers get Conflict. Its tokens stay in the pool."""
        with self._ends():
            await self._stop_driver()
            if not self._ended:
                self._owner.counters.turns_aborted += 1
                await self._drop("aborted", Conflict(f"turn {self.request.turn_id} was aborted: {why}"))

    async def suspend(self) -> None:
        """Leaves the turn to the next life of this gateway: it stays in flight in the pool."""
        await self._stop_driver()
        if not self._ended:
            self._ended = True
            self._owner.turn_suspended(self)
            kept = self._fleet.config.data is not None
            hint = "send it again: the turn will go on" if kept else "send it again"
            self.audience.end(Unavailable("the gateway is shutting down", hint=hint))

    async def released(self) -> None:
        """Returns when the turn is over and nobody reads it any more."""
        if self._task is not None:
            await asyncio.wait({self._task})
        await self.audience.all_left()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that owns the turn, for those who wait for its end."""
        return self._task

    @property
    def segments(self) -> Sequence[Segment]:
        return self.record.segments

    @property
    def version_changes(self) -> Sequence[VersionChange]:
        return [change for change in self.session.version_changes if change.turn_id == self.request.turn_id]

    # -- the repacker's side

    @property
    def engine(self) -> EngineName | None:
        """The engine that streams the turn now; None while it waits for a place or has ended."""
        return None if self._ended else self._driver.engine

    def move(self, destination: EngineName) -> asyncio.Future[float | None] | None:
        """Moves the turn to another engine; None when it does not stream now. Its clients see a pause.

        The future gives that pause in seconds, or None when the turn ended or was cut first. From now on the turn
        counts on its destination, too, so that no other turn takes the place.
        """
        departure = None if self._ended else self._driver.leave(destination)
        return None if departure is None else departure.arrived

    # -- the driver

    async def _drive(self) -> None:
        try:
            if self._resumed:
                self._in_pool = True
                await self._pool.reopen(self.request)
            else:
                parent = self.request.parent
                self._pool.begin(self.request, 0 if parent is None else self.session.tree.turns[parent].end)
                self._in_pool = True
            await self._driver.run_to_end(self.session, self.began_unix_s)
            self._complete()
            # Readers get the finish before the end is on disk, so that what they record of the answer is one commit
            # with it. None of them leaves the turn before the commit: `_detach` waits for this task.
            self.audience.end()
            await self._store_end()
        except LaminarError as e:
            await self._fail(self._readers_error(e))
        except Exception as e:
            self._owner.counters.turns_lost += 1
            await self._fail(e)
            raise
        finally:
            self._driver.over()

    async def _fail(self, error: Exception) -> None:
        """`error` ended the turn; or, if the turn is complete, its end could not be written."""
        if self._ended:
            self.audience.end(error)
        else:
            await self._drop("lost", error)

    def _readers_error(self, error: LaminarError) -> LaminarError:
        """The error that readers get: a turn that has begun is lost, unless its session's own policy ended it."""
        if isinstance(error, OutOfCapacity) and (self.record.token_ids or self.audience.has_started):
            return self._driver.lost(f"no engine for its rest: {error.message}")
        if isinstance(error, RequestRefused) and self.record.token_ids:
            return self._driver.lost(f"its rest was refused: {error.message}")
        if isinstance(error, VersionLost):
            self._owner.counters.turns_version_lost += 1
        return error

    # -- ends

    def _complete(self) -> None:
        """The turn is complete, and enters the session's tree."""
        self._ended = True
        self._owner.turn_ended(self)
        self._note_seen()

    async def _store_end(self) -> None:
        """Writes a complete turn's end to the pool."""
        reason = self.record.finish_reason
        assert reason is not None
        with self._ends():
            await self._pool.end(self.request.turn_id, reason, len(self.record.token_ids))

    async def _stop_driver(self) -> None:
        """Cancels the driver and waits for its end. A driver whose engine reported the finish is not cancelled: the
        record is complete, and is about to enter the session."""
        if self._task is not None and not self._task.done():
            if not self._ended and self._transcript.finish is None:
                self._task.cancel()
            await asyncio.wait({self._task})

    async def _drop(self, outcome: Literal["aborted", "lost"], failure: Exception) -> None:
        """The turn leaves the session without a trace; its tokens stay in the pool for a retry.

        Its readers get the failure last: a retry that one of them sends at once finds the session without the turn.
        """
        self._ended = True
        self._owner.turn_dropped(self, failure)
        try:
            if self._in_pool:
                with self._ends():
                    await self._pool.end(self.request.turn_id, outcome, len(self.record.token_ids))
        except LaminarError as e:
            log.error("the end of turn %s is not on disk: %s", self.request.turn_id, e)
        finally:
            self.audience.end(failure)
