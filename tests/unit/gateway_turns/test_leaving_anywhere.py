"""A client that leaves, whenever it does, leaves nothing behind: no count on an engine, nothing queued, no turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

from gateway.core.fleet.config import FleetConfig
from gateway.core.types import EngineName
from gateway.turns.running import RunningTurn
from tests.support.gateway_shell import Shell, check_at_rest, read, shell
from tests.support.reading import slowly
from tests.support.scripted_engine import ScriptedEngine, until

E0, E1 = EngineName("e0"), EngineName("e1")
STEPS = itertools.chain(range(24), range(24, 160, 5))
"""Turns of the event loop after which the client leaves: each one of the beginning, and some as far as the end."""


async def left_after(steps: int, task: asyncio.Task[object]) -> bool:
    """Cancels it after so many turns of the event loop; False when it was quicker."""
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def settled(found: Shell) -> None:
    engines = found.fleet.state.engines.values()
    await until(lambda: not any(e.turns for e in engines) and not found.sessions.running, "engines without turns")
    await until(lambda: not found.pool.statistics().in_flight, "ends on disk")  # also of a turn whose reader has left
    assert found.fleet.statistics().queued == 0
    assert not any(session.running for session in found.sessions.live)
    check_at_rest(found)


async def test_a_reader_that_is_cancelled_at_any_step_leaks_no_count(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        left = []
        for steps in STEPS:
            left.append(await left_after(steps, asyncio.create_task(read(found.run()))))
            await settled(found)
        assert any(left), "some left on the way"


async def test_a_stream_that_is_closed_after_any_delta_leaks_no_count(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        for deltas in range(4):
            async with found.run(tokens_per_event=3) as run, contextlib.aclosing(slowly(run)) as stream:
                for _ in range(deltas):
                    await anext(stream, None)
            await settled(found)


async def test_a_reader_that_leaves_the_queue_at_any_step_leaks_no_count(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", hold_at=2)
    async with e0, shell(tmp_path, e0, fleet=FleetConfig(max_running=1)) as found:
        for steps in range(0, 30, 2):
            e0.go.clear()
            holding = asyncio.create_task(read(found.run()))
            await until(lambda: any(e.turns for e in found.fleet.state.engines.values()), "the one that runs")
            waiting = asyncio.create_task(read(found.run()))
            await until(lambda: found.fleet.statistics().queued == 1, "the one that waits")
            e0.go.set()
            await left_after(steps, waiting)
            await holding
            await settled(found)


async def test_a_reader_that_leaves_at_any_step_of_a_move_leaks_no_count_on_either_engine(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1", hold_at=4)
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        for steps in range(0, 60, 3):  # idle engines take turns: the moves go both ways
            run = found.run()
            reading = asyncio.create_task(read(run))
            await until(lambda run=run: len(run.record.token_ids) == 4, "four tokens")  # type: ignore[misc]
            _move(run)
            await left_after(steps, reading)
            await settled(found)


def _move(run: RunningTurn) -> None:
    assert run.engine is not None
    assert run.move(E1 if run.engine == E0 else E0) is not None
