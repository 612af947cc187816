"""A turn from its beginning to its end, and the clients that read it.

Invariants:
- the turn has left its engine, and its session holds it, before its readers are told of its finish; it is in the pool,
  on disk, before they leave it, and so before they show the finish. What they write of it meanwhile (`record_turn`) is
  one commit with its end;
- a turn that nobody reads any more goes on for `disconnect_grace_s`, is then aborted, and keeps its tokens: whoever
  asks for it again gets them, and the rest.

One task owns the turn, from `begin` on, and runs its driver (`gateway.turns.driver`); clients are its audience, and
come and go. What it said so far is in its transcript (`gateway.turns.transcript`).
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
from gateway.runtime.orders import Orders
from gateway.store import PartialResponsePool, Timeline
from gateway.turns.audience import CLAIM_S, Audience, TakeDelta
from gateway.turns.driver import Driver
from gateway.turns.transcript import Transcript
from protos.errors import Conflict, LaminarError, OutOfCapacity, Unavailable, VersionLost
from protos.trajectories import Segment, VersionChange

log = logging.getLogger(__name__)


class TurnOwner(Protocol):
    """The session side of a turn: told when it begins, and how it ended."""

    counters: Counters
    eos_ids: frozenset[int]
    vocab_size: int

    def turn_began(self, run: RunningTurn) -> SessionState: ...

    def turn_ended(self, run: RunningTurn) -> None: ...

    def turn_dropped(self, run: RunningTurn, why: Exception) -> None: ...


class RunningTurn:
    """Implements `gateway.ports.TurnRun`."""

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
        """`record`: what an earlier attempt left, in the pool too. `over`: it ended, whole or as it is."""
        self.request = request
        self.record = TurnRecord(request) if record is None else record
        self.audience = Audience(self.record, attention)
        self.session: SessionState
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
        )
        self._task: asyncio.Task[None] | None = None
        self._orders = Orders()
        self._in_pool = False
        self._ended = over
        self._sent: int | None = None  # so many of its tokens, to a client; None: nobody said
        self.attempt = 0.0  # the highest that asked for it: see `core.joining`
        self._grace: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._ends_under_way = 0
        self._settled = asyncio.Event()

    # -- the clients' side

    def begin(self) -> None:
        """The session holds the turn, and its driver runs, until the turn is over. Raises what the session says."""
        self.session = self._owner.turn_began(self)
        self._task = asyncio.create_task(self._drive(), name=f"turn-{self.request.turn_id}")

    async def __aenter__(self) -> Self:
        """The first client begins the turn, others join it. Raises what ended it before it started."""
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
            self.audience.check()  # what kept its end from the disk

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
                await asyncio.wait({self._task})
        elif not self.audience.attached:
            self.orphan(self._fleet.config.disconnect_grace_s)
            if self._giving_up is not None:
                await asyncio.wait({self._giving_up})

    def orphan(self, grace_s: float) -> None:
        """Nobody reads it: unless somebody comes within `grace_s`, it is given up."""
        self._owner.counters.turns_orphaned += 1
        if grace_s == 0:
            self._grace_over(grace_s)
        else:
            self._grace = asyncio.get_running_loop().call_later(grace_s, self._grace_over, grace_s)

    def claim(self, attempt: float) -> None:
        """A client joins it, and is about to read: until then nobody else joins it, and it is not given up."""
        self.attempt = max(self.attempt, attempt)  # one that was not numbered may be anybody's, whoever comes after it
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

    async def _give_up_orphan(self, grace_s: float) -> None:
        if not self.audience.attached and not self.audience.claimed:
            await self.abort(f"its client left, and nobody requested it again within {grace_s:g} s")

    @property
    def ending(self) -> bool:
        """An end of it is under way: nobody can say yet whether it goes on, and nothing new may begin on its record."""
        return self._ends_under_way > 0

    async def settled(self) -> None:
        """Returns at once, unless the turn is being ended or given up just now."""
        while self.ending:
            self._settled.clear()
            await self._settled.wait()

    @contextlib.contextmanager
    def _an_end(self) -> Iterator[None]:
        self._ends_under_way += 1
        try:
            yield
        finally:
            self._ends_under_way -= 1
            self._settled.set()

    @property
    def came_to_nothing(self) -> bool:
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
        """What no client was sent of an answer is not trained on, unless one asks for it again."""
        if self._ended and self.record.finish_reason is not None:
            seen = self._sent if self.audience.attention == "unread" else None
            if self.session.seen(self.request.turn_id, seen) and self.session.spec.trains:
                self._pool.note_seen(self.request.turn_id, seen)

    async def finish_early(self, num_tokens: int) -> None:
        """Also when its client leaves meanwhile: record, session, disk and other readers end at the same token."""
        await self._orders.carry_out(self._finish_early(num_tokens), f"finish-early-{self.request.turn_id}")

    async def _finish_early(self, num_tokens: int) -> None:
        with self._an_end():
            await self._end_at(num_tokens)

    async def _end_at(self, num_tokens: int) -> None:
        await self._stop_driver()
        record = self.record
        if self._ended and len(record.token_ids) <= num_tokens:
            return  # the same stop ended it for another reader
        del record.token_ids[num_tokens:], record.logprobs[num_tokens:], record.top_logprobs[num_tokens:]
        record.segments = [
            msgspec.structs.replace(segment, end=min(segment.end, num_tokens))
            for segment in record.segments
            if segment.start < num_tokens
        ]
        record.finish_reason = "stop"
        try:
            if self._ended:  # the engine was faster than the reader: the session has the whole answer
                kept = self.session.shorten_turn(self.request.turn_id, num_tokens)
            else:
                self._take_in()
                await self._keep()
                kept = True
            if kept:
                await self._pool.shorten(self.request.turn_id, num_tokens)
        except LaminarError as e:
            await self._fail(e)  # its other readers wait for an end, too
            raise
        self.audience.end()

    async def conclude(self, patience_s: float) -> None:
        """For a session that is to end: once nobody reads it, the turn ends with what its client was sent.

        It waits so long for clients to leave, who may have left already without its being known here.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self.audience.gone()
        except TimeoutError:
            return  # somebody reads it
        if self._ended:
            await self.told()
        elif self._sent:
            await self.finish_early(self._sent)
        else:
            await self.abort("its client left, and its session ends")

    async def abort(self, why: str) -> None:
        """Ends the turn upstream and here; who reads it gets Conflict. Its tokens stay in the pool."""
        with self._an_end():
            await self._stop_driver()
            if not self._ended:
                self._owner.counters.turns_aborted += 1
                await self._drop("aborted", Conflict(f"turn {self.request.turn_id} was aborted: {why}"))

    async def suspend(self) -> None:
        """Leaves the turn to the next life of this gateway: it stays in flight in the pool."""
        await self._stop_driver()
        if not self._ended:
            self._ended = True
            kept = self._fleet.config.data is not None
            hint = "ask again: the turn will go on" if kept else "ask again"
            self.audience.end(Unavailable("the gateway is shutting down", hint=hint))

    async def told(self) -> None:
        """Until the turn is over and nobody reads it any more."""
        if self._task is not None:
            await asyncio.wait({self._task})
        await self.audience.gone()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The driver, for a shutdown that waits for running turns."""
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
        """Where it streams now; None while it waits for a place or has ended."""
        return None if self._ended else self._driver.engine

    def move(self, destination: EngineName) -> asyncio.Future[float | None] | None:
        """Asks the turn to go on elsewhere; None when it is not streaming now. The client notices but a pause.

        The future gives that pause in seconds, or None when the turn ended or was cut first. From now on the turn
        counts at its destination, too, so that nobody else takes its place there.
        """
        leaving = None if self._ended else self._driver.leave(destination)
        return None if leaving is None else leaving.arrived

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
            await self._driver.run_to_end(self.session)
            self._take_in()
            self.audience.end()
            await self._keep()
        except LaminarError as e:
            await self._fail(self._told(e))
        except Exception as e:
            self._owner.counters.turns_lost += 1
            await self._fail(e)
            raise
        finally:
            self._driver.over()

    async def _fail(self, error: Exception) -> None:
        """What ended the turn; or, once its session has it, what kept its end from the disk."""
        if self._ended:
            self.audience.end(error)
        else:
            await self._drop("lost", error)

    def _told(self, error: LaminarError) -> LaminarError:
        """What readers are told of an error that ended the turn: once it has begun, it is lost, whatever the reason."""
        if isinstance(error, OutOfCapacity) and (self.record.token_ids or self.audience.has_started):
            return self._driver.lost(f"no engine for its rest: {error.message}")
        if isinstance(error, RequestRefused) and self.record.token_ids:
            return self._driver.lost(f"its rest was refused: {error.message}")
        if isinstance(error, VersionLost):  # by its own policy; still a turn that came to nothing
            self._owner.counters.turns_lost += 1
        return error

    # -- ends

    def _take_in(self) -> None:
        """The turn is complete: into the session's record."""
        self._ended = True
        self._owner.turn_ended(self)
        self._note_seen()

    async def _keep(self) -> None:
        """A complete turn's end: into the pool."""
        reason = self.record.finish_reason
        assert reason is not None
        with self._an_end():
            await self._pool.end(self.request.turn_id, reason, len(self.record.token_ids))

    async def _stop_driver(self) -> None:
        """A driver that has found the turn's end brings it to its end; any other is cancelled."""
        if self._task is not None and not self._task.done():
            if not self._ended and self._transcript.said is None:
                self._task.cancel()
            await asyncio.wait({self._task})

    async def _drop(self, outcome: Literal["aborted", "lost"], failure: Exception) -> None:
        """It came to nothing: out of the session's record; what it has stays in the pool for who asks again."""
        self._ended = True
        self._owner.turn_dropped(self, failure)
        try:
            if self._in_pool:
                with self._an_end():
                    await self._pool.end(self.request.turn_id, outcome, len(self.record.token_ids))
        except LaminarError as e:
            log.error("the end of turn %s is not on disk: %s", self.request.turn_id, e)
        finally:
            self.audience.end(failure)
