"""A round of repack works in bounded steps: other tasks run in between, and the plan is that of one step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.core.fleet.intake import intake_changes
from gateway.core.packing import repack
from gateway.core.packing.plans import Plan
from gateway.core.types import Version
from gateway.repack import loop
from tests.bench.core.__main__ import planner
from tests.bench.core.scene import NEWEST, SEVERAL, Scene, scene

ENGINES = 48


def published() -> Scene:
    """A newer version is here, so that all intakes are closed."""
    made = scene(SEVERAL, engines=ENGINES)
    made.fleet.newest = Version(NEWEST + 1)
    for engine in made.fleet.engines.values():
        engine.available = made.fleet.newest
    intake_changes(made.fleet, 1000.0)
    return made


async def beside(made: Scene, other: Callable[[], object]) -> tuple[Plan, ...]:
    """The plan, while `other` is called whenever it is another task's turn."""

    async def every_time() -> None:
        while True:
            other()
            await asyncio.sleep(0)

    task = asyncio.create_task(every_time())
    try:
        async with asyncio.timeout(60):
            return await planner(made).plan()
    finally:
        task.cancel()


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STEP_SESSIONS", 40)
    monkeypatch.setattr(repack, "PART_SESSIONS", 20)


async def test_other_tasks_run_in_between_and_the_plan_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[None] = []
    at_once = await beside(published(), lambda: None)
    small_steps(monkeypatch)
    made = published()
    in_steps = await beside(made, lambda: turns.append(None))
    assert in_steps == at_once
    assert [plan.moves for plan in in_steps] == [plan.moves for plan in at_once]
    assert sum(len(plan.freed) for plan in in_steps) > 5
    assert len(turns) > len(made.turns) / 40, "engines are looked at in steps, and packed in steps"


async def test_engines_that_leave_or_load_meanwhile_cost_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps(monkeypatch)
    made = published()
    names = sorted(made.fleet.engines)
    made.rng.shuffle(names)

    def one_goes() -> None:
        if len(names) > ENGINES // 2:
            made.fleet.remove(names.pop())
            made.fleet.engines[names.pop()].to("refreshing")

    plans = await beside(made, one_goes)
    assert len(names) == ENGINES // 2
    assert {plan.version for plan in plans} <= set(SEVERAL)
    assert any(plan.moves for plan in plans)
