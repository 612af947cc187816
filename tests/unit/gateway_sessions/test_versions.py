"""The version contract of sessions over real HTTP engines and a relay: pinned, strict, segment and fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.core.endings import Finish
from gateway.core.fleet.config import FleetConfig
from gateway.core.types import Version, VersionPolicy
from protos.errors import OutOfCapacity, UnsupportedField, VersionLost
from tests.support.fake_relay import FakeRelay, relay
from tests.support.gateway_shell import Shell, check_at_rest, check_whole, read, shell
from tests.support.scripted_engine import ScriptedEngine, until

AT_ONCE = FleetConfig(version_hold_s=0.0)


async def serve(found: Shell, holder: FakeRelay, version: int, *engines: ScriptedEngine) -> None:
    """Publishes `version` and waits until every engine serves it."""
    holder.publish(version)
    await until(
        lambda: all((e.version, found.status(e)) == (str(version), "serving") for e in engines), f"version {version}"
    )


async def test_a_strict_session_has_its_version_loaded_again_and_the_engine_goes_back(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=AT_ONCE) as found:
        await serve(found, holder, 1, e0)
        session = found.session(on_version_loss="strict")
        await read(found.run(session))
        await serve(found, holder, 2, e0)
        run = found.run(session)
        check_whole(run, await read(run))
        assert [s.version for s in session.newest.segments] == [1, 1]
        assert (session.version_changes, run.version_changes) == ([], [])
        await found.endings.finish_rewarded(session.session_id, Finish(reward=1.0))
        await until(lambda: (e0.version, found.status(e0)) == ("2", "serving"), "the newest again")
        check_at_rest(found)


async def test_a_session_that_names_its_version_begins_under_it(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0"), ScriptedEngine("e1")
    async with relay() as (holder, address), e0, e1, shell(tmp_path, e0, e1, relay=address, fleet=AT_ONCE) as found:
        await serve(found, holder, 1, e0, e1)
        await serve(found, holder, 2, e0, e1)
        judged = found.session(split="eval", version=Version(1), on_version_loss="strict")
        fresh = found.session()
        await asyncio.gather(*(read(found.run(s)) for s in (judged, fresh)))
        assert [s.sampled_versions for s in (judged, fresh)] == [(1,), (2,)]
        _, [leaf] = await found.endings.finish_rewarded(judged.session_id, Finish(reward=1.0))
        assert (leaf.split, leaf.version_policy, leaf.version_changes) == ("eval", "strict", [])
        assert found.trainer.admission().buffered == 0, "an evaluation never enters the buffer"


async def test_a_strict_session_whose_version_is_retired_is_told_so_and_the_engine_serves_on(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=AT_ONCE) as found:
        await serve(found, holder, 1, e0)
        session = found.session(on_version_loss="strict")
        await read(found.run(session))
        await serve(found, holder, 2, e0)
        holder.versions.remove(1)
        with pytest.raises(VersionLost, match="no engine serves version 1, and no relay holds it any more"):
            await read(found.run(session))
        counters = found.sessions.counters
        assert (counters.turns_lost, counters.turns_version_lost) == (0, 1), "its own policy ended it"
        assert (e0.version, found.status(e0)) == ("2", "serving")
        run = found.run()
        check_whole(run, await read(run))


async def test_a_strict_session_waits_up_to_its_deadline_when_nothing_can_load_it(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", version="2") as e0, shell(tmp_path, e0, queue_timeout_s=0.1) as found:
        session = found.session(version=Version(1), on_version_loss="strict")
        with pytest.raises(OutOfCapacity, match=r"within 0\.1 s: no engine serves version 1: it is loaded once"):
            await read(found.run(session))


async def test_mode_inflight_promises_no_version(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0, fleet=FleetConfig(mode="inflight")) as found:
        promised: list[dict[str, Any]] = [{"version": Version(0)}, {"max_version": Version(0)}]
        for spec in (*promised, {"on_version_loss": "strict"}, {"on_version_loss": "fail"}):
            with pytest.raises(UnsupportedField, match="insists on its version"):
                found.session(**spec)


async def test_fail_gives_the_turn_up_and_segment_says_what_it_did(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=AT_ONCE) as found:
        await serve(found, holder, 1, e0)
        failing, going_on = found.session(on_version_loss="fail"), found.session()
        for session in (failing, going_on):
            await read(found.run(session))
        await serve(found, holder, 2, e0)
        with pytest.raises(VersionLost, match="the session is to fail then"):
            await read(found.run(failing))
        run = found.run(going_on)
        check_whole(run, await read(run))
        [change] = run.version_changes
        assert (change.turn, change.from_version, change.to_version) == (1, 1, 2)
        _, [leaf] = await found.endings.finish_rewarded(going_on.session_id, Finish(reward=1.0))
        assert (leaf.mixed, leaf.version_policy, leaf.version_changes) == (True, "segment", [change])


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "versions"), [("segment", (1, 2)), ("strict", (1,)), ("fail", (1,))])
async def test_a_straggler_that_waits_for_a_tool_holds_no_engine_beyond_its_bound(
    tmp_path: Path, policy: VersionPolicy, versions: tuple[int, ...]
) -> None:
    """The engine wants to refresh while the session's tool runs for ever: the hold ends all the same."""
    e0, hold = ScriptedEngine("e0"), FleetConfig(version_hold_s=0.3)
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=hold) as found:
        await serve(found, holder, 1, e0)
        session = found.session(on_version_loss=policy)
        await read(found.run(session))
        await serve(found, holder, 2, e0)
        if policy == "fail":
            with pytest.raises(VersionLost):
                await read(found.run(session))
        else:
            await read(found.run(session))
        assert session.sampled_versions == versions
