"""The trace of a session: what a collector sees of its turns, segments and moves, and of another gateway's part."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.core.endings import Finish
from gateway.core.types import EngineName
from protos.telemetry.context import TraceContext
from protos.telemetry.otlp import Export
from protos.telemetry.spans import Tracer
from tests.support.collector import Collector, collecting
from tests.support.gateway_shell import check_whole, read, shell
from tests.support.reading import heard
from tests.support.scripted_engine import Cut, ScriptedEngine, until

CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)


@contextlib.asynccontextmanager
async def exporting(ratio: float = 1.0) -> AsyncIterator[tuple[Collector, Tracer]]:
    """What was recorded is at the collector after the block."""
    with collecting() as collector:
        export = Export(collector.url, "laminar-gateway", {"model": "policy"})
        yield collector, Tracer(export.record, ratio)
        await asyncio.to_thread(export.close)


async def test_a_session_of_two_turns_and_a_move_is_one_tree(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1")
    async with (
        exporting() as (collector, tracer),
        e0,
        e1,
        shell(tmp_path, e0, e1, tracer=tracer) as found,
    ):
        session = found.session("s", trace=CLIENT)
        async with found.run(session) as first:
            await until(lambda: len(first.record.token_ids) == 4, "four tokens")
            first.move(EngineName("e1"))
            check_whole(first, await heard(first))
        e0.go.set()
        second = found.run(session)
        await read(second)
        await found.endings.finish(session.session_id, Finish(reward=1.0))
    assert {span.trace_id for span in collector.spans} == {CLIENT.trace_id}
    assert sorted(span.name for span in collector.spans) == [
        "move",
        "segment",
        "segment",
        "segment",
        "session",
        *["turn"] * 2,
    ]
    whole = collector.one("session", session="s", outcome="finished", turns=2, moves=1)
    assert whole.parent == CLIENT.span_id
    turn, after = collector.named("turn", session="s")
    assert (turn.parent, after.parent) == (whole.span_id, whole.span_id)
    assert (turn.attributes["laminar.turn"], after.attributes["laminar.turn"]) == (
        first.request.turn_id,
        second.request.turn_id,
    )
    assert turn.attributes["laminar.outcome"] == "length"
    assert turn.attributes["laminar.engines"] == ["e0", "e1"]
    before, rest = collector.named("segment", turn=first.request.turn_id)
    assert (before.attributes["laminar.engine"], before.attributes["laminar.outcome"]) == ("e0", "moved")
    assert (rest.attributes["laminar.engine"], rest.attributes["laminar.outcome"]) == ("e1", "finished")
    assert (before.attributes["laminar.sampled_tokens"], rest.attributes["laminar.sampled_tokens"]) == (4, 8)
    move = collector.one("move", from_engine="e0", engine="e1")
    assert {span.parent for span in (before, rest, move)} == {turn.span_id}
    assert before.ended == move.started
    assert move.ended == rest.started
    assert e0.requests[0].traceparent == before.traceparent
    assert e1.requests[0].traceparent == rest.traceparent
    (alone,) = collector.named("segment", turn=second.request.turn_id)
    assert alone.parent == after.span_id
    assert all(span.started <= span.ended for span in collector.spans)


async def test_a_cut_is_a_segment_and_the_time_to_the_next(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", cuts=deque([Cut("eof", 4)]))
    async with exporting() as (collector, tracer), e0, shell(tmp_path, e0, tracer=tracer) as found:
        await read(found.run(found.session("s")))
    before, rest = collector.named("segment")
    assert (before.attributes["laminar.outcome"], rest.attributes["laminar.cause"]) == ("cut", "cut")
    assert collector.one("resume").parent == collector.one("turn").span_id
    assert collector.one("turn").parent, "of the session, which has not ended"
    assert [request.traceparent for request in e0.requests] == [before.traceparent, rest.traceparent]


async def test_a_turn_that_another_gateway_goes_on_with_stays_in_its_trace(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", hold_at=4)
    async with exporting() as (collector, tracer), e0:
        async with shell(tmp_path, e0, tracer=tracer) as found:
            run = found.run(found.session("s", trace=CLIENT))
            run.begin()
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            await found.sessions.suspend()
        e0.go.set()
        async with shell(tmp_path, e0, tracer=tracer) as found:
            await until(lambda: found.sessions.counters.turns_completed == 1, "the rest of the turn")
            await found.endings.finish(run.request.session_id, Finish(reward=1.0))
    assert {span.trace_id for span in collector.spans} == {CLIENT.trace_id}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    earlier, later = collector.named("turn", turn=run.request.turn_id)
    assert (earlier.attributes["laminar.outcome"], later.attributes["laminar.outcome"]) == ("suspended", "length")
    before, rest = collector.named("segment", turn=run.request.turn_id)
    assert (before.parent, rest.parent) == (earlier.span_id, later.span_id)
    assert later.links == (before.span_id,)
    assert {earlier.parent, later.parent} == {collector.one("session").span_id}


async def test_a_trace_that_is_not_sampled_reaches_engines_and_no_collector(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    async with exporting(ratio=0.0) as (collector, tracer), e0, shell(tmp_path, e0, tracer=tracer) as found:
        session = found.session("s")
        await read(found.run(session))
        await found.endings.finish(session.session_id, Finish(reward=1.0))
    assert collector.spans == []
    assert e0.requests[0].traceparent.endswith("-00"), "else the engine would begin a trace of its own"


async def test_a_lost_turn_tells_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    e0 = ScriptedEngine("e0", always=Cut("400"))
    async with exporting() as (collector, tracer), e0, shell(tmp_path, e0, tracer=tracer) as found:
        run = found.run(found.session("s"))
        with pytest.raises(Exception, match="scripted to answer 400"):
            await read(run)
    assert "scripted to answer 400" in collector.one("turn", outcome="lost").error


async def test_without_a_tracer_nothing_is_sent_along(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        run = found.run()
        await read(run)
        assert run.session.spec.trace is None
    assert e0.requests[0].traceparent == ""
