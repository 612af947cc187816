"""What vouches for the version of each span: checked against the engine before and after, not assumed."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import pytest

from gateway.core.endings import Finish
from gateway.core.fleet.config import FleetConfig
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, Version
from tests.support.fake_relay import relay
from tests.support.gateway_shell import Shell, check_whole, read, shell
from tests.support.reading import heard
from tests.support.scripted_engine import ScriptedEngine, until


async def finished(found: Shell, session: SessionState) -> list[str]:
    """The evidence of each segment, once the session is finished."""
    _, [leaf] = await found.endings.finish_rewarded(session.session_id, Finish(reward=1.0))
    return [s.evidence for s in leaf.segments]


def looks(engine: ScriptedEngine) -> int:
    return sum(path == "/weight_info" for path, _ in engine.calls)


async def test_an_engine_that_tells_versions_with_its_tokens_is_not_asked_again(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        session = found.session()
        await read(found.run(session))
        before = looks(e0)
        assert await finished(found, session) == ["told"]
        assert looks(e0) == before


async def test_an_engine_that_does_not_tell_is_looked_at_once_for_many_segments(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", tells_versions=False) as e0, shell(tmp_path, e0) as found:
        sessions = [found.session() for _ in range(4)]
        for session in sessions:
            for _ in range(2):
                await read(found.run(session))
        before = looks(e0)
        evidence = await asyncio.gather(*(finished(found, session) for session in sessions))
        assert evidence == [["looked"] * 2] * 4
        assert looks(e0) == before + 1


async def test_a_moved_turn_has_evidence_for_both_its_segments(tmp_path: Path) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4), ScriptedEngine("e1")
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        session = found.session()
        async with found.run(session) as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            run.move(EngineName("e1"))
            check_whole(run, await heard(run))
        assert await finished(found, session) == ["looked", "told"]


@pytest.mark.parametrize("ends", ["moved", "cut"])
async def test_what_an_engine_reports_with_every_event_stands_for_a_segment_that_did_not_end_there(
    tmp_path: Path, ends: str
) -> None:
    e0, e1 = ScriptedEngine("e0", hold_at=4, version_early=True), ScriptedEngine("e1")
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        session = found.session()
        async with found.run(session) as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            if ends == "moved":
                run.move(EngineName("e1"))
            else:
                await e0.die()
            check_whole(run, await heard(run))
        assert [s.evidence for s in run.segments if s.end > s.start] == ["told", "told"]
        assert [s.engine for s in run.segments if s.end > s.start] == ["e0", "e1"]


async def test_an_engine_that_changed_in_mid_stream_does_not_vouch_for_the_segment(tmp_path: Path) -> None:
    """Though its last event named one version alone."""
    e0, e1 = ScriptedEngine("e0", hold_at=4, version_early=True), ScriptedEngine("e1")
    async with e0, e1, shell(tmp_path, e0, e1) as found:
        session = found.session()
        async with found.run(session) as run:
            await until(lambda: len(run.record.token_ids) == 4, "four tokens")
            e0.version_told = "9"
            e0.cuts, e0.hold_at = deque(), None
            e0.go.set()
            await heard(run)
        assert [s.evidence for s in run.segments] == ["contradicted"]
        assert found.sessions.counters.version_mismatches == 1


@pytest.mark.parametrize("outcome", ["still loads", "loaded", "failed"])
async def test_a_finish_while_its_engine_loads_contradicts_nothing(tmp_path: Path, outcome: str) -> None:
    """The label is the new version's before the load is over, and proves nothing after one that failed."""
    e0 = ScriptedEngine("e0", tells_versions=False)
    at_once = FleetConfig(version_hold_s=0.0)
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=at_once) as found:
        session = found.session()
        await read(found.run(session))
        e0.answers["/resume"] = "hang"
        evidence = found.fleet.evidence
        evidence.check = lambda name: asyncio.sleep(0)  # type: ignore[method-assign]  # no response in time
        holder.publish(1)
        await until(lambda: e0.version == "1" and e0.calls[-1][0] == "/resume", "the label of a load that goes on")
        if outcome == "still loads":
            assert await finished(found, session) == ["none"]
        else:
            state = found.fleet.state.engines[EngineName("e0")]
            asked = asyncio.Event()
            report = found.fleet.handles[EngineName("e0")].adapter.weight_version

            async def slow() -> str:
                label = await report()
                asked.set()
                await asyncio.sleep(0)
                if outcome == "loaded":
                    state.loaded(Version(1))
                else:
                    state.to("fenced")
                return label

            found.fleet.handles[EngineName("e0")].adapter.weight_version = slow  # type: ignore[method-assign]
            assert await finished(found, session) == ["none"]
            assert asked.is_set()
        assert evidence.contradictions == 0
        assert found.trainer.admission().buffered == 1


@pytest.mark.parametrize("label", ["9", "step-42"])
async def test_an_engine_whose_label_changed_behind_our_back_is_not_trained_on(tmp_path: Path, label: str) -> None:
    async with ScriptedEngine("e0", tells_versions=False) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        await read(found.run(session))
        e0.version = label
        assert await finished(found, session) == ["contradicted"]
        assert found.fleet.evidence.contradictions == 1
        assert found.trainer.admission().buffered == 0


async def test_nobody_can_vouch_for_an_engine_that_is_gone_or_another_one_now(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", tells_versions=False)
    async with e0, shell(tmp_path, e0) as found:
        first, second = found.session(), found.session()
        for session in (first, second):
            await read(found.run(session))
        e0.started_unix_s = 2.0
        assert await finished(found, first) == ["none"]
        await e0.die()
        assert await finished(found, second) == ["none"]
        assert found.trainer.admission().buffered == 2, "what was received stands; its evidence says what it is"


async def test_an_engine_is_looked_at_before_it_is_refreshed(tmp_path: Path) -> None:
    e0, at_once = ScriptedEngine("e0", tells_versions=False), FleetConfig(version_hold_s=0.0)
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=at_once) as found:
        for version in (1, 2):
            holder.publish(version)
            await until(lambda v=version: (e0.version, found.status(e0)) == (str(v), "serving"), "a refresh")  # type: ignore[misc]
            if version == 1:
                session = found.session()
                await read(found.run(session))
        assert await finished(found, session) == ["looked"]
        assert session.sampled_versions == (1,)
