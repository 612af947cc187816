"""The watches of a model: the state first, then every change in order, in a bounded queue."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from paramserver.core.records import Sealed
from paramserver.core.versions import Notify
from paramserver.core.view import View
from paramserver.relay.models import ModelTable
from paramserver.relay.watchers import SAID_MAX, WATCHER_EVENTS_MAX, Watchers
from protos.errors import OutOfCapacity, Unavailable


def event(version: int, kind: Literal["sealed", "available"] = "available", model: str = "policy") -> Notify:
    return Notify(kind, Sealed(model, version, version, "run", "digest", 0, 0.0))


def watchers_of(*versions: int) -> Watchers:
    """Of a relay that knows these versions as sealed, and holds none."""
    models = ModelTable("a", View(), retain=1)
    for version in versions:
        models.of("policy").sealed(event(version).sealed)
    return Watchers(models)


async def test_a_watch_begins_with_the_state_and_misses_nothing_after_it() -> None:
    watchers = watchers_of(1, 2)
    reading = watchers.watch("policy")
    assert await anext(reading) == event(1, "sealed")
    watchers.notify(event(2))  # before the state was read to its end
    watchers.notify(event(7, model="critic"))
    watchers.notify(event(3))
    assert [await anext(reading) for _ in range(3)] == [event(2, "sealed"), event(2), event(3)]


async def test_one_that_falls_behind_is_cut_off_and_others_are_not() -> None:
    watchers = watchers_of(1)
    slow, quick = (watchers.watch("policy") for _ in range(2))
    assert await anext(slow) == await anext(quick) == event(1, "sealed")
    for version in range(2, WATCHER_EVENTS_MAX + 3):
        watchers.notify(event(version))
        assert await anext(quick) == event(version)
    with pytest.raises(Unavailable, match="ended by the relay") as refused:
        await anext(slow)
    assert refused.value.hint == "watch again; it starts with the state"


async def test_a_relay_that_ends_ends_every_watch() -> None:
    watchers = watchers_of()
    reading = watchers.watch("policy")
    first = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    watchers.close()
    with pytest.raises(Unavailable, match="ended by the relay"):
        await first


async def test_who_publishes_under_a_name_that_nobody_watches_is_told_once_a_run() -> None:
    watchers = watchers_of(1)
    assert not watchers.unwatched("polciy", "run-1"), "nobody watches anything yet"
    reading = watchers.watch("policy")
    await anext(reading)
    assert not watchers.unwatched("policy", "run-1")
    assert "nobody watches model polciy at this relay, where policy is watched" in watchers.unwatched("polciy", "run-1")
    assert not watchers.unwatched("polciy", "run-1")
    assert watchers.unwatched("polciy", "run-2")
    for number in range(SAID_MAX):
        assert watchers.unwatched(f"m{number}", "run")
    assert watchers.unwatched("polciy", "run-2"), "only so many are remembered"
    await reading.aclose()  # type: ignore[attr-defined]


async def test_beyond_the_bound_a_watch_is_refused_and_those_that_stand_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paramserver.relay.watchers.WATCHES_MAX", 2)
    watchers = watchers_of(1)
    first, second = (watchers.watch("policy") for _ in range(2))
    assert await anext(first) == await anext(second) == event(1, "sealed")
    for _ in range(2):
        with pytest.raises(OutOfCapacity, match="2 watches are open at this relay"):
            await anext(watchers.watch("policy"))
    assert caplog.text.count("a watch of policy is refused") == 1
    watchers.notify(event(2))
    assert await anext(first) == event(2)
    await second.aclose()  # type: ignore[attr-defined]
    assert await anext(watchers.watch("policy")) == event(1, "sealed")
