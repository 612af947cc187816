"""Full passes of the garbage collector, and what turns leave to it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from gateway.app import start
from gateway.runtime.garbage import collect_regularly
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import config

pytestmark = pytest.mark.slow  # full passes of the garbage collector


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """What each full pass collected; the collector is afterwards as it was."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            found.append(info["collected"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() <= frozen


@pytest.mark.parametrize(("busy", "at_latest_s"), [(False, 3600.0), (True, 0.5)], ids=["idle", "late"])
async def test_old_cycles_go_while_nothing_runs_or_at_the_latest(
    passes: list[int], busy: bool, at_latest_s: float
) -> None:
    async with collecting(lambda: busy, look_s=0.5, at_latest_s=at_latest_s):
        passes.clear()
        cycle = Cycle()
        gone = weakref.ref(cycle)
        gc.collect(1)  # it grows old
        del cycle
        kept = [[] for _ in range(300_000)]  # more than what would begin a pass
        assert passes == []
        assert gone() is not None
        await until(lambda: gone() is None, "the cycle is gone")
        assert passes
        assert kept


async def test_no_full_pass_while_turns_run(passes: list[int]) -> None:
    looks = 0

    def busy() -> bool:
        nonlocal looks
        looks += 1
        return True

    async with collecting(busy, look_s=0.001, at_latest_s=3600.0):
        passes.clear()
        await until(lambda: looks > 20, "looks")
        assert passes == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_turn_that_ended_leaves_no_cycle(tmp_path: Path, stream: bool) -> None:
    """Its client gone and its window over: by reference counts alone."""
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "stream": stream}
    async with ScriptedEngine("e0") as e0:
        found = await start(dataclasses.replace(config(tmp_path, e0), idempotency_window_s=0.0))
        await until(lambda: found.fleet.state.sorted_engines()[0].status == "serving", "a serving engine")
        async with aiohttp.ClientSession(found.url) as http:
            await ask(http, body)  # whatever is made once
            gc.collect()
            gc.disable()
            try:
                for _ in range(8):
                    await ask(http, body)
                await found.sessions.sweep()
                left = collections.Counter(type(thing).__qualname__ for thing in garbage())
            finally:
                gc.enable()
        await found.close(1.0)
    assert not {"Run", "Driver", "Transcript", "Audience", "EventStream", "LateBody", "Request"} & left.keys(), left


async def ask(http: aiohttp.ClientSession, body: dict[str, object]) -> None:
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()


def garbage() -> list[object]:
    """What only a pass of the collector finds now."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@contextlib.asynccontextmanager
async def collecting(busy: Callable[[], bool], *, look_s: float, at_latest_s: float) -> AsyncIterator[None]:
    task = asyncio.create_task(collect_regularly(busy, look_s=look_s, at_latest_s=at_latest_s))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
