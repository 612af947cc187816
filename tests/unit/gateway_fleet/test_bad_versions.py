"""Versions that no engine can load, one after the other: what serves meanwhile, and what is kept for that."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import EngineSpec
from gateway.core.fleet import refresh
from gateway.core.fleet.refresh import LOAD_TRIES
from gateway.core.types import EngineName
from gateway.fleet import pins as pins_module
from tests.support.fake_relay import relay
from tests.support.gateway_shell import check_whole, read, shell
from tests.support.scripted_engine import Answer, ScriptedEngine, until
from tests.unit.gateway_sessions.test_versions import AT_ONCE, serve

pytestmark = pytest.mark.slow  # version after version is loaded and refused


def refuses(*bad: int) -> Callable[[str, Any], Answer | None]:
    """An engine that fails in the middle of the load of `bad` versions: it stays fenced."""

    def answer(path: str, body: Any) -> Answer | None:
        if path == "/update_weights" and int(body["update_info"]["version"]) in bad:
            return 500, json.dumps({"message": "tensor lm_head.weight: shape differs"})
        return None

    return answer


@pytest.mark.parametrize("num_bad", [1, 2, 4])
async def test_however_many_bad_versions_are_published_the_last_good_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bad: int
) -> None:
    """Though the relay retires all but the two newest, and each newer version is tried as it comes."""
    monkeypatch.setattr(refresh, "RETRY_S", 0.01)
    monkeypatch.setattr(pins_module, "UPDATE_S", 0.01)
    bad = range(2, 2 + num_bad)
    e0 = ScriptedEngine("e0", answer=refuses(*bad))
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=AT_ONCE) as found:
        holder.retain = 2
        await serve(found, holder, 1, e0)
        await until(lambda: holder.fallbacks == [1], "version 1 is kept to go back to")
        state = found.fleet.state.engines[EngineName("e0")]
        for version in bad:
            holder.publish(version)
            await until(lambda v=version: (state.given_up, state.status) == (v, "serving"), "what was held before")
            assert (e0.version, "lm_head.weight: shape differs" in state.last_error) == ("1", True)
            run = found.run()
            check_whole(run, await read(run))
            assert [s.version for s in run.segments] == [1]
        assert state.bad == set(bad)
        assert found.fleet.statistics().refresh_failures == LOAD_TRIES * num_bad
        good = 2 + num_bad
        await serve(found, holder, good, e0)
        await until(lambda: holder.fallbacks == [good], "it is kept instead")
        assert (state.last_error, dict(found.fleet.pins.fallbacks)) == ("", {address: good})


async def test_a_newer_version_is_tried_at_once_not_after_the_wait_of_the_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "RETRY_S", 3600.0)
    monkeypatch.setattr(refresh, "RETRY_MAX_S", 3600.0)
    e0 = ScriptedEngine("e0", answer=refuses(2))
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address) as found:
        await serve(found, holder, 1, e0)
        holder.publish(2)
        await until(lambda: found.status(e0) == "fenced", "the first failure")
        await serve(found, holder, 3, e0)


async def test_a_pin_that_was_taken_away_is_made_again_while_the_version_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "UPDATE_S", 3600.0)
    e0 = ScriptedEngine("e0")
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address) as found:
        await serve(found, holder, 1, e0)
        pins, now = found.fleet.pins, time.monotonic()
        await pins.update(now)
        assert holder.fallbacks == [1]
        found.fleet.relays.gone(address, 1)  # type: ignore[arg-type]
        await pins.update(now + pins_module.TTL_S / 3)
        assert dict(pins.fallbacks) == {address: 1}, "it is renewed, whatever else was heard"
        holder.retire(1)
        holder.publish(2)
        await until(lambda: (e0.version, found.status(e0)) == ("2", "serving"), "version 2")
        await pins.update(now)
        assert dict(pins.fallbacks) == {address: 2}
        await found.fleet.remove(EngineName("e0"))
        await pins.update(now)
        assert dict(pins.fallbacks) == {}, "its last engine left, and the pin ends by itself"


async def test_a_relay_that_hangs_holds_up_the_pins_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "UPDATE_S", 3600.0)
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with (
        relay() as (first, address),
        relay() as (second, other),
        e0,
        e1,
        shell(tmp_path, e0, relay=address) as found,
    ):
        await serve(found, first, 1, e0)
        found.fleet.add(EngineSpec("e1", "vllm", e1.url, other))
        await serve(found, second, 1, e1)
        pins, now = found.fleet.pins, time.monotonic()
        await pins.update(now)
        assert dict(pins.fallbacks) == {address: 1, other: 1}
        for holder in (first, second):
            holder.answering.clear()
        renewing = asyncio.create_task(pins.update(now + pins_module.TTL_S / 3))
        await until(lambda: first.asked and second.asked, "both relays are asked, and neither answers")
        await pins.update(now + pins_module.TTL_S / 2)
        assert (first.asked, second.asked) == (1, 1), "one call at a time to each"
        for holder in (first, second):
            holder.answering.set()
        await renewing
