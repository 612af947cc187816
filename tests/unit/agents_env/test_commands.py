"""`agents-env run code` and `run math` as processes, against a server with scripted answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agents_env.cli import main
from tests.unit.agents_env.scripted_server import Conversation, serving

pytestmark = pytest.mark.slow  # each starts the command itself

DOCS = Path(__file__).parents[3] / "docs" / "environments.md"
TASKS = dict(zip(("math", "code"), re.findall(r"^```json\n(.*?)^```", DOCS.read_text(), re.M | re.S), strict=True))
"""The documented examples of lines of a task file."""


def answer(conversation: Conversation) -> str:
    is_math = "boxed" in conversation[0]["content"]
    return "\\boxed{0.5}" if is_math else "```python\ndef add(a, b): return a + b\n```"


@pytest.mark.parametrize("name", TASKS)
async def test_rolls_out_tasks_of_a_file_and_scores_them(name: str, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    tasks.write_text(TASKS[name])
    async with serving(answer) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agents_env", "run", name, "--gateway", server.url, "--task-file", str(tasks)),
            *("--groups", "2", "--group-size", "2", "--out", str(out)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["task_id"], line["reward"]) for line in lines] == [(json.loads(TASKS[name])["id"], 1.0)] * 4
    assert {end["reward"] for end in server.finished.values()} == {1.0}


async def test_an_environment_of_ones_own_as_documented(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    (tmp_path / "echo.py").write_text(program)
    async with serving(lambda conversation: conversation[-1]["content"]) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agents_env", "run", "module", "echo:Echo", "--set", "most=8"),
            *("--gateway", server.url, "--groups", "2", "--group-size", "2"),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert {chat["max_tokens"] for chat in server.chats} == {8}
    assert {end["reward"] for end in server.finished.values()} == {1.0}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere:Echo", "No module named 'nowhere'"),
        ("json:Nothing", "has no attribute 'Nothing'"),
        ("json:JSONDecoder", "it has no name, tasks, rollout"),
        ("json", "it is MODULE:CLASS"),
    ],
)
def test_what_is_no_environment_is_named(where: str, said: str) -> None:
    result = CliRunner().invoke(main, ["run", "module", where, "--gateway", "http://x"])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_setting_of_another_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    (tmp_path / "echo_of_settings.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["run", "module", "echo_of_settings:Echo", "--set", "most=abc", "--gateway", "http://x"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert '--set most="abc": Expected `int`, got `str`' in " ".join(result.output.replace("│", " ").split())


def test_a_setting_that_is_a_path_is_given_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_paths.py").write_text(
        "import os, pathlib\n"
        "class Takes:\n"
        "    def __init__(self, a: os.PathLike[str], b: 'pathlib.Path | None', c: str | os.PathLike[str], d: str):\n"
        "        raise ValueError(f'got {a!r} {b!r} {c!r} {d!r}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = [word for name in "abcd" for word in ("--set", f"{name}=x")]
    result = CliRunner().invoke(main, ["run", "module", "takes_paths:Takes", *settings, "--gateway", "http://x"])
    assert "got PosixPath('x') PosixPath('x') 'x' 'x'" in " ".join(result.output.replace("│", " ").split())


def test_a_task_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}")
    words = ["run", "math", "--gateway", "http://x", "--task-file", str(tmp_path / "tasks.jsonl")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "tasks.jsonl, line 1: the field 'answer' lacks" in result.output


def test_without_a_sandbox_no_code_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(main, ["run", "code", "--gateway", "http://x", "--sandbox", "bubblewrap"])
    assert result.exit_code == 1
    assert "no sandbox for the code that the model writes: sandbox: there is no bwrap in PATH" in result.output
