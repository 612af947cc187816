"""Hundreds of seeded lives of a relay tier: first safety under faults, then no faults and liveness."""

from __future__ import annotations

import pytest

from tests.sim.relay_tier import World

NUM_SEEDS, SEEDS_PER_TEST, STEPS = 300, 50, 500


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_nothing_torn_nothing_back_memory_bounded_and_everything_heals(first: int) -> None:
    sealed = moved = 0
    for seed in range(first, first + SEEDS_PER_TEST):
        world = World(seed)
        try:
            world.run(STEPS)
            sealed += world.newest_sealed()
            world.heal()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        moved += world.lives - len(world.relays)
    assert sealed > 2 * SEEDS_PER_TEST, "the faults leave work to be done"
    assert moved > SEEDS_PER_TEST // 4, "relays do die"
