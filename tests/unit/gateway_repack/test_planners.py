"""The planners of `--planner`: the table, and one of a stranger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gateway.core.packing import planners
from gateway.core.packing.engine_views import EngineView
from gateway.core.packing.planners import plan_repack, unpriced
from gateway.core.packing.plans import Plan, RepackConfig
from gateway.core.types import Version
from tests.bench.core.__main__ import planner as repacker
from tests.unit.gateway_core.test_repack import NEWEST, freed, turn, view
from tests.unit.gateway_repack.test_repack_steps import published


def test_only_the_unpriced_planner_moves_what_costs_more_than_it_frees() -> None:
    dear, engines = RepackConfig(prefill_tokens_per_s=0.01), [view("e0", turn(100)), view("e1", turn(50))]
    [priced], [free] = plan_repack(engines, NEWEST, dear), plan_repack(engines, NEWEST, dear, unpriced)
    assert (freed(priced), freed(free)) == ([], ["e1"])
    assert [f.reason for f in free.freed] == [r for r in free.reasons if r.startswith("e1 goes")]


async def test_a_strangers_planner_is_one_function_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def lazy(group: Sequence[EngineView], version: Version, config: RepackConfig, *, seed: int = 0) -> Iterator[Plan]:
        seen.append(len(group))
        yield Plan(version, (), (), (f"version {version} stays",), config.prefill_tokens_per_s)

    rows: Any = {**planners.PLANNERS, "priced": lazy}
    monkeypatch.setattr("gateway.repack.loop.PLANNERS", rows)
    async with asyncio.timeout(60):
        plans = await repacker(published()).plan()
    assert [plan.reasons for plan in plans] == [(f"version {plan.version} stays",) for plan in plans]
    assert len(seen) == len(plans) > 1
