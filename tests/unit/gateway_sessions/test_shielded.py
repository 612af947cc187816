"""Clients that hang up in the middle of an order: it comes to its end, or has had no effect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.core.types import SessionId
from gateway.experience import ExperienceBuffer
from gateway.sessions.endings import Endings
from gateway.store import Database
from protos.errors import Unavailable
from protos.trajectories import Trajectory
from tests.support.middleman import Middleman
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post, turn
from trainer_client import AsyncExperienceReader, gateway_http


async def hang_up(http: aiohttp.ClientSession, path: str, body: Any, entered: asyncio.Event) -> None:
    """A client that leaves once its order is in the midst of it."""
    asking = asyncio.create_task(http.post(path, json=body).__aenter__())
    await asyncio.wait_for(entered.wait(), 60)
    asking.cancel()
    await asyncio.wait([asking])


async def test_a_group_is_abandoned_with_all_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, entered, after = asyncio.Event(), asyncio.Event(), Endings._after

    async def held(self: Endings, *ended: Any) -> None:
        entered.set()
        await gate.wait()
        await after(self, *ended)

    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        group = await post(http, "/groups", {"size": 8})
        monkeypatch.setattr(Endings, "_after", held)
        await hang_up(http, f"/groups/{group['group_id']}/abandon", {}, entered)
        assert len((await get(http, f"/groups/{group['group_id']}"))["sessions"]) == 8
        gate.set()
        async with asyncio.timeout(60):
            while (told := await get(http, f"/groups/{group['group_id']}"))["sessions"]:
                assert told["state"] == "abandoned"
        assert not len(found.sessions.live)


async def test_a_late_reward_ends_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, entered, add = asyncio.Event(), asyncio.Event(), ExperienceBuffer.add

    async def held(self: ExperienceBuffer, *leaves: Trajectory, **along: Any) -> None:
        entered.set()
        await gate.wait()
        await add(self, *leaves, **along)

    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await turn(http, "s", [5])
        await post(http, "/sessions/s/finish", {})
        monkeypatch.setattr(ExperienceBuffer, "add", held)
        await hang_up(http, "/sessions/s/reward", {"reward": 1.0}, entered)
        gate.set()
        await until(lambda: found.sessions.live.find(SessionId("s")) is None, "its end", timeout_s=60)
        assert [t["reward"] for t in (await post(http, "/experience/sample", SAMPLE))["trajectories"]] == [1.0]


async def test_a_reader_that_hangs_up_leaves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, entered, run = asyncio.Event(), asyncio.Event(), Database.run

    async def held(self: Database, operation: Any) -> Any:
        entered.set()
        await gate.wait()
        return await run(self, operation)

    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await turn(http, "s", [5])
        await post(http, "/sessions/s/finish", {"reward": 1.0})
        monkeypatch.setattr(Database, "run", held)
        await hang_up(http, "/experience/sample", SAMPLE, entered)
        gate.set()
        buffer = found.stores.buffer
        await until(lambda: buffer.statistics().sampled == 1, "a lease", timeout_s=60)
        await until(lambda: (buffer.statistics().leased, len(buffer._state)) == (0, 1), "no lease", timeout_s=60)
        assert len((await post(http, "/experience/sample", SAMPLE))["trajectories"]) == 1


async def test_a_batch_that_is_lost_on_its_way_comes_back_before_its_lease_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_http, "PATIENCE_S", 0.0)
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await turn(http, "s", [5])
        await post(http, "/sessions/s/finish", {"reward": 1.0})
        with Middleman(found.url.removeprefix("http://")) as between:
            async with AsyncExperienceReader(f"http://{between.address}", timeout_s=0.5) as reader:
                reader._met = True  # else it asks for statistics first, and those would be lost
                between.hold("answers")
                with pytest.raises(Unavailable, match="silent"):
                    await reader.sample(trajectories=1, wait_s=0.0)
                between.cut()
                between.mend()
                assert len(await reader.sample(trajectories=1, wait_s=60.0)) == 1


@pytest.mark.parametrize("name", ["", "a b", "a" * 129, "a%00"])
async def test_a_name_that_no_lease_can_have_is_refused(tmp_path: Path, name: str) -> None:
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path, e0) as (_, http),
        http.post(f"/experience/sample?lease_id={name}", json=SAMPLE) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "lease_id")
