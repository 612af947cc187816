"""`--experience-store memory`: finished trajectories are never on disk, while sessions and their ends are."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import DATABASE_NAME
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post, turn
from tests.unit.gateway_store.disk import Disk


def rows(directory: Path, table: str) -> list[Any]:
    """Session ids of what a gateway that has ended left."""
    with contextlib.closing(sqlite3.connect(directory / DATABASE_NAME)) as connection, connection:
        found = connection.execute(f"SELECT session_id FROM {table} ORDER BY session_id").fetchall()
    connection.close()
    return [name for (name,) in found]


async def finish(http: aiohttp.ClientSession, name: str, reward: float) -> Any:
    return await post(http, f"/sessions/{name}/finish", {"reward": reward})


async def sampled(http: aiohttp.ClientSession) -> list[tuple[str, float]]:
    """What a trainer gets, and uses up."""
    told = await post(http, "/experience/sample", SAMPLE)
    if told["lease_id"]:
        await post(http, "/experience/ack", {"lease_id": told["lease_id"]})
    return [(t["session_id"], t["reward"]) for t in told["trajectories"]]


async def test_a_trainer_gets_them_and_a_restart_loses_them_alone(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0, experience_store="memory") as (_, http):
            for name in ("used", "revised", "lost", "live"):
                await turn(http, name, [5])
            await finish(http, "used", 1.0)
            assert await sampled(http) == [("used", 1.0)]
            await finish(http, "revised", 0.5)
            await post(http, "/sessions/revised/reward", {"reward": 0.75})
            assert await sampled(http) == [("revised", 0.75)]
            told = await finish(http, "lost", 0.25)
            assert told["stored"]
        assert (rows(tmp_path, "trajectories"), rows(tmp_path, "sessions")) == ([], ["live"])
        async with gateway(tmp_path, e0, experience_store="memory") as (_, http):
            assert await finish(http, "lost", 0.25) == told, "its end is kept"
            assert await sampled(http) == []
            await turn(http, "live", [5])
            await finish(http, "live", 1.0)
            assert await sampled(http) == [("live", 1.0)]


async def test_what_a_life_with_the_database_left_waits_untouched_for_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            await turn(http, "before", [5])
            await finish(http, "before", 1.0)
        async with gateway(tmp_path, e0, experience_store="memory") as (_, http):
            assert "1 sessions' trajectories of an earlier life stay in the database" in caplog.text
            await turn(http, "between", [5])
            await finish(http, "between", 0.5)
            assert await sampled(http) == [("between", 0.5)]
        async with gateway(tmp_path, e0) as (_, http):
            assert await sampled(http) == [("before", 1.0)]


async def test_a_full_disk_refuses_finishes_but_no_reader(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0, experience_store="memory") as (found, http):
        for name in ("first", "second"):
            await turn(http, name, [5])
        await finish(http, "first", 1.0)
        database, disk = found.stores.database, Disk()
        await disk.make(database)
        disk.full = True
        owed = asyncio.create_task(database.owe(disk.write))
        await until(lambda: database.failure, "the failure", timeout_s=60)
        await post(http, "/sessions/second/finish", {"reward": 0.5}, 503)
        assert await sampled(http) == [("first", 1.0)], "and nothing of the one that was refused"
        disk.full = False
        await asyncio.wait_for(owed, 60)
        assert (await finish(http, "second", 0.5))["stored"]
        assert await sampled(http) == [("second", 0.5)]
        assert (await get(http, "/status"))["buffer"]["acked"] == 2
