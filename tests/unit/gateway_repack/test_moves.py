"""What a repacker sees of a move: the place kept at its destination, the pause, or that it came to nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable
from pathlib import Path

import pytest

from gateway.core.types import EngineName, Version
from gateway.engines.base import EngineChunk
from gateway.engines.connections import EVENTS_AT_ONCE_MAX
from protos.errors import TurnLost
from tests.support.gateway_shell import Shell, check_at_rest, check_whole, read, shell
from tests.support.reading import heard
from tests.support.scripted_engine import Cut, ScriptedEngine, until

E0, E1 = EngineName("e0"), EngineName("e1")


async def test_a_move_keeps_its_place_and_tells_how_long_the_pause_was(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1", hold_at=0)
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            arrived = run.move(E1)
            assert arrived is not None
            assert found.turns_on(e1) == [run.request.turn_id], "before anything else can be placed there"
            await until(lambda: e1.requests, "the rest asked for")
            assert not arrived.done(), "no token came yet"
            e1.go.set()
            deltas = await heard(run)
            pause_s = await arrived
        assert pause_s is not None
        assert 0 < pause_s < 5
        check_whole(run, deltas)
        check_at_rest(found)


async def test_a_move_of_a_turn_that_ends_first_comes_to_nothing(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            arrived = run.move(E1)
            await run.abort("the test says so")
        assert arrived is not None
        assert await arrived is None
        check_at_rest(found)


async def test_a_turn_whose_finish_was_heard_does_not_leave_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task comes to the finish only after the read that brought it: to go on elsewhere would be to say too much."""
    moved: list[object] = []
    async with ScriptedEngine("e0") as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        run = found.run()
        driver = run._driver
        heard = driver._take

        def hear(chunk: EngineChunk) -> Awaitable[None] | None:
            held = heard(chunk)
            if chunk.finish_reason is not None:
                moved.append(run.move(E1))
                found.fleet.places.interrupt(run.request.turn_id)
            return held

        monkeypatch.setattr(driver, "_take", hear)
        check_whole(run, await read(run))
        assert moved == [None]
        assert [segment.cause for segment in run.segments] == ["start"]
        check_at_rest(found)


async def test_a_move_whose_first_stream_there_is_cut_comes_to_nothing(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1", always=Cut("503"))
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            arrived = run.move(E1)
            e0.go.set()
            check_whole(run, await heard(run))
        assert arrived is not None
        assert await arrived is None
        check_at_rest(found)


async def test_a_destination_that_left_the_version_gets_nothing(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1")
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            found.fleet.state.engines[E1].version = 7  # type: ignore[assignment]
            run.move(E1)
            e0.go.set()
            check_whole(run, await heard(run))
        assert not e1.requests
        assert {s.version for s in run.segments} == {0}
        check_at_rest(found)


async def test_a_released_turn_goes_on_wherever_there_is_a_place(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, ScriptedEngine("e1") as e1, shell(tmp_path, e0, e1) as found:
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            found.fleet.state.engines[E0].leaving = True  # as for an engine that is to load
            found.fleet.places.interrupt(run.request.turn_id)
            check_whole(run, await heard(run))
        assert [(s.engine, s.cause) for s in run.segments] == [("e0", "start"), ("e1", "move")]
        assert found.sessions.counters.turns_cut == 0
        check_at_rest(found)


async def test_decode_curves_are_learnt_from_streams(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", chunk=1) as e0, shell(tmp_path, e0) as found:
        for _ in range(8):
            await _read(found, budget=4 * EVENTS_AT_ONCE_MAX)
        curve = found.fleet.state.engines[E0].curve
        assert curve.points() == [(1.0, curve.seconds_per_token(1))], "one turn at a time ran"


async def _read(found: Shell, budget: int) -> None:
    async with found.run(budget=budget) as run:
        check_whole(run, await heard(run), budget)


async def test_what_has_to_end_where_it_began_is_not_moved(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1")
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        async with found.run(in_place=True) as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            assert run.move(E1) is None
            found.fleet.places.interrupt(run.request.turn_id)
            assert [load.stays for load in await found.repacker.loads(found.fleet.state.engines[E0])] == [True]
            e0.go.set()
            check_whole(run, await heard(run))
        assert e1.requests == []
        check_at_rest(found)


async def test_a_turn_is_not_moved_to_an_engine_of_a_kind_that_does_not_support_it(tmp_path: Path) -> None:
    """SGLang reports logprobs from before `top_p`: no session is trained on them."""
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1", hold_at=4)
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        found.fleet.state.engines[E0].kind, found.fleet.state.engines[E1].kind = "sglang", "embedded"
        async with found.run(top_p=0.9) as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            assert run.engine == E1
            assert [load.in_place for load in found.fleet.state.engines[E1].turns.values()] == [True], "for the planner"
            assert run.move(E0) is None
            e1.go.set()
            check_whole(run, await heard(run))
        assert e0.requests == []
        check_at_rest(found)


async def test_what_has_to_end_where_it_began_is_lost_when_cut_unless_it_had_not_begun(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", cuts=deque([Cut("eof", 4), Cut("eof", 0)])), ScriptedEngine("e1", always=Cut("503"))
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        told = r"its JSON schema is fulfilled after 4 tokens; the last: .*ended a stream.*\(send the request again\)"
        with pytest.raises(TurnLost, match=told):
            await read(found.run(in_place=True, json_schema="{}"))
        e1.always = None
        run = found.run(in_place=True)
        check_whole(run, await read(run))
        check_at_rest(found)


async def test_what_is_on_its_way_counts_on_its_destination_until_it_is_there(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1")
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        idle = found.session()
        idle.engine, idle.version = E0, Version(0)
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            turn_id, engines = run.request.turn_id, found.fleet.state.sorted_engines()
            found.repacker._mover.inbound.update({turn_id: E1, idle.session_id: E1})
            assert {load.key for load in found.repacker._inbound(engines)[E1]} == {turn_id, idle.session_id}
            idle.engine = E1
            assert [load.key for load in found.repacker._inbound(engines)[E1]] == [turn_id]
            found.fleet.places.enter(E1, engines[0].turns[turn_id])
            assert not found.repacker._inbound(engines)
            found.fleet.places.leave(E1, turn_id)
            e0.go.set()
            check_whole(run, await heard(run))
        check_at_rest(found)
