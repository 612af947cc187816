"""A turn under way: placed on an engine, streamed, kept in the partial-response pool, resumed or moved as needed.

Invariants:
- every token received in a complete event is recorded once and never asked for again: a resumed turn's prompt is
  prompt + generated ids, and its budget what is left;
- a stream counts as complete only with a finish reason; every other end is a cut, and the client sees but a pause;
- the turn has left its engine, and its session and the pool hold it, before the last delta is given out.

One driver task owns the turn; the HTTP handler takes deltas from its bounded queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import msgspec

from gateway.core.fleet import TurnLoad
from gateway.core.sampling import segment_sampling
from gateway.core.scheduler import Demand, Placement
from gateway.core.sessions import SessionState
from gateway.core.types import (
    EngineName,
    Segment,
    SegmentCause,
    TokenDelta,
    TurnRecord,
    TurnRequest,
    Version,
)
from gateway.data import PartialResponsePool, Timeline
from gateway.data.partial import Outcome
from gateway.engines.base import EngineAdapter, EngineChunk, RequestRefused, StreamCut
from gateway.fleet import Fleet
from protos.errors import Conflict, LaminarError, OutOfCapacity, Unavailable

log = logging.getLogger(__name__)

DELTAS_MAX = 256
"""Deltas that wait for a slow client before its engine stream is held back."""
CUTS_MAX = 20
"""Cuts after which a turn is given up as lost: something is wrong that moving on does not mend."""
CUT_BACKOFF_S = 0.05
CUT_BACKOFF_MAX_S = 1.0


@dataclass(slots=True)
class Counters:
    """What happened to turns since the gateway started."""

    turns_started: int = 0
    turns_completed: int = 0
    turns_cut: int = 0
    turns_resumed: int = 0
    turns_lost: int = 0
    turns_aborted: int = 0
    turns_mixed_version: int = 0
    moves: int = 0
    repacks: int = 0
    tokens_generated: int = 0
    version_mismatches: int = 0
    trajectories_finished: int = 0
    sessions_abandoned: int = 0
    cuts_by_reason: dict[str, int] = field(default_factory=dict)


class TurnOwner(Protocol):
    """The session side of a turn: told when it begins, and how it ended."""

    counters: Counters

    def turn_began(self, run: Run) -> SessionState: ...

    def turn_ended(self, run: Run) -> None: ...

    def turn_dropped(self, run: Run) -> None: ...


@dataclass(slots=True)
class _Leaving:
    """The turn is to leave its engine: for `destination`, or (None) for wherever there is a place.

    `arrived`: seconds without tokens, once the first came from elsewhere; None when it came to nothing.
    """

    destination: EngineName | None
    asked_at: float
    arrived: asyncio.Future[float | None]

    def came_to_nothing(self) -> None:
        if not self.arrived.done():
            self.arrived.set_result(None)


class _Left(Exception):
    """The turn left its engine because it was asked to."""

    def __init__(self, leaving: _Leaving) -> None:
        super().__init__(leaving.destination)
        self.leaving = leaving


class Run:
    """Implements `gateway.ports.TurnRun`."""

    def __init__(
        self,
        request: TurnRequest,
        *,
        owner: TurnOwner,
        fleet: Fleet,
        pool: PartialResponsePool,
        timeline: Timeline,
    ) -> None:
        self.request = request
        self.record = TurnRecord(request)
        self.session: SessionState
        self._owner, self._fleet, self._pool, self._timeline = owner, fleet, pool, timeline
        self._deltas: deque[TokenDelta] = deque()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._started = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._stream: asyncio.Task[None] | None = None
        self._leaving: _Leaving | None = None  # asked to leave the engine it streams from
        self._left_for: _Leaving | None = None  # has left, and waits for the first token from elsewhere
        self._load: TurnLoad | None = None
        self._engine: EngineName | None = None
        self._ended = False
        self._in_pool = False
        self._aborted: Conflict | None = None

    # -- the handler's side

    async def __aenter__(self) -> Self:
        self.session = self._owner.turn_began(self)
        try:
            await self._pool.begin(self.request)
            self._in_pool = True
            self._driver = asyncio.create_task(self._drive(), name=f"turn-{self.request.turn_id}")
            started = asyncio.create_task(self._started.wait())
            await asyncio.wait({self._driver, started}, return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if self._driver.done():
                self._raise_end()
        except BaseException:
            await self._give_up()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            await self._give_up()
        elif self._driver is not None:
            await asyncio.wait({self._driver})

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        assert self._driver is not None
        while True:
            while self._deltas:
                delta = self._deltas.popleft()
                self._taken.set()
                yield delta
                if delta.finish_reason is not None:
                    return
            if self._driver.done():
                self._raise_end()
                if not self._deltas:
                    return
                continue
            self._arrived.clear()
            await self._arrived.wait()

    def _raise_end(self) -> None:
        """What ended the driver, unless the turn is complete."""
        assert self._driver is not None
        if self._aborted is not None:
            raise self._aborted
        self._driver.result()

    async def finish_early(self, num_tokens: int) -> None:
        if self._ended and self._driver is not None:
            await asyncio.wait({self._driver})
        else:
            await self._stop_driver()
        record = self.record
        del record.token_ids[num_tokens:], record.logprobs[num_tokens:]
        record.segments = [
            msgspec.structs.replace(segment, end=min(segment.end, num_tokens))
            for segment in record.segments
            if segment.start < num_tokens
        ]
        record.finish_reason = "stop"
        if self._ended:  # the engine was faster than the reader: the session has the whole answer
            self.session.shorten_turn(self.request.turn_id, num_tokens)
        else:
            await self._end()

    async def abort(self, why: str) -> None:
        """Ends the turn upstream and here; who reads it gets Conflict."""
        self._aborted = Conflict(f"turn {self.request.turn_id} was aborted: {why}")
        await self._give_up()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The driver, for a shutdown that waits for running turns."""
        return self._driver

    @property
    def segments(self) -> Sequence[Segment]:
        return self.record.segments

    # -- the repacker's side

    @property
    def engine(self) -> EngineName | None:
        """Where it streams now; None while it waits for a place or has ended."""
        return self._engine if self._stream is not None and not self._ended else None

    def move(self, destination: EngineName) -> asyncio.Future[float | None] | None:
        """Asks the turn to go on elsewhere; None when it is not streaming now. The client notices but a pause.

        The future gives that pause in seconds, or None when the turn ended or was cut first. From now on the turn
        counts at its destination, too, so that nobody else takes its place there.
        """
        leaving = self._leave(destination)
        if leaving is None:
            return None
        if destination in self._fleet.state.engines:
            assert self._load is not None
            self._fleet.enter(destination, self._load)
        return leaving.arrived

    def release(self) -> bool:
        """Asks the turn to leave its engine, which is needed for something else, for any place there is."""
        return self._leave(None) is not None

    def _leave(self, destination: EngineName | None) -> _Leaving | None:
        if self._stream is None or self._ended or self._leaving is not None:
            return None
        self._stream.cancel()
        arrived = asyncio.get_running_loop().create_future()
        self._leaving = _Leaving(destination, time.monotonic(), arrived)
        return self._leaving

    # -- the driver

    async def _drive(self) -> None:
        try:
            await self._run_to_end()
        except OutOfCapacity as e:
            if self.record.token_ids or self._started.is_set():
                raise self._lost(f"no engine for its rest: {e.message}") from e
            raise
        except RequestRefused as e:
            if self.record.token_ids:
                raise self._lost(f"its rest was refused: {e.message}") from e
            raise
        finally:
            self._arrived.set()
            if self._left_for is not None:
                self._left_for.came_to_nothing()

    async def _run_to_end(self) -> None:
        config = self._fleet.config
        placement = await self._fleet.place(self._demand(), resumed=False, timeout_s=config.queue_timeout_s)
        cause: SegmentCause = "start"
        cuts = 0
        while True:
            try:
                await self._stay(placement, cause)
                return
            except _Left as left:
                cause = "move"
                placement = await self._go_on(left.leaving, placement.engine)
            except StreamCut as cut:
                if self._left_for is not None:
                    self._left_for.came_to_nothing()
                cause, cuts = "cut", cuts + 1
                self._note_cut(placement.engine, cut)
                if self._left():
                    if cuts >= CUTS_MAX:
                        raise self._lost(f"its stream was cut {cuts} times, last by {cut}") from cut
                    await asyncio.sleep(min(CUT_BACKOFF_MAX_S, CUT_BACKOFF_S * 2 ** (cuts - 1)))
                    demand = dataclasses.replace(self._demand(), avoid=frozenset({placement.engine}))
                    placement = await self._fleet.place(demand, resumed=True, timeout_s=config.placement_timeout_s)
                    self._owner.counters.turns_resumed += 1
            if self._left() == 0:
                self._fleet.leave(placement.engine, self.request.turn_id)  # it was expected there
                self.record.finish_reason = "length"
                await self._end()
                self._give(TokenDelta((), (), self._version(), placement.engine, self._last_segment(), None, "length"))
                return

    async def _go_on(self, leaving: _Leaving, left: EngineName) -> Placement:
        """Where it goes on after leaving an engine: where it was sent, if that still serves its version."""
        if self._left_for is not None:
            self._left_for.came_to_nothing()
        self._left_for = leaving
        self.session.moves += 1
        self._owner.counters.moves += 1
        there = leaving.destination
        if there is not None:
            engine = self._fleet.state.engines.get(there)
            if engine is None or (engine.status == "serving" and engine.version == self.session.version):
                self.session.engine = there
                return Placement(there, "repack")
            self._fleet.leave(there, self.request.turn_id)
        demand = dataclasses.replace(self._demand(), avoid=frozenset({left}))
        return await self._fleet.place(demand, resumed=True, timeout_s=self._fleet.config.placement_timeout_s)

    def _demand(self) -> Demand:
        tokens = len(self.request.prompt_ids) + len(self.record.token_ids)
        return Demand(self.session, tokens, turn_id=self.request.turn_id)

    def _left(self) -> int:
        return self.request.sampling.max_tokens - len(self.record.token_ids)

    async def _stay(self, placement: Placement, cause: SegmentCause) -> None:
        """Streams on one engine until the turn's end, a cut (StreamCut) or until it is asked to leave (_Left)."""
        member = self._fleet.members.get(placement.engine)
        if member is None or member.state.status != "serving":
            self._fleet.leave(placement.engine, self.request.turn_id)
            raise StreamCut("refused", f"engine {placement.engine} is gone")
        tokens = len(self.request.prompt_ids) + len(self.record.token_ids)
        self._load = TurnLoad(self.request.turn_id, self.request.session_id, tokens, tokens + self._left())
        self._fleet.enter(placement.engine, self._load)
        self._engine = placement.engine
        self._open_segment(placement.engine, member.state.version, member.state.incarnation, cause)
        self._leaving = None
        stream_name = f"stream-{self.request.turn_id}"
        self._stream = asyncio.create_task(self._consume(member.adapter, placement.engine), name=stream_name)
        ended = False
        try:
            await asyncio.wait({self._stream})
            ended = True
        finally:
            stream, self._stream, self._engine = self._stream, None, None
            if not stream.done():
                stream.cancel()
                await asyncio.wait({stream})
            leaving, self._leaving = self._leaving, None
            left = ended and leaving is not None and stream.cancelled()
            self._close_segment("finished" if self.record.finish_reason else "moved" if left else "cut")
            self._fleet.leave(placement.engine, self.request.turn_id)
            if leaving is not None and not left:  # it ended, was cut or given up first
                leaving.came_to_nothing()
                if leaving.destination is not None:
                    self._fleet.leave(leaving.destination, self.request.turn_id)
        if leaving is not None and left:
            raise _Left(leaving)
        if stream.cancelled():
            raise asyncio.CancelledError
        last = self._finish_of(stream)
        await self._end()
        self._give(last)

    def _finish_of(self, stream: asyncio.Task[None]) -> TokenDelta:
        stream.result()  # raises the cut
        assert self._last_delta is not None
        return self._last_delta

    _last_delta: TokenDelta | None = None

    async def _consume(self, adapter: EngineAdapter, engine: EngineName) -> None:
        """Takes the engine's events into record, pool and queue; returns at the finish, whose delta is kept back."""
        sampling = segment_sampling(self.request, len(self.record.token_ids))
        prompt = (*self.request.prompt_ids, *self.record.token_ids)
        request_id = f"{self.request.turn_id}-{self._last_segment()}"
        async with adapter.generate(prompt, sampling, request_id, self.request.session_id) as chunks:
            self._started.set()
            last_at: float | None = None
            async for chunk in chunks:
                last_at = self._note_pace(engine, len(chunk.token_ids), last_at)
                delta = self._take(chunk, engine)
                if chunk.finish_reason is not None:
                    self._check_version(chunk)
                    self.record.finish_reason = chunk.finish_reason
                    self._last_delta = delta
                    return
                self._give(delta)
                await self._pool.drain()
                while len(self._deltas) >= DELTAS_MAX:
                    self._taken.clear()
                    await self._taken.wait()

    def _note_pace(self, engine: EngineName, num_tokens: int, last_at: float | None) -> float | None:
        """Tokens came: how long those before them lie back goes into the engine's decode curve."""
        if num_tokens == 0:
            return last_at
        now = time.monotonic()
        if last_at is not None:
            self._fleet.decoded(engine, num_tokens, now - last_at)
        elif self._left_for is not None:
            if not self._left_for.arrived.done():
                self._left_for.arrived.set_result(now - self._left_for.asked_at)
            self._left_for = None
        return now

    def _take(self, chunk: EngineChunk, engine: EngineName) -> TokenDelta:
        if chunk.token_ids:
            self.record.token_ids += chunk.token_ids
            self.record.logprobs += chunk.logprobs
            self._pool.append(self.request.turn_id, chunk.token_ids, chunk.logprobs)
            self._owner.counters.tokens_generated += len(chunk.token_ids)
            assert self._load is not None
            self._load.tokens += len(chunk.token_ids)
        return TokenDelta(
            chunk.token_ids,
            chunk.logprobs,
            self._version(),
            engine,
            self._last_segment(),
            chunk.top_logprobs,
            chunk.finish_reason,
        )

    def _give(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    # -- segments

    def _version(self) -> Version:
        return Version(self.record.segments[-1].version)

    def _last_segment(self) -> int:
        return len(self.record.segments) - 1

    def _open_segment(self, engine: EngineName, version: Version, incarnation: str, cause: SegmentCause) -> None:
        now, at = time.time(), len(self.record.token_ids)
        segment = Segment(
            turn=self.request.turn_index,
            engine=engine,
            incarnation=incarnation,
            version=version,
            start=at,
            end=at,
            cause=cause,
            started_unix_s=now,
            ended_unix_s=now,
            seed=segment_sampling(self.request, at).seed,
        )
        self.record.segments.append(segment)
        self._pool.open_segment(self.request.turn_id, segment)

    def _close_segment(self, end: str) -> None:
        segment = msgspec.structs.replace(
            self.record.segments[-1], end=len(self.record.token_ids), ended_unix_s=time.time()
        )
        self.record.segments[-1] = segment
        self._timeline.add(
            "segment",
            session_id=self.request.session_id,
            group_id=self.session.spec.group_id,
            turn=self.request.turn_index,
            engine=segment.engine,
            version=segment.version,
            started_unix_s=segment.started_unix_s,
            ended_unix_s=segment.ended_unix_s,
            tokens=segment.end - segment.start,
            cause=segment.cause,
            end=end,
        )

    def _check_version(self, chunk: EngineChunk) -> None:
        """The engine's own word on the version stands; a difference to ours is an error that must be seen."""
        told = {int(label) for label in chunk.versions if label.isdigit()}
        if told and told != {self._version()}:
            self._owner.counters.version_mismatches += 1
            log.error("turn %s: sent to version %d, sampled by %s", self.request.turn_id, self._version(), sorted(told))
            self.record.segments[-1] = msgspec.structs.replace(self.record.segments[-1], version=max(told))

    # -- ends

    def _note_cut(self, engine: EngineName, cut: StreamCut) -> None:
        counters = self._owner.counters
        counters.turns_cut += 1
        counters.cuts_by_reason[cut.reason] = counters.cuts_by_reason.get(cut.reason, 0) + 1
        log.warning("turn %s cut after %d tokens: %s", self.request.turn_id, len(self.record.token_ids), cut)
        self._timeline.add("turn", turn_id=self.request.turn_id, engine=engine, state="cut", reason=cut.reason)
        self._fleet.suspect(engine)

    def _lost(self, why: str) -> LaminarError:
        self._owner.counters.turns_lost += 1
        log.error("turn %s is lost: %s", self.request.turn_id, why)
        return Unavailable(f"turn {self.request.turn_id} is lost: {why}", hint="send the request again")

    async def _end(self) -> None:
        """The turn is complete: into the session's record and the pool."""
        reason = self.record.finish_reason
        assert reason is not None
        self._ended = True
        self._owner.turn_ended(self)
        await self._close_in_pool(reason)

    async def _close_in_pool(self, outcome: Outcome) -> None:
        await self._pool.end(self.request.turn_id, outcome)
        if self.session.spec.ephemeral and not self.session.running:  # no trajectory will ever be made of it
            await self._pool.forget_session(self.request.session_id)

    async def _stop_driver(self) -> None:
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            await asyncio.wait({self._driver})

    async def _give_up(self) -> None:
        """The client went away, or the turn failed: abort upstream, take the prompt out of the session's record."""
        await self._stop_driver()
        if self._ended:
            return
        self._ended = True
        failed = self._driver is not None and not self._driver.cancelled() and self._driver.exception() is not None
        if not failed:
            self._owner.counters.turns_aborted += 1
        self._owner.turn_dropped(self)
        if self._in_pool:
            await self._close_in_pool("lost" if failed else "aborted")
