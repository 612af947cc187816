"""The spans of sessions, turns, segments, pauses and loads, made of the records that the gateway keeps anyway. Pure.

    session                       from its creation to its end
      turn                        from its begin to its end, in this life of the gateway
        segment                   one engine, one version; its context is what the engine gets as `traceparent`
        move, resume              from the end of a segment to the begin of the next

Invariants:
- a session has one trace: that of the client that made it, or a new one. It is stored with the session, so that another
  gateway which goes on with the session continues the trace;
- the id of a span is derived from what it stands for (`TraceContext.child`), so that nothing about spans is stored;
- a call without a session has no session span: its turn is below the client's span, or the root.
"""

from __future__ import annotations

from gateway.core.sessions import SessionSpec, SessionState
from gateway.core.types import TurnId, TurnRecord, TurnRequest
from protos.telemetry.context import TraceContext
from protos.telemetry.spans import Attribute, Span
from protos.trajectories import Segment


def session_trace(spec: SessionSpec, trace: TraceContext) -> TraceContext:
    """The context of the session's span; `trace`: the session's, which is not None."""
    return trace if spec.ephemeral else trace.child(f"session {spec.session_id}")


def turn_trace(trace: TraceContext, turn_id: TurnId, began_unix_s: float) -> TraceContext:
    """The context of the span of a turn that began then: one that a retry or a restart continues is a further span."""
    return trace.child(f"turn {turn_id} {began_unix_s!r}")


def segment_trace(trace: TraceContext, turn_id: TurnId, index: int) -> TraceContext:
    """`trace`: any context of the session's trace."""
    return trace.child(f"segment {turn_id} {index}")


def session_span(state: SessionState, trace: TraceContext, how: str, ended_unix_s: float) -> Span:
    """Of a session that has ended: "finished" or "abandoned"."""
    spec = state.spec
    attributes: dict[str, Attribute] = {
        "laminar.session": spec.session_id,
        "laminar.group": spec.group_id,
        "laminar.outcome": how,
        "laminar.turns": state.turns,
        "laminar.moves": state.moves,
        "laminar.versions": list(state.sampled_versions),
        "laminar.sampled_tokens": state.sampled_tokens,
    }
    context = session_trace(spec, trace)
    return Span("session", context, trace, state.created_unix_s, ended_unix_s, attributes, "server")


def turn_span(
    spec: SessionSpec,
    trace: TraceContext,
    record: TurnRecord,
    began_unix_s: float,
    ended_unix_s: float,
    outcome: str,
    error: str = "",
) -> Span:
    """Of a turn that has ended: completed ("stop", "length"), or "aborted", "lost", "suspended". It is below the span
    of the client's call, if that is of the session's trace; a call of another trace is linked."""
    request = record.request
    parent, call = session_trace(spec, trace), request.origin.trace
    links: list[TraceContext] = []
    if call is not None and call.trace_id == trace.trace_id:
        parent = call
    elif call is not None:
        links.append(call)
    earlier = sum(segment.started_unix_s < began_unix_s for segment in record.segments)
    if earlier:  # it goes on from what an earlier life of it sampled
        links.append(segment_trace(trace, request.turn_id, earlier - 1))
    mine = record.segments[earlier:]
    attributes: dict[str, Attribute] = {
        **_of_turn(request),
        "laminar.outcome": outcome,
        "laminar.prompt_tokens": len(request.prompt_ids),
        "laminar.sampled_tokens": len(record.token_ids),
        "laminar.segments": len(record.segments),
        "laminar.engines": sorted({segment.engine for segment in mine}),
        "laminar.versions": sorted({segment.version for segment in mine}),
    }
    if mine:
        attributes["laminar.queued_s"] = max(0.0, mine[0].started_unix_s - began_unix_s)
    context = turn_trace(trace, request.turn_id, began_unix_s)
    return Span("turn", context, parent, began_unix_s, ended_unix_s, attributes, "server", links, error)


def segment_span(turn: TraceContext, request: TurnRequest, index: int, segment: Segment, end: str) -> Span:
    """Of a segment that has ended: "finished", "moved" or "cut". `turn`: the context of its turn's span."""
    attributes: dict[str, Attribute] = {
        **_of_turn(request),
        "laminar.segment": index,
        "laminar.engine": segment.engine,
        "laminar.incarnation": segment.incarnation,
        "laminar.version": segment.version,
        "laminar.cause": segment.cause,
        "laminar.outcome": end,
        "laminar.sampled_tokens": segment.end - segment.start,
    }
    context = segment_trace(turn, request.turn_id, index)
    return Span("segment", context, turn, segment.started_unix_s, segment.ended_unix_s, attributes, "client")


def pause_span(turn: TraceContext, request: TurnRequest, index: int, before: Segment, after: Segment) -> Span:
    """The time without an engine before segment `index`: a "move", or the "resume" after a cut."""
    name = "move" if after.cause == "move" else "resume"
    attributes: dict[str, Attribute] = {
        **_of_turn(request),
        "laminar.engine": after.engine,
        "laminar.version": after.version,
        "laminar.from_engine": before.engine,
        "laminar.from_version": before.version,
    }
    context = turn.child(f"pause {request.turn_id} {index}")
    began = max(before.started_unix_s, before.ended_unix_s)
    return Span(name, context, turn, began, max(began, after.started_unix_s), attributes)


def load_span(
    relay: TraceContext,
    *,
    model: str,
    version: int,
    engine: str,
    address: str,
    started_unix_s: float,
    ended_unix_s: float,
    error: str,
) -> Span:
    """Of a version's load into an engine. `relay`: the context of the span with which it came to the engine's relay;
    `address`: that relay's."""
    attributes: dict[str, Attribute] = {
        "laminar.model": model,
        "laminar.version": version,
        "laminar.engine": engine,
        "laminar.relay_address": address,
    }
    context = relay.child(f"load {engine} {version} {started_unix_s!r}")
    return Span("load", context, relay, started_unix_s, ended_unix_s, attributes, "consumer", error=error)


def _of_turn(request: TurnRequest) -> dict[str, Attribute]:
    return {
        "laminar.session": request.session_id,
        "laminar.turn": request.turn_id,
        "laminar.turn_index": request.turn_index,
    }
