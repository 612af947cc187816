"""Engines that come back as another incarnation, or are met fenced: no turn before they hold a wanted version.

Nothing here waits for a poll: they are half a minute apart.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from tests.support.fake_relay import FakeRelay, relay
from tests.support.gateway_shell import BUDGET, Shell, check_whole, read, shell
from tests.support.reading import heard
from tests.support.scripted_engine import Cut, ScriptedEngine, until


async def loaded(found: Shell, holder: FakeRelay, *engines: ScriptedEngine) -> None:
    """Version 7 on every engine."""
    holder.publish(7)
    await until(lambda: all((e.version, found.status(e)) == ("7", "serving") for e in engines), "version 7")


async def test_an_idle_engine_that_restarts_is_noticed_before_the_next_turn(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address) as found:
        await loaded(found, holder, e0)
        state = found.fleet.state.sorted_engines()[0]
        await e0.die()
        await until(lambda: state.suspected or found.status(e0) != "serving", "notice of the broken connection")
        async with ScriptedEngine("e0", url=e0.url, started_unix_s=2.0) as again:
            found.fleet.suspect(state.name)  # stands for the next poll
            run = found.run()
            check_whole(run, await read(run))
            assert [asked.version for asked in again.requests] == ["7"]
            assert [(s.incarnation, s.version) for s in run.segments] == [("2.0", 7)]


async def test_a_turn_cut_by_a_restart_waits_for_the_refresh_rather_than_mix_versions(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", hold_at=4)
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address) as found:
        await loaded(found, holder, e0)
        run = found.run()
        async with run:
            await until(lambda: len(run.record.token_ids) == 4, "tokens")
            await e0.die()
            async with ScriptedEngine("e0", url=e0.url, started_unix_s=2.0) as again:
                check_whole(run, await heard(run))
                assert [asked.version for asked in again.requests] == ["7"]
        assert [(s.version, s.cause) for s in run.segments] == [(7, "start"), (7, "cut")]
        assert found.sessions.counters.turns_mixed_version == 0


async def test_a_turn_that_broke_off_is_not_sent_there_again_before_the_engine_answered(tmp_path: Path) -> None:
    """The look after a cut hangs: the turn waits, though the engine would have taken it."""
    e0 = ScriptedEngine("e0", cuts=deque([Cut("reset", 2)]))
    async with e0, shell(tmp_path, e0) as found:
        e0.answers["/metrics"] = "hang"
        run = found.run()
        async with run:
            await until(lambda: run.record.segments and not run.engine and found.sessions.counters.turns_cut, "the cut")
            await until(lambda: found.fleet.statistics().queued == 1, "the turn in the queue")
            assert len(e0.requests) == 1
            e0.answers.clear()
            await e0.die()  # the hanging look fails; the next one finds it
            async with ScriptedEngine("e0", url=e0.url, started_unix_s=1.0):
                check_whole(run, await heard(run))


async def test_an_engine_met_fenced_loads_before_it_serves_whatever_its_label_says(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", version="7", paused=True)
    async with relay() as (holder, address), e0:
        holder.publish(7)
        async with shell(tmp_path, e0, relay=address) as found:
            assert ("/update_weights" in dict(e0.calls), e0.paused) == (True, False)
            run = found.run()
            check_whole(run, await read(run))


async def test_an_engine_met_fenced_with_nothing_to_load_serves_once_it_is_resumed(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", paused=True)
    async with e0, shell(tmp_path, broken=[e0], poll_interval_s=0.01) as found:
        await until(lambda: found.status(e0) == "joining", "a first look")
        for _ in range(3):
            found.fleet.reconcile()
            assert found.status(e0) == "joining"
        e0.paused = False
        await until(lambda: found.status(e0) == "serving", "service")


async def test_tokens_of_another_version_are_not_taken_where_the_engine_tells_it_first(tmp_path: Path) -> None:
    """Somebody else loaded a version: the first event says so, and a look finds the new label."""
    e0 = ScriptedEngine("e0", version="7", version_early=True)
    async with e0, shell(tmp_path, e0) as found:
        session = found.session()
        await read(found.run(session))
        e0.version = "9"
        run = found.run(session)
        await read(run)
        assert [(s.version, s.start, s.end) for s in run.segments] == [(7, 0, 0), (9, 0, BUDGET)]
        assert found.sessions.counters.cuts_by_reason == {"version": 1}
        assert found.sessions.counters.version_mismatches == 0


async def test_a_version_told_at_the_end_alone_is_believed_and_the_engine_looked_at(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0", version="7")
    async with e0, shell(tmp_path, e0) as found:
        e0.version = "default"  # a restart that nothing else showed: what it was started with
        run = found.run()
        await read(run)
        assert [s.version for s in run.segments] == [0]
        assert found.sessions.counters.version_mismatches == 1
        await until(lambda: found.fleet.state.sorted_engines()[0].version == 0, "the look")
        await read(found.run())
        assert found.sessions.counters.version_mismatches == 1


async def test_weights_that_somebody_named_otherwise_than_by_a_version_are_not_those_it_was_started_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    e0 = ScriptedEngine("e0", version="base-model")
    async with e0, shell(tmp_path, e0) as found:
        await read(found.run())
        assert found.sessions.counters.version_mismatches == 0
        assert "engine e0 calls its weights base-model, which is no version: they count as version 0" in caplog.text
        e0.version = "step-42"  # a trainer that loads by itself
        run = found.run()
        await read(run)
        assert [(s.version, s.evidence) for s in run.segments] == [(0, "contradicted")]
        assert found.sessions.counters.version_mismatches == 1
        assert "sent to version 0, sampled by step-42" in caplog.text
        await until(lambda: "calls its weights step-42, which is no version" in caplog.text, "the look")
