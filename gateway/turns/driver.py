"""The driver of a turn: a place on an engine, its stream, another place after a cut or a move, up to the finish.

Invariants:
- a resumed turn's prompt is prompt + generated ids, and its budget what is left: no token is requested twice;
- a stream counts as complete only with a finish reason; every other end is a cut;
- the turn is booked on its engine for as long as it streams there, and on the destination of a move from when the move
  is requested.

A move is a cut that the gateway makes itself, in four steps. `leave` cancels the stream and books the destination, so
that no other turn takes the place meanwhile. `_stay` waits for the stream's end and closes its segment. `_go_on`
returns the destination if it still serves the version, else another place. The first token from there resolves
`arrived`. Between the steps the stream may still end by itself, be cut, or the turn be given up: then the move failed,
and the destination is released.

Events are handled where the socket is read (`_take`); the task that runs `run_to_end` wakes only for what has to wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass

from gateway.core.faults import WAIT_MAX_S, Cuts
from gateway.core.fleet.curves import Gaps
from gateway.core.fleet.events import TokensCame, TurnEndedWell
from gateway.core.fleet.prefixes import chain
from gateway.core.fleet.state import TurnLoad
from gateway.core.parameters import required, truncating
from gateway.core.placing.scheduler import Demand, Placement
from gateway.core.sampling import kinds_for, segment_sampling, tied_by
from gateway.core.sessions import SessionState
from gateway.core.spans import pause_span, segment_span, segment_trace, turn_trace
from gateway.core.types import EngineName, SegmentCause
from gateway.engines.base import EngineAdapter, EngineChunk, StreamCut
from gateway.fleet.fleet import Fleet
from gateway.runtime.counters import Counters
from gateway.store import PartialResponsePool, Timeline
from gateway.turns.audience import Audience
from gateway.turns.transcript import Transcript
from protos.errors import LaminarError, TurnLost
from protos.telemetry.context import TraceContext
from protos.telemetry.logs import about
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)

CUT_BACKOFF_S = 0.05
CUT_BACKOFF_MAX_S = 1.0


@dataclass(slots=True)
class Departure:
    """A request to leave the engine: for `destination`, or (None) for any place.

    `arrived`: seconds without tokens, once the first came from elsewhere; None when nothing came of it.
    """

    destination: EngineName | None
    requested_at: float
    arrived: asyncio.Future[float | None]

    def fail(self) -> None:
        """The turn ended or was cut first."""
        if not self.arrived.done():
            self.arrived.set_result(None)


class Departed(Exception):
    """The turn has left its engine as requested."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(departure.destination)
        self.departure = departure


class Driver:
    """The driver of one turn: places it on an engine, streams, and moves it when that is requested."""

    def __init__(
        self,
        transcript: Transcript,
        audience: Audience,
        *,
        counters: Counters,
        fleet: Fleet,
        pool: PartialResponsePool,
        timeline: Timeline,
        resumed: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._transcript, self._audience = transcript, audience
        self._record, self._request = transcript.record, transcript.request
        self._session: SessionState
        self._counters, self._fleet, self._pool, self._timeline = counters, fleet, pool, timeline
        self._resumed = resumed
        self._tracer = tracer
        self._trace: TraceContext | None = None  # of the turn's span; None without tracing
        self._stream: asyncio.Task[None] | None = None
        self._departure: Departure | None = None  # requested; the stream has not ended yet
        self._awaited: Departure | None = None  # made; the first token from elsewhere has not come yet
        self._load: TurnLoad | None = None
        self._engine: EngineName | None = None
        self._pace = Gaps()

    @property
    def engine(self) -> EngineName | None:
        """The engine that streams the turn now; None while it waits for a place or has ended."""
        return self._engine if self._stream is not None else None

    def over(self) -> None:
        """No token will come from where the turn went before."""
        if self._awaited is not None:
            self._awaited.fail()

    def leave(self, destination: EngineName | None) -> Departure | None:
        """Requests that the turn leaves its engine. None when it does not stream now, was requested already, or has to
        end where it began."""
        # A finish that was read already wins: the stream is about to end by itself, with nothing left to move.
        if self._stream is None or self._transcript.finish or self._departure or self._request.sampling.in_place:
            return None
        if destination is not None and not self._fits(destination):
            return None
        self._stream.cancel()
        arrived = asyncio.get_running_loop().create_future()
        self._departure = Departure(destination, time.monotonic(), arrived)
        if destination in self._fleet.state.engines:
            assert self._load is not None
            self._fleet.places.enter(destination, self._load)
        return self._departure

    def interrupt(self) -> None:
        """The engine is needed: the turn pauses, and goes on where the scheduler places it."""
        self.leave(None)

    def _fits(self, engine: EngineName) -> bool:
        state = self._fleet.state.engines.get(engine)
        if state is None:
            return True
        kinds, most = self._kinds(), state.context_tokens
        if kinds is not None and state.kind not in kinds:
            return False
        return not most or self._load is None or self._load.tokens_max <= most

    async def run_to_end(self, session: SessionState, began_unix_s: float) -> None:
        """Until the record has the finish reason, which is not shown yet. Raises what ends the turn otherwise."""
        self._session = session
        if self._tracer is not None and session.spec.trace is not None:
            self._trace = turn_trace(session.spec.trace, self._request.turn_id, began_unix_s)
        config = self._fleet.config
        if self._transcript.complete:  # it was cut or suspended between its last token and its end
            self._finish_here()
            return
        if self._resumed:
            await (
                self._fleet.polled()
            )  # after a restart: else it would leave its version for the first engine to respond
        wait_s = config.placement_timeout_s if self._record.segments else config.queue_timeout_s
        placement = await self._fleet.places.place(self._demand(), resumed=self._resumed, timeout_s=wait_s)
        cause: SegmentCause = "cut" if self._record.segments else "start"
        cuts = Cuts()
        while True:
            try:
                await self._stay(placement, cause)
                return
            except Departed as departed:
                cause = "move"
                placement = await self._go_on(departed.departure)
            except StreamCut as cut:
                self.over()
                full, cause = cut.reason == "no_room", "cut"
                why = cuts.add(placement.engine, len(self._record.token_ids), full=full)
                self._note_cut(placement.engine, cut)
                if not self._transcript.complete:
                    if (known := tied_by(self._request.sampling)) and self._record.token_ids:
                        tokens = f"{len(self._record.token_ids)} tokens"
                        why = f"it cannot go on elsewhere, for no other engine knows {known} after {tokens}"
                    elif not why and self._fleet.out_s() > WAIT_MAX_S:
                        why = "turn after turn fails on every engine"
                    if why:
                        raise self.lost(f"{why}; the last: {cut}") from cut
                    await asyncio.sleep(min(CUT_BACKOFF_MAX_S, CUT_BACKOFF_S * 2 ** (cuts.num - 1)))
                    demand = dataclasses.replace(self._demand(), avoid=frozenset({placement.engine}))
                    placement = await self._fleet.places.place(
                        demand, resumed=True, timeout_s=config.placement_timeout_s
                    )
                    self._counters.turns_resumed += 1
            if self._transcript.complete:
                self._fleet.places.leave(placement.engine, self._request.turn_id)  # booked there, and not needed
                self._finish_here()
                return

    def _finish_here(self) -> None:
        self._record.finish_reason = self._transcript.finish or ("stop" if self._transcript.stopped else "length")

    async def _go_on(self, departure: Departure) -> Placement:
        """The next place after a departure: its destination, if that still serves the session's version.

        An engine that was removed meanwhile is returned, too: starting the stream there is a cut, and resumes as any.
        """
        self.over()
        self._awaited = departure
        self._session.moves += 1
        self._counters.moves += 1
        there = departure.destination
        if there is not None:
            engine = self._fleet.state.engines.get(there)
            if engine is None or (engine.takes_turns and engine.version == self._session.version):
                self._session.engine = there
                return Placement(there, "repack")
            self._fleet.places.leave(there, self._request.turn_id)
        return await self._fleet.places.place(
            self._demand(), resumed=True, timeout_s=self._fleet.config.placement_timeout_s
        )

    def _demand(self) -> Demand:
        tokens = len(self._request.prompt_ids) + len(self._record.token_ids)
        own = self._fleet.state.engines.get(self._session.engine) if self._session.engine is not None else None
        held = own is not None and own.status == "serving" and own.version == self._session.version
        prefix = () if held else chain(self._request.prompt_ids)
        return Demand(
            self._session,
            tokens,
            turn_id=self._request.turn_id,
            prefix=prefix,
            kinds=self._kinds(),
            tokens_max=tokens + self._transcript.left,
        )

    def _kinds(self) -> frozenset[str] | None:
        """Kinds of engines that support the turn; None for all."""
        sampling = self._request.sampling
        exact = self._session.spec.trains and bool(truncating(sampling))
        return kinds_for(constrained=sampling.constrained, truncated=exact, parameters=required(sampling))

    def _unsupported_somewhere(self) -> bool:
        """The fleet has engines that do not support the turn: no plan moves it, since plans do not look at kinds."""
        kinds = self._kinds()
        return kinds is not None and any(engine.kind not in kinds for engine in self._fleet.state.engines.values())

    async def _stay(self, placement: Placement, cause: SegmentCause) -> None:
        """Streams on one engine until the turn's end. Raises StreamCut after a cut, Departed after a departure."""
        stream = self._start_stream(placement, cause)
        ended = False
        try:
            await asyncio.wait({stream})
            ended = True
        finally:
            departure = await self._stop_stream(stream, placement.engine, ended=ended)
        if departure is not None:
            raise Departed(departure)
        if stream.cancelled():
            raise asyncio.CancelledError
        stream.result()  # raises the cut

    def _start_stream(self, placement: Placement, cause: SegmentCause) -> asyncio.Task[None]:
        """Opens a segment and its stream. StreamCut when the engine does not serve any more."""
        handle = self._fleet.handles.get(placement.engine)
        if handle is None or handle.state.status != "serving":
            self._fleet.places.leave(placement.engine, self._request.turn_id)
            raise StreamCut("refused", f"engine {placement.engine} is gone")
        tokens = len(self._request.prompt_ids) + len(self._record.token_ids)
        spec = self._session.spec
        self._load = TurnLoad(
            self._request.turn_id,
            self._request.session_id,
            tokens,
            tokens + self._transcript.left,
            generated=len(self._record.token_ids),
            expected_tokens=spec.expected_output_tokens or 0,
            moves=self._session.moves,
            ends_session=spec.ephemeral,
            in_place=self._request.sampling.in_place or self._unsupported_somewhere(),
        )
        self._fleet.places.enter(placement.engine, self._load)
        self._fleet.places.occupy(self._request.turn_id, self)
        self._engine = placement.engine
        state = handle.state
        self._transcript.open_segment(state, cause)
        if self._trace is not None:
            self._record_pause(self._trace)
        self._departure = None
        stream_name = f"stream-{self._request.turn_id}"
        self._stream = asyncio.create_task(self._consume(handle.adapter, placement.engine), name=stream_name)
        return self._stream

    async def _stop_stream(self, stream: asyncio.Task[None], engine: EngineName, *, ended: bool) -> Departure | None:
        """Closes the segment and returns the place. Returns the departure that ended the stream, if one did.

        `ended`: the stream, and not the turn's driver, which is cancelled when the turn is given up.
        """
        self._stream, self._engine = None, None
        if not stream.done():
            stream.cancel()
            await asyncio.wait({stream})
        if not ended and not stream.cancelled() and (error := stream.exception()) is not None:
            # The driver is cancelled: it raises that, and nobody else gets this error.
            log.info("the stream of turn %s, which is given up, failed: %r", self._request.turn_id, error)
        departure, self._departure = self._departure, None
        # The stream may have ended by itself before the cancellation reached it: then the turn is complete, or cut.
        departed = ended and departure is not None and stream.cancelled()
        end = "finished" if self._record.finish_reason else "moved" if departed else "cut"
        if not self._transcript.check_version():
            self._fleet.suspect(engine)
        self._transcript.close_segment(end, self._session.spec.group_id)
        if self._trace is not None:
            self._record_segment(self._trace, end)
        self._fleet.places.leave(engine, self._request.turn_id)
        if departure is not None and not departed:
            departure.fail()
            if departure.destination is not None:
                self._fleet.places.leave(departure.destination, self._request.turn_id)
        return departure if departed else None

    async def _consume(self, adapter: EngineAdapter, engine: EngineName) -> None:
        """Puts the engine's events into record and pool; returns at the finish, whose tokens are not shown yet."""
        sampling = segment_sampling(self._request, len(self._record.token_ids))
        prompt = (*self._request.prompt_ids, *self._record.token_ids)
        request_id = f"{self._request.turn_id}-{self._transcript.last_segment}"
        self._pace.begin()
        traceparent = "" if self._trace is None else self._segment_trace(self._trace).traceparent
        async with adapter.generate(prompt, sampling, request_id, self._request.session_id, traceparent) as stream:
            self._audience.start()
            await stream.deliver(self._take)
        self._fleet.send(TurnEndedWell(engine))
        self._record.finish_reason = self._transcript.finish

    def _take(self, chunk: EngineChunk) -> Awaitable[None] | None:
        """Records tokens, and shows them unless they are the last. Returns what the engine's stream has to wait for."""
        if chunk.versions:
            self._transcript.note_versions(chunk)
        if num_tokens := len(chunk.token_ids):
            self._transcript.take(chunk)
            assert self._load is not None
            self._load.tokens += num_tokens
            if self._pace.count(num_tokens):
                self._note_pace()
            if self._awaited is not None:
                self._note_arrival(self._awaited)
        if chunk.finish_reason is not None:
            # Noted here, since the driver's task runs later: a departure requested in between would repeat the turn.
            self._transcript.finish = chunk.finish_reason
            return None
        return self._keep_up() if self._audience.show() or self._pool.full else None

    async def _keep_up(self) -> None:
        await self._pool.drain()
        await self._audience.keep_up()

    def _note_pace(self) -> None:
        """Adds the time that the tokens since the last measurement took to the engine's decode curve."""
        seen = self._pace.measure(time.monotonic())
        if seen is not None and self._engine is not None:
            self._fleet.send(TokensCame(self._engine, *seen))

    def _note_arrival(self, departure: Departure) -> None:
        """The first token came from the engine where the turn went."""
        if not departure.arrived.done():
            departure.arrived.set_result(time.monotonic() - departure.requested_at)
        self._awaited = None

    # -- spans

    def _segment_trace(self, turn: TraceContext) -> TraceContext:
        return segment_trace(turn, self._request.turn_id, self._transcript.last_segment)

    def _record_pause(self, turn: TraceContext) -> None:
        """After a segment began: the time since the one before."""
        segments, last = self._record.segments, self._transcript.last_segment
        if self._tracer is not None and turn.sampled and last:
            self._tracer.record(pause_span(turn, self._request, last, segments[-2], segments[-1]))

    def _record_segment(self, turn: TraceContext, end: str) -> None:
        """After it was closed."""
        if self._tracer is not None and turn.sampled:
            last = self._transcript.last_segment
            self._tracer.record(segment_span(turn, self._request, last, self._record.segments[-1], end))

    def _note_cut(self, engine: EngineName, cut: StreamCut) -> None:
        counters = self._counters
        counters.turns_cut += 1
        counters.cuts_by_reason[cut.reason] = counters.cuts_by_reason.get(cut.reason, 0) + 1
        log.warning(
            "turn %s cut after %d tokens: %s",
            self._request.turn_id,
            len(self._record.token_ids),
            cut,
            extra=self._about(engine),
        )
        self._timeline.add("turn", turn_id=self._request.turn_id, engine=engine, state="cut", reason=cut.reason)
        self._fleet.failed(engine, self._request.turn_id, cut)

    def lost(self, why: str) -> LaminarError:
        self._counters.turns_lost += 1
        log.error("turn %s is lost: %s", self._request.turn_id, why, extra=self._about(None))
        return TurnLost(f"turn {self._request.turn_id} is lost: {why}", hint="send the request again")

    def _about(self, engine: EngineName | None) -> dict[str, str | int]:
        """What a log record of this turn is about."""
        version = None if not self._record.segments else self._transcript.version
        return about(
            self._trace, session=self._request.session_id, turn=self._request.turn_id, engine=engine, version=version
        )
