"""One session that has yet to end, on a fleet of one engine: how long it holds up new ones, and who says so."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from gateway.core.endings import Finish
from gateway.core.fleet import hold
from gateway.core.fleet.config import FleetConfig
from protos.errors import OutOfCapacity
from tests.support.fake_relay import relay
from tests.support.gateway_shell import check_whole, read, shell
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_sessions.test_versions import serve

FOR_EVER = FleetConfig(version_hold_s=1e6)


async def test_a_session_that_waits_for_its_tool_holds_up_new_ones_no_longer_than_it_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It then goes on under the new version, as its policy says; the log names it and the option once."""
    caplog.set_level("INFO")
    monkeypatch.setattr(hold, "HOLD_WORTH_S", {"segment": 0.2})
    e0 = ScriptedEngine("e0")
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=FOR_EVER) as found:
        await serve(found, holder, 1, e0)
        session = found.session("waits-for-a-tool")
        await read(found.run(session))
        holder.publish(2)
        await until(lambda: found.fleet.state.engines["e0"].held_noted, "the hold")  # type: ignore[index]
        assert e0.version == "1", "nobody waits: it is held"
        run = found.run()
        check_whole(run, await read(run))
        assert [s.version for s in run.segments] == [2]
        again = found.run(session)
        check_whole(again, await read(again))
        assert session.sampled_versions == (1, 2)
    said = [r.getMessage() for r in caplog.records if "stays on version 1" in r.getMessage()]
    assert len(said) == 1
    assert "session waits-for-a-tool" in said[0]
    assert "--version-hold-s" in said[0]


async def test_who_is_refused_meanwhile_is_told_who_holds_the_engine(tmp_path: Path) -> None:
    e0 = ScriptedEngine("e0")
    bound = {"fleet": FOR_EVER, "queue_timeout_s": 0.1}
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, **bound) as found:
        await serve(found, holder, 1, e0)
        await read(found.run(found.session("waits-for-a-tool")))
        holder.publish(2)
        await until(lambda: found.fleet.state.engines["e0"].held_noted, "the hold")  # type: ignore[index]
        with pytest.raises(OutOfCapacity, match=r"every intake is closed \(engine e0 stays on version 1 for session "):
            await read(found.run())


@pytest.mark.parametrize("again", [False, True], ids=["at once", "after a restart"])
async def test_a_session_that_waits_for_its_reward_alone_holds_no_engine(tmp_path: Path, again: bool) -> None:
    async with relay() as (holder, address), ScriptedEngine("e0") as e0:
        async with shell(tmp_path, e0, relay=address, fleet=FOR_EVER) as found:
            await serve(found, holder, 1, e0)
            session = found.session("s")
            await read(found.run(session))
            await found.endings.finish_unrewarded(session.session_id, Finish())
            if not again:
                await serve(found, holder, 2, e0)
        if again:
            async with shell(tmp_path, e0, relay=address, fleet=FOR_EVER) as found:
                await serve(found, holder, 2, e0)


async def test_a_turn_that_waits_for_the_trainer_ends_no_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine could take it, with or without the hold."""
    monkeypatch.setattr(hold, "HOLD_WORTH_S", {"segment": 0.05})
    e0 = ScriptedEngine("e0")
    async with relay() as (holder, address), e0, shell(tmp_path, e0, relay=address, fleet=FOR_EVER) as found:
        await serve(found, holder, 1, e0)
        await read(found.run(found.session("waits-for-a-tool")))
        found.trainer.requested(1, 1, 0)
        holder.publish(2)
        await until(lambda: found.fleet.state.engines["e0"].held_noted, "the hold")  # type: ignore[index]
        waiting = asyncio.create_task(read(found.run()))
        await until(lambda: found.fleet.statistics().waiting_for, "who waits")
        [reason] = found.fleet.statistics().waiting_for
        assert reason == "1 running and 0 buffered trajectories reach the bound of 1"
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 0.2, "four times its worth")
        found.fleet.reconcile()
        assert (e0.version, found.status(e0)) == ("1", "serving")
        waiting.cancel()
        await asyncio.wait([waiting])
