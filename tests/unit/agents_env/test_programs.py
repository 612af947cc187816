"""`agents-env exec`: programs of any kind, each run a session, and nothing of a run left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agents_env.cli import main
from agents_env.programs import Programs, read_tasks
from agents_env.runner import Plan, Record, Runner
from agents_env.runner.phases import PhaseLimits
from agents_env.server import Sampling, Server
from tests.support.scripted_engine import pass_time, until
from tests.unit.agents_env.scripted_server import ScriptedServer, serving
from tests.unit.agents_env.test_cli import start

pytestmark = pytest.mark.slow  # each starts the command itself

ASK = """
import json, os, sys, urllib.request
from pathlib import Path
env = os.environ
body = {"model": env["AGENTS_ENV_MODEL"], "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
headers = {"Authorization": "Bearer " + env["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(env["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
task = json.loads(Path(env["AGENTS_ENV_TASK_FILE"]).read_text())
"""


def say_four(conversation: list[dict[str, str]]) -> str:
    return "4"


async def execute(
    server: ScriptedServer, folder: Path, program: str, *, time_limit_s: float = 600.0, **options: Any
) -> Record:
    """The record of one run of a Python program."""
    (folder / "program.py").write_text(program)
    programs = Programs([sys.executable, str(folder / "program.py")], read_tasks(None), **options)
    plan = Plan("r", groups=1, group_size=1, attempts=1, limits=PhaseLimits(tool_s=time_limit_s))
    records: list[Record] = []
    async with Server(server.url, Sampling("policy")) as client:
        await Runner(programs, client, plan, on_record=records.append).run(asyncio.Event())
    [record] = records
    return record


async def test_each_run_is_a_session_and_its_exit_status_the_reward(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "status": 0}\n{"status": 3}\n')
    program = ASK + "assert env['ANTHROPIC_BASE_URL'] + '/v1' == env['OPENAI_BASE_URL']\nsys.exit(task['status'])"
    (tmp_path / "program.py").write_text(program)
    async with serving(say_four) as server:
        options = ["--tasks", str(tmp_path / "tasks.jsonl"), "--runs", "2", "--log-dir", str(tmp_path / "logs")]
        where = ["--gateway", server.url, "--out", str(tmp_path / "out")]
        process = await start("exec", *where, *options, "--", sys.executable, str(tmp_path / "program.py"))
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted((line["task_id"], line["sample_index"], line["reward"]) for line in lines) == [
        ("2", 0, 0.0),
        ("2", 1, 0.0),
        ("a", 0, 1.0),
        ("a", 1, 1.0),
    ]
    assert {line["metrics"]["exit_status"] for line in lines} == {0, 3}
    assert set(server.finished) == set(server.sessions) == {line["session_id"] for line in lines}
    assert sorted(server.keys) == sorted(f"Bearer key-{session}" for session in server.sessions)
    assert len({body["group_id"] for body in server.sessions.values()}) == 2
    assert len(list((tmp_path / "logs").glob("*.log"))) == 4


@pytest.mark.parametrize(
    ("end", "options", "reward"),
    [
        ("Path(env['AGENTS_ENV_REWARD_FILE']).write_text('0.25\\n')", {"reward_file": True}, 0.25),
        ("sys.exit(7)", {"score": "sh -c 'echo checked; echo 0.$AGENTS_ENV_EXIT_STATUS'"}, 0.7),
    ],
)
async def test_the_reward_from_a_file_or_a_scoring_command(
    tmp_path: Path, end: str, options: dict[str, Any], reward: float
) -> None:
    async with serving(say_four) as server:
        record = await execute(server, tmp_path, ASK + end, **options)
    assert (record.reward, record.error) == (reward, None)
    assert record.prompt_tokens is None, "its calls did not go through the runner"


@pytest.mark.parametrize(
    ("end", "options", "kind", "message"),
    [
        ("", {"reward_file": True}, "reward", "wrote no $AGENTS_ENV_REWARD_FILE"),
        ("Path(env['AGENTS_ENV_REWARD_FILE']).write_text('nan')", {"reward_file": True}, "reward", "no number: 'nan'"),
        ("", {"score": "sh -c 'echo good'"}, "reward", "last line has no number: 'good'"),
        ("", {"score": "false"}, "score", "ended with status 1"),
        ("", {"score": "/nowhere/score"}, "FileNotFoundError", "/nowhere/score: No such file"),
        ("os.kill(os.getpid(), 9)", {}, "signal", "ended by SIGKILL"),
    ],
)
async def test_what_gives_no_reward_is_a_failure(
    tmp_path: Path, end: str, options: dict[str, Any], kind: str, message: str
) -> None:
    async with serving(say_four) as server:
        record = await execute(server, tmp_path, ASK + end, **options)
    assert record.error is not None
    assert (record.status, record.error.boundary, record.error.kind) == ("failed", "environment", kind), record
    assert message in record.error.message
    assert record.error.phase == ("tool" if kind == "signal" else "score")
    assert set(server.abandoned) == set(server.sessions)


async def test_a_program_that_makes_no_call_is_named_and_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("open('ran', 'a').write('x')")
    programs = Programs(["sh", "-c", f"cd {tmp_path} && {sys.executable} program.py"], read_tasks(None))
    records: list[Record] = []
    async with serving(say_four) as server:
        async with Server(server.url, Sampling("policy")) as client:
            plan = Plan("r", groups=1, group_size=1, attempts=3)
            await Runner(programs, client, plan, on_record=records.append).run(asyncio.Event())
        assert (set(server.abandoned), server.finished) == (set(server.sessions), {})
    [record] = records
    assert record.error is not None
    assert (record.error.kind, (tmp_path / "ran").read_text()) == ("no call", "x")
    assert "made no model call by its session that was answered, and ended with status 0" in record.error.message


FORK = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(sys.argv[0]).parent
child = subprocess.Popen(["sleep", "1000"])
(here / "half").write_text(f"{os.getpid()} {child.pid}")
(here / "half").rename(here / "pids")
time.sleep(1000)
"""


TRAP = """
def end(number, frame):
    (here / "got").write_text(str(number))
    sys.exit(0)

import signal
signal.signal({number}, end)
child ="""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(folder: Path) -> None:
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    await until(lambda: not any(lives(pid) for pid in pids), "the end of both")


async def test_a_run_that_takes_too_long_ends_with_all_its_processes(tmp_path: Path) -> None:
    async with serving(say_four) as server:
        running = asyncio.create_task(execute(server, tmp_path, FORK, time_limit_s=600.0))
        await until((tmp_path / "pids").exists, "both processes")
        pass_time(601.0)
        record = await running
    assert record.error is not None
    assert (record.error.kind, record.error.phase) == ("timeout", "tool")
    assert "longer than 600 s" in record.error.message
    await gone(tmp_path)


STRAY = """
import subprocess
for number in range(2):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
here = Path(sys.argv[0]).parent
shell = ["sh", "-c", "sleep 1000 & echo $! > $0/inner; wait", here]
child = subprocess.Popen(shell, start_new_session=True)
while not (inner := here / "inner").exists() or not inner.read_text():
    pass
(here / "pids").write_text(f"{child.pid} {inner.read_text()}")
"""


async def test_a_process_that_left_its_group_is_not_left_behind(tmp_path: Path) -> None:
    async with serving(say_four) as server:
        record = await execute(server, tmp_path, ASK + STRAY)
    assert (record.reward, record.error) == (1.0, None)
    await gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_reach_the_programs_and_the_sessions_are_abandoned(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "program.py").write_text(FORK.replace("child =", TRAP.format(number=int(number))))
    async with serving(say_four) as server:
        process = await start("exec", "--gateway", server.url, "--", sys.executable, str(tmp_path / "program.py"))
        await until((tmp_path / "pids").exists, "both processes")
        os.kill(process.pid, number)
        await process.communicate()
    assert process.returncode == 0
    assert (tmp_path / "got").read_text() == str(int(number))
    assert set(server.abandoned) == set(server.sessions)
    await gone(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gateway", "http://x"], "Missing argument 'COMMAND...'"),
        (["--gateway", "http://x", "--reward-file", "--score", "true", "--", "true"], "choose one"),
        (["--gateway", "http://x", "--tasks", "{folder}/list", "--", "true"], "line 1: not a JSON object"),
        (["--gateway", "http://x", "--tasks", "{folder}/none", "--", "true"], "has no tasks"),
    ],
)
def test_a_wrong_command_is_told_what_is_wrong(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "list").write_text("[1]\n")
    (tmp_path / "none").write_text("\n")
    result = CliRunner().invoke(main, ["exec", *(word.format(folder=tmp_path) for word in words)])
    assert result.exit_code == 2
    assert said in result.output
