"""The version contract with tools and stragglers: each policy is kept, and no engine waits beyond its bound."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.fleet.config import FleetConfig
from gateway.core.types import EngineName, VersionPolicy
from protos.errors import VersionLost
from tests.support.fake_relay import FakeRelay, relay
from tests.support.gateway_shell import Shell, check_at_rest, check_whole, read, shell
from tests.support.reading import heard
from tests.support.scripted_engine import ScriptedEngine, until

pytestmark = pytest.mark.slow  # every policy, with waits that end by themselves

POLICIES: tuple[VersionPolicy, ...] = ("segment", "strict", "fail")
SLACK_S = 60.0
"""For the load itself, the gateway's look every half second, and a busy machine."""


@asynccontextmanager
async def two_engines(directory: Path, **config: Any) -> AsyncIterator[tuple[Shell, FakeRelay, list[ScriptedEngine]]]:
    """Both on version 1."""
    async with AsyncExitStack() as stack:
        found_relay, address = await stack.enter_async_context(relay())
        found_relay.publish(1)
        engines = [await stack.enter_async_context(ScriptedEngine(f"e{i}")) for i in range(2)]
        fleet = FleetConfig(intake_min_batch=0, **config)
        found = await stack.enter_async_context(shell(directory, *engines, relay=address, fleet=fleet))
        await until(lambda: served(found) == [1, 1], "version 1", 60)
        yield found, found_relay, engines


def served(found: Shell) -> list[int]:
    return [int(e.version) if e.status == "serving" else -1 for e in found.fleet.state.sorted_engines()]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_session_that_waits_for_a_tool_holds_its_version_so_long_and_no_longer(
    tmp_path: Path, policy: VersionPolicy
) -> None:
    async with two_engines(tmp_path, version_hold_s=3600.0) as (found, found_relay, _):
        session = found.session(on_version_loss=policy)
        check_whole(first := found.run(session), await read(first))
        assert {s.version for s in first.segments} == {1}

        found_relay.publish(2)  # while it waits for its tool
        await until(lambda: sorted(served(found)) == [1, 2], "one engine kept for it", 60)
        [kept] = [e for e in found.fleet.state.sorted_engines() if e.version == 1]
        check_whole(second := found.run(session), await read(second))
        assert {(s.engine, s.version) for s in second.segments} == {(kept.name, 1)}, "its tool was quick enough"

        # From here on its tool is not; a hold that was short from the beginning might have been over before.
        hold_s = time.monotonic() - kept.intake_closed_at + 0.5
        found.fleet.state.config = dataclasses.replace(found.fleet.state.config, version_hold_s=hold_s)
        await until(lambda: kept.status == "refreshing", "the end of the hold", hold_s + SLACK_S)
        assert time.monotonic() - kept.intake_closed_at >= hold_s
        await until(lambda: served(found) == [2, 2], "version 2 on both", SLACK_S)
        third = found.run(session)
        if policy == "fail":
            with pytest.raises(VersionLost):
                await read(third)
        else:
            check_whole(third, await read(third))
            assert {s.version for s in third.segments} == {2 if policy == "segment" else 1}
            assert len(session.version_changes) == (policy == "segment"), "and the session says so"
        check_at_rest(found)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_straggler_beyond_the_staleness_bound_leaves_by_its_policy(
    tmp_path: Path, policy: VersionPolicy
) -> None:
    drain_s = 0.5
    how: dict[str, Any] = {"drain_max_s": drain_s, "staleness_max": 0, "version_hold_s": 60.0}
    async with two_engines(tmp_path, **how) as (found, found_relay, engines):
        for engine in engines:
            engine.hold_at = 4
        session = found.session(on_version_loss=policy)
        async with found.run(session) as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            straggling = found.fleet.state.engines[EngineName(str(run.engine))]
            found_relay.publish(2)
            await until(lambda: not straggling.intake_open, "a closed intake", 60)
            closed_at = time.monotonic()
            await until(lambda: straggling.version == 2, "its refresh", drain_s + SLACK_S)
            assert time.monotonic() - closed_at < drain_s + SLACK_S
            for engine in engines:
                engine.hold_at = None
                engine.go.set()
            if policy == "fail":
                with pytest.raises(VersionLost):
                    await heard(run)
            else:
                check_whole(run, await heard(run))
                assert [s.version for s in run.segments if s.end > s.start] == [1, 2 if policy == "segment" else 1]
        check_at_rest(found)


async def test_a_straggler_within_the_staleness_bound_lets_its_engine_work(tmp_path: Path) -> None:
    async with two_engines(tmp_path, drain_max_s=0.3, staleness_max=4) as (found, found_relay, engines):
        for engine in engines:
            engine.hold_at = 4
        async with found.run() as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            straggling = found.fleet.state.engines[EngineName(str(run.engine))]
            found_relay.publish(2)
            await until(lambda: straggling.reopened and straggling.intake_open, "another batch for it", SLACK_S)
            assert straggling.version == 1
            for engine in engines:
                engine.go.set()
            check_whole(run, await heard(run))
        assert {s.version for s in run.segments} == {1}
        check_at_rest(found)
