"""What vouches for the version of each span: checked against the engine before and after, not assumed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.core.endings import Finish
from gateway.core.fleet import FleetConfig
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName
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


async def test_an_engine_whose_label_changed_behind_our_back_is_not_trained_on(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", tells_versions=False) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        await read(found.run(session))
        e0.version = "9"
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
