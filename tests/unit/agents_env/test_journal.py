"""A run that was killed goes on: nothing that ended is played again, and nothing is left out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agents_env.failures import RunFailed
from agents_env.runner import Runner, Statistics
from agents_env.runner.journal import Journal
from agents_env.server import Sampling, Server, Usage
from tests.unit.agents_env.scripted_server import ScriptedServer, serving
from tests.unit.agents_env.test_runner import Echo, plan, repeat

RUN = {"environment": "echo", "seed": 0}


async def life(server: ScriptedServer, path: Path, *, stop_at: int = 0, **options: Any) -> Statistics:
    """One life of the run; `stop_at`: it is stopped when so many chats have begun."""
    stop = asyncio.Event()
    with Journal.open(path, "r", RUN) as journal:
        async with Server(server.url, Sampling("policy"), patience_s=5.0) as client:
            runner = Runner(Echo(**options), client, plan(concurrency=1, attempts=2), journal=journal)
            running = asyncio.create_task(runner.run(stop))
            if stop_at:
                async with asyncio.timeout(60):
                    await server.chats_reach(stop_at)
                stop.set()
            return await running


async def test_a_stopped_run_goes_on_with_what_had_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal"
    async with serving(repeat) as server:
        server.hold_from = 3
        first = await life(server, path, stop_at=3)
        assert (first.rollouts, first.abandoned) == (2, 1)
        server.hold_from = None
        second = await life(server, path)
        assert (second.rollouts, second.groups_completed, second.abandoned) == (6, 2, 0)
        assert len(server.finished) == 6
        assert set(server.sessions) - set(server.finished) == {"echo-r-0-2"}
        assert "echo-r-0-2-retry1" in server.finished
        assert (await life(server, path)).rollouts == 6
        assert len(server.finished) == 6


async def test_a_session_that_was_finished_before_the_kill_counts_and_a_live_one_is_abandoned(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with serving(repeat) as server:
        async with Server(server.url, Sampling("policy"), sessions=True) as client:
            for name in ("echo-r-0-0", "echo-r-0-1"):
                await client.post("/sessions", {"session_id": name}, Usage())
            await client.post("/sessions/echo-r-0-0/finish", {"reward": 0.25, "status": "completed"}, Usage())
        with Journal.open(path, "r", RUN) as journal:
            for index in range(2):
                journal.began(("echo-r-0", index), 1, "")
        path.write_text(path.read_text() + '{"event": "en')  # the kill cut a line
        end = await life(server, path)
        assert (end.rollouts, end.groups_completed) == (6, 2)
        assert server.abandoned == {"echo-r-0-1": "its runner died"}
        assert "echo-r-0-1-retry1" in server.finished
        assert "echo-r-0-0-retry1" not in server.sessions
        assert end.reward_mean == pytest.approx((0.25 + 5) / 6)


async def test_what_was_given_up_stays_given_up(tmp_path: Path) -> None:
    async with serving(repeat) as server:
        for _ in range(2):
            end = await life(server, tmp_path / "journal", broken=frozenset({1}))
            assert (end.rollouts, end.given_up, end.groups_completed) == (3, 3, 1)
        assert len(server.sessions) == 3 + 3 * 2


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.open(path, "r", RUN) as journal:
        journal.began(("g", 0), 1, "")
    with pytest.raises(RunFailed, match="a run with seed=0, not 1"):
        Journal.open(path, "r", {**RUN, "seed": 1})
    with Journal.open(path, "other", RUN) as journal:
        assert journal.run_id == "r"
    path.write_text("no journal\n" + path.read_text())
    with pytest.raises(RunFailed, match="line 1 is no journal's"):
        Journal.open(path, "r", RUN)
