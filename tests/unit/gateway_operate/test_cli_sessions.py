"""`gateway sessions`: who holds what, and how those that nobody uses are ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import cli
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway_api.test_status import gateway
from tests.unit.gateway_sessions.test_admission import leave
from tests.unit.gateway_sessions.test_rewards import turn


async def run(url: str, *words: str) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["sessions", "--url", url, *words])
    assert done.exit_code == 0, done.output
    return done.output


async def test_idle_sessions_are_listed_and_ended_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.admin.ABANDONED_AT_ONCE", 2)
    async with ScriptedEngine("e0", version="3") as e0, gateway(tmp_path, e0) as (found, http):
        for name in ("a", "b", "c", "stays"):
            await turn(http, name, [5])
        for name in "abc":
            leave(found, name)
        lines = (await run(found.url)).splitlines()
        assert lines[0] == "4 sessions are live; 3 are idle, which no turn, runner or child keeps"
        assert lines[1] == "a: no turn for 61 s, idle; 1 turns, on e0, version 3, live"
        assert lines[4].endswith("in use; 1 turns, on e0, version 3, live")
        assert (await run(found.url, "--idle-s", "60")).startswith(
            "4 sessions are live, 3 of them without a turn for 60 s"
        )
        assert json.loads(await run(found.url, "--idle-s", "1000", "--abandon", "--json"))["abandoned"] == []
        assert await run(found.url, "--idle-s", "60", "--abandon") == "3 idle sessions are ended\n"
        assert [state.session_id for state in found.sessions.live] == ["stays"]
