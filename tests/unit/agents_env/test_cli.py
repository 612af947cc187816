"""The command as a process: its output, its end on SIGTERM, and what it says of bad input."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from agents_env.cli import main
from agents_env.runner import Statistics
from agents_env.runner.progress import describe, show_live, show_log
from tests.unit.agents_env.scripted_server import perfect, serving

starts_the_command = imports_every_dataset = pytest.mark.slow


async def start(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "agents_env", *words, stderr=pipe, stdout=pipe)


@starts_the_command
async def test_rolls_out_groups_and_leaves_a_line_for_each_rollout(tmp_path: Path) -> None:
    out, ready = tmp_path / "out" / "rollouts.jsonl", tmp_path / "ready"
    async with serving(perfect) as server:
        options = ["--gateway", server.url, "--groups", "3", "--group-size", "2", "--run-id", "x"]
        process = await start("run", "tool-chain", *options, "--out", str(out), "--ready-file", str(ready))
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["session_id"] for line in lines} == set(server.finished)
    assert len(lines) == 6
    assert json.loads(ready.read_text()) == {"pid": process.pid, "run_id": "x"}
    assert "6 rollouts, 3 whole groups" in errors.decode()


@starts_the_command
async def test_sigterm_abandons_open_sessions_and_ends_cleanly() -> None:
    async with serving(perfect) as server:
        server.hold = asyncio.Event()
        process = await start("run", "tool-chain", "--gateway", server.url, "--concurrency", "3")
        async with asyncio.timeout(60):
            await server.chats_reach(3)
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert set(server.abandoned) == set(server.sessions)
    assert "3 abandoned" in errors.decode()


@starts_the_command
async def test_a_server_that_is_not_there_is_one_line_and_status_1() -> None:
    process = await start("run", "tool-chain", "--gateway", "http://127.0.0.1:9", "--patience-s", "0")
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in errors.decode()
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "chess"], "No such command 'chess'"),
        (["run", "tool-chain"], "Missing option '--gateway'"),
        pytest.param(
            ["run", "reasoning", "--gateway", "http://x", "--dataset", "sums"],
            "no dataset 'sums'",
            marks=imports_every_dataset,
        ),
        (["run", "reasoning", "--gateway", "http://x", "--dataset-config", "{"], "not JSON"),
        (["run", "reasoning", "--gateway", "http://x", "--dataset-config", "[]"], "not a JSON object"),
        (["run", "tool-chain", "--gateway", "http://x", "--group-size", "0"], "--group-size"),
        (["run", "tool-chain", "--gateway", "127.0.0.1:80"], "not a URL"),
    ],
)
def test_a_wrong_command_is_told_what_is_wrong(words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert said in result.output


@imports_every_dataset
def test_list_names_the_environments_and_the_datasets() -> None:
    result = CliRunner().invoke(main, ["list", "--datasets"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("tool-chain", "reasoning", "  chain_sum"))


STATISTICS = Statistics(
    running=2,
    rollouts=5,
    groups_completed=1,
    failed=3,
    given_up=1,
    abandoned=0,
    turns=9,
    completion_tokens=40,
    retries=0,
    reward_mean=0.5,
    reward_recent=0.25,
    seconds=4.0,
    last_error="model (http 500): gone",
)


def test_a_run_is_described_in_one_line_that_names_only_troubles_there_were() -> None:
    assert describe(STATISTICS) == (
        "5 rollouts, 1 whole groups, 2 running; reward 0.500, lately 0.250; 9 turns, 40 tokens, 10.0 tokens/s, "
        "3 failed, 1 given up"
    )


async def test_a_terminal_shows_the_last_error() -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=80)
    showing = asyncio.create_task(show_live(screen, "agents-env echo", lambda: STATISTICS))
    await asyncio.sleep(0)
    showing.cancel()
    await asyncio.wait({showing})
    assert isinstance(screen.file, StringIO)
    assert "model (http 500): gone" in screen.file.getvalue()


async def test_log_lines_come_only_when_something_changed(caplog: pytest.LogCaptureFixture) -> None:
    reads = 0
    done = asyncio.Event()

    def read() -> Statistics:
        nonlocal reads
        reads += 1
        if reads == 3:
            done.set()
        return STATISTICS

    with caplog.at_level("INFO", "agents-env"):
        showing = asyncio.create_task(show_log(read, interval_s=0.0))
        await asyncio.wait_for(done.wait(), 60)
        showing.cancel()
        await asyncio.wait({showing})
    assert len(caplog.records) == 1
