"""Whatever the interleaving of retries, cuts, give-ups and sweeps: every request has its own turn, every turn one
driver, every answer its own tokens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.sim import clients
from tests.sim.clients import Violation, World, run
from tests.sim.virtual import Clock, Process


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_every_request_has_its_own_turn(first: int) -> None:
    for seed in range(first, first + 10):
        assert run(seed)


@pytest.mark.parametrize("seed", [1313, 2291])
def test_a_seed_that_failed_once(seed: int) -> None:
    """An attempt that hung up unwound only after its retry had read the turn, and freed that turn for a sibling."""
    assert run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 10, 20])
def test_an_answer_whose_last_bytes_take_long_is_no_siblings(first: int) -> None:
    """Written to slow clients, for longer than any retry waits before it comes."""
    for seed in range(first, first + 10):
        assert run(seed, last_bytes_s=3.0)


def test_a_seed_with_slow_clients_that_failed_once() -> None:
    """A sibling took up an unread turn, unmarked; its own marked retry made that forgotten."""
    assert run(2038, last_bytes_s=3.0)


@pytest.mark.parametrize("how", ["a check", "a wait without end"])
def test_a_life_that_fails_leaves_no_loop_behind(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    made: list[Process] = []

    def kept(clock: Clock, rng: random.Random, name: str) -> Process:
        made.append(Process(clock, rng, name))
        return made[-1]

    def fails(world: World, *_: Any) -> None:
        raise Violation("it does")

    monkeypatch.setattr(clients, "Process", kept)
    if how == "a check":
        monkeypatch.setattr(clients, "_check", fails)
    else:
        monkeypatch.setattr(clients, "END_S", 1.0)
    with pytest.raises(Violation):
        run(0)
    assert [process.is_closed() for process in made] == [True]
    assert not asyncio.all_tasks(made[0])


# `make test` runs 200 of these seeds, `make test-faults` the others
AT_LENGTH = [pytest.param(first, marks=pytest.mark.long if first >= 1200 else ()) for first in range(1000, 1800, 100)]


@pytest.mark.slow
@pytest.mark.parametrize("first", AT_LENGTH)
def test_every_request_has_its_own_turn_at_length(first: int) -> None:
    for seed in range(first, first + 100):
        assert run(seed)
        assert run(seed, last_bytes_s=3.0)
