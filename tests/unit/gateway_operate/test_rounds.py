"""Rounds of the event loop, shared between engines' events and everything else."""

from __future__ import annotations

import asyncio

from gateway.runtime.rounds import SHARE_S, Rounds, of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_what_is_over_a_rounds_share_waits_for_later_ones_in_order_and_others_run_in_between() -> None:
    clock, done = Clock(), list[str]()
    rounds = Rounds(asyncio.get_running_loop(), clock)

    def work(name: str) -> None:
        clock.now += 0.6 * SHARE_S  # two of them are a round's share
        done.append(name)

    for at in range(6):
        if rounds.take(lambda at=at: work(f"event {at}")):  # type: ignore[misc]
            work(f"event {at}")
    assert done == ["event 0", "event 1"]
    for at in range(2):
        await asyncio.sleep(0)
        done.append(f"round {at}")
    await asyncio.sleep(0)
    assert done == ["event 0", "event 1", "event 2", "event 3", "round 0", "event 4", "event 5", "round 1"]


async def test_who_comes_while_others_wait_does_not_overtake_them() -> None:
    clock, done = Clock(), list[int]()
    rounds = Rounds(asyncio.get_running_loop(), clock)
    assert rounds.take(lambda: done.append(0))
    clock.now = SHARE_S
    assert not rounds.take(lambda: done.append(1))
    clock.now = 0.0
    assert not rounds.take(lambda: done.append(2))
    await asyncio.sleep(0)
    assert done == [1, 2]
    await asyncio.sleep(0)
    assert rounds.take(lambda: done.append(3)), "a round in which nobody waits is anybody's"


async def test_a_loop_has_one() -> None:
    loop = asyncio.get_running_loop()
    assert of(loop) is of(loop)
    assert of(loop).loop is loop
