"""What is kept, under a power cut, damaged rows, a clock that went back, and a disk that is full for a while."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections import deque
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.core.types import SessionId
from gateway.store import Database
from gateway.store.database import DATABASE_NAME
from tests.support.scripted_engine import MODEL, Cut, ScriptedEngine, scripted, until
from tests.unit.gateway_api.test_status import gateway, get
from tests.unit.gateway_sessions.test_rewards import SAMPLE, branches, post, turn
from tests.unit.gateway_store.disk import Disk


class PowerCuts:
    """The files of a gateway as a power cut would leave them: the log as far as it was synced."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self._files = directory / DATABASE_NAME, directory / f"{DATABASE_NAME}-wal"
        self._synced_bytes = 0
        self._sync = os.fdatasync
        patch.setattr(os, "fdatasync", self._note)

    def _note(self, fd: int) -> None:
        if os.fstat(fd).st_ino == self._files[1].stat().st_ino:
            self._synced_bytes = os.fstat(fd).st_size
        self._sync(fd)

    def cut(self, into: Path) -> Path:
        """A folder with what is left. Nothing was copied from the log into the file yet: it is as it was made."""
        into.mkdir()
        shutil.copy(self._files[0], into)
        shutil.copy(self._files[1], into)
        os.truncate(into / self._files[1].name, self._synced_bytes)
        return into


async def finish(http: aiohttp.ClientSession, name: str, reward: float) -> Any:
    return await post(http, f"/sessions/{name}/finish", {"reward": reward})


@pytest.mark.slow
async def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each answer the files are cut back to what was synced, and another gateway starts from them."""
    live = tmp_path / "live"
    live.mkdir()
    power = PowerCuts(live, monkeypatch)
    left: list[Path] = []
    async with ScriptedEngine("e0") as e0:
        async with gateway(live, e0) as (_, http):
            told = []
            for number in range(3):
                await turn(http, f"s{number}", [5])
                told.append(await finish(http, f"s{number}", float(number)))
                left.append(power.cut(tmp_path / f"finish-{number}"))
            answer = (await turn(http, "late", [6]))["id"]
            await post(http, "/sessions/late/finish", {})
            left.append(power.cut(tmp_path / "unrewarded"))
            await post(http, "/sessions/late/reward", {"reward": 0.25})
            left.append(power.cut(tmp_path / "rewarded"))
            await post(http, "/sessions/late/reward", {"turns": {answer: -1.0}})
            left.append(power.cut(tmp_path / "late"))
            await turn(http, "gone", [7])
            await post(http, "/sessions/gone/abandon")
            left.append(power.cut(tmp_path / "abandoned"))
            lease = (await post(http, "/experience/sample", {**SAMPLE, "trajectories": 2}))["lease_id"]
            await post(http, "/experience/ack", {"lease_id": lease})
            left.append(power.cut(tmp_path / "acked"))
        for number, after in enumerate(left[:3]):
            async with gateway(after, e0) as (found, http):
                assert [await finish(http, f"s{n}", float(n)) for n in range(number + 1)] == told[: number + 1]
                assert found.stores.buffer.statistics().trajectories == number + 1
        async with gateway(left[3], e0) as (_, http):
            assert (await get(http, "/sessions/late"))["state"] == "unrewarded"
            assert (await post(http, "/sessions/late/reward", {"reward": 0.25}))["state"] == "finished"
        for after, turns in ((left[4], []), (left[5], [-1.0])):
            async with gateway(after, e0) as (_, http):
                found_ = (await post(http, "/experience/sample", SAMPLE))["trajectories"]
                assert [(t["reward"], t["turn_rewards"]) for t in found_][3:] == [(0.25, turns)]
        async with gateway(left[6], e0) as (_, http):
            assert "abandoned" in (await post(http, "/sessions/gone/finish", {"reward": 1.0}, 409))["error"]["message"]
        async with gateway(left[7], e0) as (_, http):
            found_ = (await post(http, "/experience/sample", SAMPLE))["trajectories"]
            assert [t["session_id"] for t in found_] == ["s2", "late"]


async def test_an_id_that_no_tokenizer_has_ends_no_thread(tmp_path: Path) -> None:
    async with ScriptedEngine("e0", cuts=deque([Cut("huge_id", 2)])) as e0, gateway(tmp_path, e0) as (_, http):
        body = {"model": MODEL, "prompt": [5], "max_tokens": 6, "return_token_ids": True}
        for _ in range(2):
            async with asyncio.timeout(30):
                answer = await post(http, "/v1/completions", body)
            assert answer["choices"][0]["token_ids"] == scripted([5], 6)[0]
        async with http.get("/healthz") as health:
            assert health.status == 200


DAMAGES = {
    "turns": "UPDATE turns SET request=x'c1' WHERE session_id='bad'",
    "turn_segments": "UPDATE turn_segments SET segment=x'c1' WHERE turn_id IN"
    " (SELECT turn_id FROM turns WHERE session_id='bad')",
    "sessions": "UPDATE sessions SET spec=x'c1' WHERE session_id='bad'",
    "turn_messages": "UPDATE turn_messages SET messages=x'c1' WHERE session_id='bad'",
    "ended": "UPDATE ended SET body=x'c1' WHERE session_id='over'",
    "timeline": "UPDATE timeline SET event=x'c1' WHERE seq=2",
    "groups": "UPDATE groups SET body=x'c1'",
    "trajectories": "UPDATE trajectories SET facts=x'c1' WHERE session_id='over'",
    "trajectory_bodies": "UPDATE trajectory_bodies SET body=x'c1' WHERE seq=1",
    "trajectories.oldest_version": "UPDATE trajectories SET oldest_version='x' WHERE session_id='over'",
    "trajectories.newest": "UPDATE trajectories SET oldest_version='x' WHERE session_id='also'",
}


@pytest.mark.parametrize("table", DAMAGES)
async def test_a_damaged_row_is_named_and_costs_what_it_says_alone(
    tmp_path: Path, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (found, http):
            await post(http, "/groups", {"size": 1, "group_id": "g"})
            for name in ("over", "bad", "good"):
                await turn(http, name, [5])
            await finish(http, "over", 1.0)
            await turn(http, "also", [5])
            await finish(http, "also", 0.5)
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection, connection:
            assert connection.execute(DAMAGES[table]).rowcount > 0
        connection.close()
        async with gateway(tmp_path, e0) as (found, http):
            read = (await post(http, "/experience/sample", SAMPLE))["trajectories"]
            bad = {"trajectories.newest": "also"}.get(table, "over" if "traj" in table else None)
            assert [t["session_id"] for t in read] == [name for name in ("over", "also") if name != bad]
            await turn(http, "good", [5])
            assert (await finish(http, "good", 1.0))["stored"]
            lost = table in ("turns", "turn_segments", "sessions", "turn_messages")
            assert (found.sessions.live.find(SessionId("bad")) is None) == lost
            if lost:
                refused = await post(http, "/sessions/bad/finish", {"reward": 1.0}, 409)
                assert "already abandoned" in refused["error"]["message"]
    assert f"table {table.partition('.')[0]} is damaged" in caplog.text


async def test_a_clock_that_went_back_while_ends_were_known_by_it_stops_no_start(tmp_path: Path) -> None:
    """Files of before ends were numbered: a turn that goes on from one seems to have ended before it."""
    async with ScriptedEngine("e0") as e0:
        async with gateway(tmp_path, e0) as (_, http):
            await branches(http, "s")
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection, connection:
            connection.execute("UPDATE turns SET end_number=NULL, ended_unix_s=10000 - rowid")
        connection.close()
        async with gateway(tmp_path, e0) as (_, http):
            told = await finish(http, "s", 1.0)
            assert (told["turns"], told["leaves"]) == (3, 2)


async def test_a_full_disk_shows_and_ends_by_itself(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        await turn(http, "s", [5])
        database: Database = found.stores.database
        disk = Disk()
        await disk.make(database)
        disk.full = True
        owed = asyncio.create_task(database.owe(disk.write))
        await until(lambda: database.failure, "the failure", timeout_s=60)
        async with http.get("/healthz") as health:
            assert health.status == 503
            assert "full" in (await health.json())["reasons"][0]
        assert "full" in (await get(http, "/status"))["store_failure"]
        for path, body in (
            ("/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 2}),
            ("/s/s/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 2}),
            ("/sessions", {"session_id": "new"}),
            ("/groups", {"size": 2}),
            ("/sessions/s/finish", {"reward": 1.0}),
            ("/experience/sample", SAMPLE),
        ):
            assert "full" in (await post(http, path, body, 503))["error"]["message"], path
        disk.full = False
        await asyncio.wait_for(owed, 60)
        assert found.sessions.live.find(SessionId("new")) is None, "what was refused has had no effect"
        await turn(http, "s", [5])
        assert (await finish(http, "s", 1.0))["stored"]
        async with http.get("/healthz") as health:
            assert health.status == 200
