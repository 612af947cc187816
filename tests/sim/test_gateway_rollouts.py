"""The gateway's decisions over simulated engines: what each mode gives, and what none may do."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest

from gateway.core.fleet.config import FleetConfig, Mode
from gateway.sim.rollouts import Figures, Rollouts, Settings
from tests.bench.repack.trace import decode_ms, lengths
from tests.support.watched_fleet import install

install()

pytestmark = pytest.mark.slow  # whole rollouts in virtual time

LENGTHS = lengths(20_000)
SETTINGS = Settings(
    fleet=FleetConfig(max_running=16, intake_batch=32, intake_min_batch=32, drain_max_s=1e9, staleness_max=100),
    engines=6,
    concurrency=96,
    kv_capacity_tokens=80_000,
    prompt_tokens=320,
    budget_tokens=16384,
    decode_s=lambda batch: decode_ms(batch) / 1000,
    prefill_tokens_per_s=30_000,
    load_s=0.69,
    publish_period_s=60.0,
    repack_interval_s=5.0,
    warm_up_s=200.0,
    measured_s=1000.0,
)


def settings(mode: Mode, **fleet: float) -> Settings:
    return dataclasses.replace(SETTINGS, fleet=dataclasses.replace(SETTINGS.fleet, mode=mode, **fleet))  # type: ignore[arg-type]


@cache
def figures(mode: Mode) -> Figures:
    return Rollouts(settings(mode), LENGTHS).run()


def test_each_mode_wastes_less_than_the_one_before() -> None:
    throughput = [figures(mode).tokens_per_s for mode in ("barrier", "drain", "repack", "inflight")]
    for slower, faster in itertools.pairwise(throughput):
        assert faster > 1.05 * slower


def test_packing_moves_turns_and_keeps_them_on_their_version() -> None:
    repack = figures("repack")
    assert repack.moves > 20
    assert repack.refreshes > figures("drain").refreshes
    assert repack.kv_util > figures("drain").kv_util
    assert repack.prefilled_again_tokens / (repack.tokens_per_s * SETTINGS.measured_s) < 0.2
    assert [figures(mode).mixed for mode in ("barrier", "drain", "repack")] == [0, 0, 0]
    assert figures("inflight").mixed > 0


def test_the_same_settings_give_the_same_figures() -> None:
    assert Rollouts(settings("repack"), LENGTHS).run() == figures("repack")


def test_stretches_are_parts_of_one_run() -> None:
    halves = dataclasses.replace(settings("repack"), measured_s=SETTINGS.measured_s / 2)
    whole, [first, second] = Rollouts(halves, LENGTHS).stretches(2)
    assert dataclasses.asdict(whole) == pytest.approx(dataclasses.asdict(figures("repack")))
    for name in ("trajectories", "moves", "refreshes", "prefilled_again_tokens", "mixed"):
        assert getattr(first, name) + getattr(second, name) == getattr(whole, name)
    for name in ("tokens_per_s", "kv_util", "running_mean"):
        assert (getattr(first, name) + getattr(second, name)) / 2 == pytest.approx(getattr(whole, name))


@pytest.mark.parametrize("mode", ["barrier", "drain", "repack", "inflight"])
def test_no_turn_is_lost_or_run_twice(mode: Mode) -> None:
    """At every event each client waits, or has one turn, which is on one engine or waits to resume."""
    simulated = Rollouts(settings(mode), LENGTHS)
    looks = 0
    changed = simulated._changed

    def look() -> None:
        nonlocal looks
        changed()
        looks += 1
        placed = [t for engine in simulated.state.engines.values() for t in engine.turns]
        assert len(placed) == len(set(placed))
        assert len(simulated._requested) + len(simulated._turns) == SETTINGS.concurrency
        assert len(placed) + len(simulated._resuming) == len(simulated._turns)
        assert all(len(e.turns) <= 16 for e in simulated.state.engines.values())

    simulated._changed = look  # type: ignore[method-assign]
    simulated.run()
    assert looks > 1000


def test_stragglers_hold_an_engine_for_a_bounded_time() -> None:
    """Within the staleness bound it takes another batch; without one they have to go on elsewhere, mixed."""
    reopened = Rollouts(settings("drain", drain_max_s=5.0, staleness_max=100), LENGTHS).run()
    assert reopened.tokens_per_s > 1.05 * figures("drain").tokens_per_s
    assert reopened.staleness_mean > figures("drain").staleness_mean
    evicted = Rollouts(settings("drain", drain_max_s=5.0, staleness_max=0), LENGTHS).run()
    assert evicted.mixed > 0
    assert evicted.idle_share < 0.05
