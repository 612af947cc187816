"""The watchers of a model: the state first, then every change in order, in a bounded queue."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from paramserver.core.records import Sealed
from paramserver.core.versions import Tell
from paramserver.relay.watchers import WATCHER_EVENTS_MAX, Watchers
from protos.errors import Unavailable


def told(version: int, kind: Literal["sealed", "available"] = "available", model: str = "policy") -> Tell:
    return Tell(kind, Sealed(model, version, version, "run", "digest", 0, 0.0))


async def test_a_watch_begins_with_the_state_and_misses_nothing_after_it() -> None:
    watchers = Watchers()
    reading = watchers.watch("policy", lambda: [told(1), told(2, "sealed")])
    assert await anext(reading) == told(1)
    watchers.tell(told(2))  # before the state was read to its end
    watchers.tell(told(7, model="critic"))
    watchers.tell(told(3))
    assert [await anext(reading) for _ in range(3)] == [told(2, "sealed"), told(2), told(3)]


async def test_one_that_falls_behind_is_cut_off_and_others_are_not() -> None:
    watchers = Watchers()
    slow, quick = (watchers.watch("policy", lambda: [told(1)]) for _ in range(2))
    assert await anext(slow) == await anext(quick) == told(1)
    for version in range(2, WATCHER_EVENTS_MAX + 3):
        watchers.tell(told(version))
        assert await anext(quick) == told(version)
    with pytest.raises(Unavailable, match="ended by the relay") as refused:
        await anext(slow)
    assert refused.value.hint == "watch again; it starts with the state"


async def test_a_relay_that_ends_ends_every_watch() -> None:
    watchers = Watchers()
    reading = watchers.watch("policy", list)
    first = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    watchers.dismiss()
    with pytest.raises(Unavailable, match="ended by the relay"):
        await first
