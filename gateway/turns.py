"""A turn under way: placed on an engine, streamed, kept in the partial-response pool, resumed or moved as needed.

Invariants:
- every token received in a complete event is recorded once and never asked for again: a resumed turn's prompt is
  prompt + generated ids, and its budget what is left;
- a stream counts as complete only with a finish reason; every other end is a cut, and the client sees but a pause;
- the turn has left its engine, and its session and the pool hold it, before its finish is shown;
- a turn that nobody reads any more goes on for `disconnect_grace_s`, is then aborted, and keeps its tokens: whoever
  asks for it again gets them, and the rest.

One driver task owns the turn, from `begin` on; clients are its audience, and come and go.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec

from gateway.audience import Audience, TakeDelta
from gateway.core.curves import Gaps
from gateway.core.fleet import TurnLoad
from gateway.core.joining import Attention
from gateway.core.prefixes import chain
from gateway.core.sampling import kinds_for, sampled_with, segment_sampling, tied_by
from gateway.core.scheduler import Demand, Placement
from gateway.core.sessions import SessionState
from gateway.core.types import (
    EngineName,
    Evidence,
    FinishReason,
    Segment,
    SegmentCause,
    TokenDelta,
    TopLogprob,
    TurnRecord,
    TurnRequest,
    Version,
    VersionChange,
)
from gateway.data import PartialResponsePool, Timeline
from gateway.engines.base import EngineAdapter, EngineChunk, RequestRefused, StreamCut, version_of
from gateway.fleet import Fleet
from protos.errors import Conflict, LaminarError, OutOfCapacity, TurnLost, Unavailable, VersionLost

log = logging.getLogger(__name__)

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
    turns_orphaned: int = 0
    turns_joined: int = 0
    turns_recovered: int = 0
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
    eos_ids: frozenset[int]

    def turn_began(self, run: Run) -> SessionState: ...

    def turn_ended(self, run: Run) -> None: ...

    def turn_dropped(self, run: Run, why: Exception) -> None: ...


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
        record: TurnRecord | None = None,
        attention: Attention = "unread",
        over: bool = False,
    ) -> None:
        """`record`: what an earlier attempt left, in the pool too. `over`: it ended, whole or as it is."""
        self.request = request
        self.record = TurnRecord(request) if record is None else record
        self.audience = Audience(self.record, attention)
        self.session: SessionState
        self._owner, self._fleet, self._pool, self._timeline = owner, fleet, pool, timeline
        self._resumed = record is not None
        self._driver: asyncio.Task[None] | None = None
        self._stream: asyncio.Task[None] | None = None
        self._leaving: _Leaving | None = None  # asked to leave the engine it streams from
        self._left_for: _Leaving | None = None  # has left, and waits for the first token from elsewhere
        self._load: TurnLoad | None = None
        self._engine: EngineName | None = None
        self._pace = Gaps()
        self._said: FinishReason | None = None  # what the engine ended with; its stream is about to be over
        self._in_pool = False
        self._ended = over
        self._grace: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None

    # -- the clients' side

    def begin(self) -> None:
        """The session holds the turn, and its driver runs, until the turn is over. Raises what the session says."""
        self.session = self._owner.turn_began(self)
        self._driver = asyncio.create_task(self._drive(), name=f"turn-{self.request.turn_id}")

    async def __aenter__(self) -> Self:
        """The first client begins the turn, others join it. Raises what ended it before it started."""
        if self._driver is None and not self._ended:
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

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self.audience.deltas()

    async def read(self, take: TakeDelta) -> None:
        await self.audience.read(take)

    def _attach(self) -> None:
        self.audience.attach()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    async def _detach(self) -> None:
        self.audience.detach()
        if self._ended:
            if self._driver is not None:
                await asyncio.wait({self._driver})
        elif not self.audience.attached:
            self.orphan(self._fleet.config.disconnect_grace_s)
            await self.settled()

    def orphan(self, grace_s: float) -> None:
        """Nobody reads it: unless somebody comes within `grace_s`, it is given up."""
        self._owner.counters.turns_orphaned += 1
        if grace_s == 0:
            self._grace_over(grace_s)
        else:
            self._grace = asyncio.get_running_loop().call_later(grace_s, self._grace_over, grace_s)

    def _grace_over(self, grace_s: float) -> None:
        self._giving_up = asyncio.create_task(self._give_up_orphan(grace_s), name=f"orphan-{self.request.turn_id}")

    async def _give_up_orphan(self, grace_s: float) -> None:
        if not self.audience.attached:
            await self.abort(f"its client left, and nobody asked for it again within {grace_s:g} s")

    async def settled(self) -> None:
        """Returns at once, unless the turn is being given up just now."""
        if self._giving_up is not None:
            await asyncio.wait({self._giving_up})

    @property
    def came_to_nothing(self) -> bool:
        return self._ended and self.record.finish_reason is None

    def delivered(self) -> None:
        self.audience.answered()

    async def finish_early(self, num_tokens: int) -> None:
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
        if self._ended:  # the engine was faster than the reader: the session has the whole answer
            kept = self.session.shorten_turn(self.request.turn_id, num_tokens)
        else:
            await self._end()
            kept = True
        if kept:
            await self._pool.shorten(self.request.turn_id, num_tokens)
        self.audience.end()

    async def abort(self, why: str) -> None:
        """Ends the turn upstream and here; who reads it gets Conflict. Its tokens stay in the pool."""
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
        if self._driver is not None:
            await asyncio.wait({self._driver})
        await self.audience.gone()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The driver, for a shutdown that waits for running turns."""
        return self._driver

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
        if self._stream is None or self._ended or self._said or self._leaving or self.request.sampling.in_place:
            return None
        self._stream.cancel()
        arrived = asyncio.get_running_loop().create_future()
        self._leaving = _Leaving(destination, time.monotonic(), arrived)
        return self._leaving

    # -- the driver

    async def _drive(self) -> None:
        try:
            self._in_pool = True
            if self._resumed:
                await self._pool.reopen(self.request)
            else:
                self._pool.begin(self.request)
            await self._run_to_end()
        except LaminarError as e:
            await self._drop("lost", self._told(e))
        except Exception as e:
            self._owner.counters.turns_lost += 1
            await self._drop("lost", e)
            raise
        finally:
            if self._left_for is not None:
                self._left_for.came_to_nothing()

    def _told(self, error: LaminarError) -> LaminarError:
        """What readers are told of an error that ended the turn: once it has begun, it is lost, whatever the reason."""
        if isinstance(error, OutOfCapacity) and (self.record.token_ids or self.audience.has_started):
            return self._lost(f"no engine for its rest: {error.message}")
        if isinstance(error, RequestRefused) and self.record.token_ids:
            return self._lost(f"its rest was refused: {error.message}")
        if isinstance(error, VersionLost):  # by its own policy; still a turn that came to nothing
            self._owner.counters.turns_lost += 1
        return error

    async def _run_to_end(self) -> None:
        config = self._fleet.config
        if self._said_all():  # it was cut or suspended between its last token and its end
            await self._end_here()
            return
        if self._resumed:
            await self._fleet.looked()  # after a restart: lest it leave its version for the first engine that answers
        wait_s = config.placement_timeout_s if self.record.segments else config.queue_timeout_s
        placement = await self._fleet.place(self._demand(), resumed=self._resumed, timeout_s=wait_s)
        cause: SegmentCause = "cut" if self.record.segments else "start"
        cuts = 0
        while True:
            try:
                await self._stay(placement, cause)
                return
            except _Left as left:
                cause = "move"
                placement = await self._go_on(left.leaving)
            except StreamCut as cut:
                if self._left_for is not None:
                    self._left_for.came_to_nothing()
                cause, cuts = "cut", cuts + 1
                self._note_cut(placement.engine, cut)
                if not self._said_all():
                    if (known := tied_by(self.request.sampling)) and self.record.token_ids:
                        why = f"no other engine knows {known} after {len(self.record.token_ids)} tokens"
                        raise self._lost(f"it cannot go on elsewhere, for {why}: {cut}") from cut
                    if cuts >= CUTS_MAX:
                        raise self._lost(f"its stream was cut {cuts} times, last by {cut}") from cut
                    await asyncio.sleep(min(CUT_BACKOFF_MAX_S, CUT_BACKOFF_S * 2 ** (cuts - 1)))
                    demand = dataclasses.replace(self._demand(), avoid=frozenset({placement.engine}))
                    placement = await self._fleet.place(demand, resumed=True, timeout_s=config.placement_timeout_s)
                    self._owner.counters.turns_resumed += 1
            if self._said_all():
                self._fleet.leave(placement.engine, self.request.turn_id)  # it was expected there
                await self._end_here()
                return

    def _said_all(self) -> bool:
        """Nothing is left to ask for, whether an engine said so or not."""
        return self._said is not None or self._left() == 0 or self._stopped()

    def _stopped(self) -> bool:
        """Its last token ended it: an engine asked to go on after it would say what was never meant."""
        record, sampling = self.record, self.request.sampling
        if not record.token_ids or len(record.token_ids) <= sampling.min_tokens:
            return False
        last = record.token_ids[-1]
        return last in sampling.stop_token_ids or (last in self._owner.eos_ids and not sampling.ignore_eos)

    async def _end_here(self) -> None:
        self.record.finish_reason = self._said or ("stop" if self._stopped() else "length")
        await self._end()
        self.audience.end()

    async def _go_on(self, leaving: _Leaving) -> Placement:
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
        return await self._fleet.place(self._demand(), resumed=True, timeout_s=self._fleet.config.placement_timeout_s)

    def _demand(self) -> Demand:
        tokens = len(self.request.prompt_ids) + len(self.record.token_ids)
        own = self._fleet.state.engines.get(self.session.engine) if self.session.engine is not None else None
        held = own is not None and own.status == "serving" and own.version == self.session.version
        prefix = () if held else chain(self.request.prompt_ids)
        sampling = self.request.sampling
        kinds = kinds_for(sampling.json_schema, sampling.regex, sampling.structural_tag)
        return Demand(self.session, tokens, turn_id=self.request.turn_id, prefix=prefix, kinds=kinds)

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
            elif not ended and not stream.cancelled():
                stream.exception()  # a cut that nobody waits for any more
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
        stream.result()  # raises the cut
        await self._end()
        self.audience.end()

    async def _consume(self, adapter: EngineAdapter, engine: EngineName) -> None:
        """Takes the engine's events into record and pool; returns at the finish, whose tokens are not shown yet."""
        sampling = segment_sampling(self.request, len(self.record.token_ids))
        prompt = (*self.request.prompt_ids, *self.record.token_ids)
        request_id = f"{self.request.turn_id}-{self._last_segment()}"
        self._pace.begin()
        last: EngineChunk | None = None

        def take(chunk: EngineChunk) -> Awaitable[None] | None:
            nonlocal last
            last = chunk
            return self._heard(chunk, engine)

        async with adapter.generate(prompt, sampling, request_id, self.request.session_id) as stream:
            self.audience.start()
            await stream.deliver(take)
        assert last is not None
        self._check_version(last)
        self.record.finish_reason = self._said

    def _heard(self, chunk: EngineChunk, engine: EngineName) -> Awaitable[None] | None:
        """Tokens are recorded, and shown unless they are the last. Returns what the engine has to wait for."""
        if chunk.versions:
            self._check_first(chunk)
        if chunk.token_ids:
            self._note_pace(engine, len(chunk.token_ids))
            self._take(chunk)
        if chunk.finish_reason is not None:
            self._said = chunk.finish_reason  # its task comes to it later: who would have the turn leave must know now
            return None
        self.audience.show()
        return self._keep_up() if self.audience.lags or self._pool.full else None

    async def _keep_up(self) -> None:
        await self._pool.drain()
        await self.audience.keep_up()

    def _note_pace(self, engine: EngineName, num_tokens: int) -> None:
        """Tokens came: how long those before them lie back goes into the engine's decode curve."""
        now = time.monotonic()
        seen = self._pace.came(num_tokens, now)
        if seen is not None:
            self._fleet.decoded(engine, *seen)
        if self._left_for is not None:
            if not self._left_for.arrived.done():
                self._left_for.arrived.set_result(now - self._left_for.asked_at)
            self._left_for = None

    def _take(self, chunk: EngineChunk) -> None:
        record, token_ids, logprobs = self.record, chunk.token_ids, chunk.logprobs
        record.token_ids += token_ids
        record.logprobs += logprobs
        top: tuple[tuple[TopLogprob, ...], ...] = ()
        if self.request.sampling.top_logprobs:
            top = chunk.top_logprobs or ((),) * len(token_ids)
            record.top_logprobs += top
        self._pool.append(self.request.turn_id, token_ids, logprobs, top)
        self._owner.counters.tokens_generated += len(token_ids)
        assert self._load is not None
        self._load.tokens += len(token_ids)

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
            sampled_with=sampled_with(self.request.sampling, self._fleet.config.logprobs_kind),
        )
        self.record.segments.append(segment)
        self._pool.open_segment(self.request.turn_id, segment)

    def _close_segment(self, end: str) -> None:
        segment = msgspec.structs.replace(
            self.record.segments[-1], end=len(self.record.token_ids), ended_unix_s=time.time()
        )
        self.record.segments[-1] = segment
        self._pool.close_segment(self.request.turn_id, segment)
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

    def _check_first(self, chunk: EngineChunk) -> None:
        """An engine that tells its version with the first tokens is cut before one of another version is taken."""
        told = {version_of(label) for label in chunk.versions}
        if told - {self._version()} and self.record.segments[-1].start == len(self.record.token_ids):
            raise StreamCut("version", f"sent to version {self._version()}, sampled by {sorted(told)}")

    def _check_version(self, chunk: EngineChunk) -> None:
        """The engine's own word on the version stands; a difference to ours is an error that must be seen."""
        told = {version_of(label) for label in chunk.versions}
        if not told:
            return
        if told != {self._version()}:
            self._fleet.suspect(EngineName(self.record.segments[-1].engine))
            self._owner.counters.version_mismatches += 1
            log.error("turn %s: sent to version %d, sampled by %s", self.request.turn_id, self._version(), sorted(told))
        evidence: Evidence = "told" if len(told) == 1 else "contradicted"
        last = msgspec.structs.replace(self.record.segments[-1], version=max(told), evidence=evidence)
        self.record.segments[-1] = last

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
        return TurnLost(f"turn {self.request.turn_id} is lost: {why}", hint="send the request again")

    async def _end(self) -> None:
        """The turn is complete: into the session's record and the pool."""
        reason = self.record.finish_reason
        assert reason is not None
        self._ended = True
        self._owner.turn_ended(self)
        await self._pool.end(self.request.turn_id, reason)

    async def _stop_driver(self) -> None:
        """A driver that has found the turn's end brings it to its end; any other is cancelled."""
        if self._driver is not None and not self._driver.done():
            if not self._ended and self._said is None:
                self._driver.cancel()
            await asyncio.wait({self._driver})

    async def _drop(self, outcome: Literal["aborted", "lost"], failure: Exception) -> None:
        """It came to nothing: out of the session's record; what it has stays in the pool for who asks again."""
        self._ended = True
        self._owner.turn_dropped(self, failure)
        try:
            if self._in_pool:
                await self._pool.end(self.request.turn_id, outcome)
        except LaminarError as e:
            log.error("the end of turn %s is not on disk: %s", self.request.turn_id, e)
        finally:
            self.audience.end(failure)
