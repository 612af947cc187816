"""Plans carried out over real streams: paced, told in receipts, and what comes between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gateway.core.packing.engine_views import SessionLoad, steady
from gateway.core.packing.plans import Freed, Move, Plan, Route
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, Version
from gateway.repack.mover import MOVES_AT_ONCE, TurnMover
from gateway.turns.running import RunningTurn
from tests.support.gateway_shell import Shell, check_at_rest, check_whole, read, shell
from tests.support.scripted_engine import ScriptedEngine, until

E0, E1 = EngineName("e0"), EngineName("e1")


@asynccontextmanager
async def running(
    directory: Path, count: int
) -> AsyncIterator[tuple[Shell, TurnMover, list[RunningTurn], ScriptedEngine]]:
    """`count` turns held on e0 after four tokens; e1 says nothing before `go`."""
    async with AsyncExitStack() as stack:
        e0 = await stack.enter_async_context(ScriptedEngine("e0", hold_at=4))
        e1 = await stack.enter_async_context(ScriptedEngine("e1", hold_at=0))
        found = await stack.enter_async_context(shell(directory, e0, e1))
        runs = [found.run(on_e0(found)) for _ in range(count)]
        reading = [asyncio.create_task(read(run)) for run in runs]
        await until(lambda: all(len(r.record.token_ids) == 4 for r in runs), "held turns")
        mover = TurnMover(found.fleet, found.sessions)
        yield found, mover, runs, e1
        e0.go.set()
        e1.go.set()
        for run, task in zip(runs, reading, strict=True):
            check_whole(run, await task)
        await until(lambda: not mover.inbound, "the end of every move")
        await mover.close()
        check_at_rest(found)


def on_e0(found: Shell) -> SessionState:
    """A session whose prefix e0 holds."""
    session = found.session()
    session.engine, session.version = E0, Version(0)
    return session


def plan_for(runs: list[RunningTurn], *more: Move) -> Plan:
    moves = [Move(r.request.turn_id, r.request.session_id, E0, E1, 7, 0.007) for r in runs]
    return plan_of((*moves, *more), (Freed(E0, 0.1, 5.0, 0.5),), ("e0 goes to e1: all of it",))


def plan_of(moves: Sequence[Move], freed: tuple[Freed, ...], reasons: tuple[str, ...]) -> Plan:
    routes = tuple(route(f.engine, [m for m in moves if m.source == f.engine]) for f in freed)
    return Plan(Version(0), routes, freed, reasons, 1000.0)


def route(source: EngineName, moves: Sequence[Move]) -> Route:
    sessions = [SessionLoad(m.session_id, m.turn_id, steady(m.tokens)) for m in moves]
    return Route(source, [m.destination for m in moves], len(moves), lambda: sessions)


async def test_turns_decode_at_their_source_until_their_move(tmp_path: Path) -> None:
    async with running(tmp_path, MOVES_AT_ONCE + 2) as (found, mover, runs, e1):
        mover.start(plan_for(runs))
        assert len(mover.inbound) == len(runs), "counted from the first moment"
        await until(lambda: len(e1.requests) == MOVES_AT_ONCE, "the first moves")
        assert len(found.fleet.state.engines[E0].turns) == 2
        assert found.fleet.state.engines[E0].leaving
        e1.go.set()
        await until(lambda: not found.fleet.state.engines[E0].leaving, "an empty source")
        [receipt] = mover.book.receipts
        assert [m.outcome for m in receipt.moves] == ["moved"] * len(runs)
        assert receipt.price_measured_s > 0
        await until(lambda: receipt.gain_measured_s is not None, "the measured gain")


async def test_a_turn_that_ended_before_its_move_needs_none(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as (found, mover, runs, e1):
        gone = Move(found.run().request.turn_id, found.session().session_id, E0, E1, 7, 0.007)
        e1.go.set()
        mover.start(plan_for(runs, gone))
        await until(lambda: not mover.inbound, "both settled")
        assert [m.outcome for m in mover.book.receipts[0].moves] == ["moved", "ended"]


async def test_a_destination_that_left_the_version_fails_the_move_and_the_turn_stays(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as (found, mover, runs, _):
        found.fleet.state.engines[E1].version = Version(5)
        mover.start(plan_for(runs))
        await until(lambda: not mover.inbound, "settled")
        assert [m.outcome for m in mover.book.receipts[0].moves] == ["failed"]
        assert runs[0].engine == "e0"
        assert mover.book.receipts[0].emptied_after_s is None


async def test_a_session_that_waits_for_a_tool_comes_back_to_the_destination(tmp_path: Path) -> None:
    async with running(tmp_path, 0) as (found, mover, _, e1):
        session = on_e0(found)
        waiting = Move(None, session.session_id, E0, E1, 7, 0.007)
        mover.start(plan_for([], waiting))
        await until(lambda: not mover.inbound, "settled")
        assert (session.engine, session.moves) == ("e1", 1)
        e1.go.set()
        run = found.run(session)
        check_whole(run, await read(run))
        assert [s.engine for s in run.segments] == ["e1"]


async def test_a_move_that_fails_as_nobody_foresaw_leaves_the_others_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, 3) as (_, mover, runs, e1):
        move = RunningTurn.move

        def moves(run: RunningTurn, destination: EngineName) -> object:
            if run is runs[0]:
                raise KeyError("nobody thought of it")
            return move(run, destination)

        monkeypatch.setattr(RunningTurn, "move", moves)
        e1.go.set()
        mover.start(plan_for(runs))
        await until(lambda: not mover.inbound, "the end of every move")
        [receipt] = mover.book.receipts
        assert [m.outcome for m in receipt.moves] == ["failed", "moved", "moved"]
    assert "nobody thought of it" in caplog.text


async def test_an_engine_that_left_while_its_moves_were_planned_costs_these_alone(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as (_, mover, runs, e1):
        planned = plan_for(runs)
        gone = Move(None, runs[0].request.session_id, EngineName("e9"), E1, 7, 0.007)
        freed = (Freed(gone.source, 0.1, 5.0, 0.5), *planned.freed)
        e1.go.set()
        mover.start(plan_of((gone, *planned.moves), freed, ("e9 goes to e1: all", *planned.reasons)))
        await until(lambda: not mover.inbound, "the end of every move")
        assert [(r.engine, [m.outcome for m in r.moves]) for r in mover.book.receipts] == [("e0", ["moved"])]
