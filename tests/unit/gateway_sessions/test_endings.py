"""A finish is made once, whoever leaves and whoever asks again; what is given is there after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.core.endings import Finish
from gateway.core.types import SessionId, TokenDelta
from gateway.experience import ExperienceBuffer
from gateway.turns.running import RunningTurn
from protos.errors import Conflict, Unavailable
from protos.trajectories import Trajectory
from tests.support.gateway_shell import read, shell
from tests.support.scripted_engine import MODEL, ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_groups import rolled_out
from tests.unit.gateway_sessions.test_rewards import branches, post, rewards, turn


async def test_a_finish_asked_again_tells_the_same_also_after_a_restart(tmp_path: Path) -> None:
    asked = {"reward": 1.0, "metrics": {"steps": 3.0}}
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            await turn(http, "s", [5])
            told = await post(http, "/sessions/s/finish", asked)
            assert await post(http, "/sessions/s/finish", asked) == told
            refused = await post(http, "/sessions/s/finish", {**asked, "reward": 0.5}, 409)
            assert "session s is already finished with reward 1, completed" in refused["error"]["message"]
        async with gateway(tmp_path, e0) as (_, http):
            assert await post(http, "/sessions/s/finish", asked) == told
            await post(http, "/sessions/s/finish", {"reward": 1.0}, 409)
            await post(http, "/sessions", {"session_id": "s"}, 409)
            assert await rewards(http) == [(1.0, [])], "it is there once"


async def test_a_finish_goes_on_without_its_caller_and_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered, add = asyncio.Event(), asyncio.Event(), ExperienceBuffer.add

    async def held(self: ExperienceBuffer, *leaves: Trajectory, **along: Any) -> None:
        entered.set()
        await gate.wait()
        await add(self, *leaves, **along)

    monkeypatch.setattr(ExperienceBuffer, "add", held)
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        session = found.session()
        await read(found.run(session))
        asked = Finish(reward=1.0)
        gone = asyncio.create_task(found.endings.finish(session.session_id, asked))
        await entered.wait()
        gone.cancel()
        await asyncio.wait([gone])
        joining = asyncio.create_task(found.endings.finish(session.session_id, asked))
        with pytest.raises(Conflict, match="is being finished with reward 1, completed, not with reward 2, truncated"):
            await found.endings.finish(session.session_id, Finish(reward=2.0, status="truncated"))
        gate.set()
        told = await joining
        assert told is not None
        assert told.stored
        assert await found.endings.finish(session.session_id, asked) == told
        assert found.sessions.counters.trajectories_finished == 1
        assert found.trainer.admission().buffered == 1


async def test_an_abandonment_goes_on_without_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, entered, abort = asyncio.Event(), asyncio.Event(), RunningTurn.abort

    async def held(self: RunningTurn, why: str) -> None:
        entered.set()
        await gate.wait()
        await abort(self, why)

    monkeypatch.setattr(RunningTurn, "abort", held)
    e0 = ScriptedEngine("e0", hold_at=2)
    async with e0, shell(tmp_path, e0) as found:
        session = found.session("s")
        reading = asyncio.create_task(read(found.run(session)))
        await until(lambda: e0.requests, "the turn")
        gone = asyncio.create_task(found.endings.abandon(session.session_id, "not wanted"))
        await entered.wait()
        gone.cancel()
        await asyncio.wait([gone])
        gate.set()
        with pytest.raises(Conflict, match="its session was abandoned"):
            await reading
        await until(lambda: found.sessions.live.ended(session.session_id), "its end")
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        assert len(found.sessions.live) == 0, "on disk, too"


async def test_a_client_that_hangs_up_while_it_finishes_finds_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, add = asyncio.Event(), ExperienceBuffer.add

    async def held(self: ExperienceBuffer, *leaves: Trajectory, **along: Any) -> None:
        await gate.wait()
        await add(self, *leaves, **along)

    monkeypatch.setattr(ExperienceBuffer, "add", held)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await turn(http, "s", [5])
        with pytest.raises(asyncio.TimeoutError):
            await http.post("/sessions/s/finish", json={"reward": 1.0}, timeout=aiohttp.ClientTimeout(0.05))
        gate.set()
        await until(lambda: found.sessions.live.find(SessionId("s")) is None, "the end without the client")
        assert (await post(http, "/sessions/s/finish", {"reward": 1.0}))["stored"]


async def test_rewards_given_before_the_end_survive_a_restart(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            first, left, _ = await branches(http, "s")
            await post(http, "/sessions/s/reward", {"turns": {first: 0.25}, "leaves": {left: -1.0}})
            await branches(http, "waits")
            await post(http, "/finish_session?session_id=waits", {"status": "truncated", "metrics": {"steps": 2.0}})
        async with gateway(tmp_path, e0) as (_, http):
            await post(http, "/sessions/s/finish", {"reward": 1.0})
            assert (await get(http, "/sessions/waits"))["state"] == "unrewarded"
            await post(http, "/s/waits/v1/completions", {"model": MODEL, "prompt": [5]}, 409)
            assert (await post(http, "/sessions/waits/reward", {"reward": 0.5}))["state"] == "finished"
            sample = {"reader": "t", "trainer_version": 0, "trajectories": 8}
            told = (await post(http, "/experience/sample", sample))["trajectories"]
            assert [t["reward"] for t in told] == [-1.0, 1.0, 0.5, 0.5]
            assert [t["turn_rewards"] for t in told[:2]] == [[0.25, None], [0.25, None]]
            assert {(t["status"], t["metrics"]["steps"]) for t in told[2:]} == {("truncated", 2.0)}


async def test_a_group_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            group = await post(http, "/groups", {"size": 3, "group_min": 2, "resample_max": 1})
            first, second, third = group["sessions"]
            await rolled_out(http, first)
        async with gateway(tmp_path, e0) as (_, http):
            again = await get(http, f"/groups/{group['group_id']}")
            assert (again["finished"], [m["api_key"] for m in again["sessions"]]) == (
                [first["session_id"]],
                [second["api_key"], third["api_key"]],
            )
            told = await post(http, f"/sessions/{second['session_id']}/abandon")
            assert told["replacement"]["session_id"] != second["session_id"]
        async with gateway(tmp_path, e0) as (_, http):
            await rolled_out(http, third)
            await post(http, f"/sessions/{told['replacement']['session_id']}/abandon")
            closed = await get(http, f"/groups/{group['group_id']}")
            assert (closed["state"], closed["resampled"]) == ("closed", 1)
            sample: dict[str, Any] = {"reader": "t", "trainer_version": 0, "groups": 1, "group_size": 3}
            assert len((await post(http, "/experience/sample", sample))["trajectories"]) == 2


async def test_a_member_that_ended_as_the_gateway_died_is_counted_at_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is on disk, its group has not heard of it."""
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            group = await post(http, "/groups", {"size": 2, "resample_max": 1})
            with monkeypatch.context() as patched:
                patched.setattr("gateway.sessions.endings.Endings.member_ended", _unheard)
                for member in group["sessions"]:
                    await turn(http, member["session_id"], [5])
                name, other = (member["session_id"] for member in group["sessions"])
                found = _.sessions
                await post(http, f"/sessions/{name}/finish", {"reward": 1.0})
                await post(http, f"/sessions/{other}/abandon")
            assert found.counters.sessions_abandoned == 1
        async with gateway(tmp_path, e0) as (_, http):
            again = await get(http, f"/groups/{group['group_id']}")
            assert (again["finished"], again["resampled"], len(again["sessions"])) == ([name], 1, 1)


async def _unheard(*_: object) -> None:
    return None


async def test_a_session_that_cannot_be_ended_keeps_no_other_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.endings.EXPIRY_INTERVAL_S", 0.02)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await post(http, "/groups", {"size": 1, "resample_max": 1})  # to be replaced, with no room for another
        await post(http, "/sessions", {"session_id": "s"})
        object.__setattr__(found.sessions.config, "sessions_max", 0)
        object.__setattr__(found.sessions.config, "session_idle_s", 0.0)
        await until(lambda: not found.sessions.live, "the end of both")


async def test_a_finish_that_met_a_fault_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await turn(http, "s", [5])

        async def failing(segments: Any) -> Any:
            raise RuntimeError("nobody foresaw it")

        with monkeypatch.context() as patched:
            patched.setattr(found.fleet.evidence, "collect", failing)
            await post(http, "/sessions/s/finish", {"reward": 1.0}, 500)
        assert (await get(http, "/sessions/s"))["state"] == "live"
        assert (await post(http, "/sessions/s/finish", {"reward": 1.0}))["stored"]
        assert await rewards(http) == [(1.0, [])]


async def test_an_early_end_that_cannot_be_kept_is_told_to_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine("e0", hold_at=4) as e0, shell(tmp_path, e0) as found:
        run = found.run()

        async def refused(*_: object) -> None:
            raise Unavailable("the store is closed")

        async def read_on() -> None:
            async with run:
                other = asyncio.create_task(run.read(lambda delta: None, at_end=True))
                await until(lambda: len(run.record.token_ids) == 4, "tokens")
                monkeypatch.setattr(found.pool, "end", refused)
                with pytest.raises(Unavailable):
                    await run.finish_early(2)
                with pytest.raises(Unavailable, match="the store is closed"):
                    await asyncio.wait_for(other, 60)
                monkeypatch.undo()

        with pytest.raises(Unavailable, match="the store is closed"):
            await read_on()


async def test_a_clock_that_is_set_ends_no_session_and_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hours, as where it was wrong at the boot."""
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        session, used = found.session("s"), found.session("used")
        for each in (session, used):
            await read(found.run(each))
        await found.endings.finish(used.session_id, Finish(reward=1.0))
        buffer = found.trainer._buffer
        lease = (await buffer.sample("t", trainer_version=0, trajectories=1)).lease_id
        set_to = time.time() + 86_400
        monkeypatch.setattr("time.time", lambda: set_to)
        assert not found.endings._why_over(session)
        assert await buffer.ack(lease) == 1
        assert not (await buffer.sample("t", trainer_version=0, trajectories=1)).rows


async def test_a_clock_that_is_set_back_vouches_for_nothing_that_was_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine("e0", version="3", tells_versions=False) as e0, shell(tmp_path, e0) as found:
        session = found.session()
        await read(found.run(session))
        await found.fleet.evidence.collect([s for t in session.tree.turns.values() for s in t.segments])
        set_to = time.time() - 86_400
        monkeypatch.setattr("time.time", lambda: set_to)
        run = found.run(session)
        await read(run)
        e0.version = "4"  # by somebody else, and nobody heard of it
        [segment] = await found.fleet.evidence.collect([*run.segments])
        assert segment.evidence == "contradicted"


async def test_an_end_that_cannot_be_kept_is_told_to_who_has_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers hear of the end before it is on disk, and show it only when they have left."""
    async with ScriptedEngine("e0") as e0, shell(tmp_path, e0) as found:
        run = found.run()

        async def refused(*_: object) -> None:
            raise Unavailable("the store is closed")

        monkeypatch.setattr(found.pool, "end", refused)
        heard: list[TokenDelta] = []

        async def read_whole() -> None:
            async with run:
                await run.read(heard.append)

        with pytest.raises(Unavailable, match="the store is closed"):
            await read_whole()
        assert heard[-1].finish_reason == "length"
