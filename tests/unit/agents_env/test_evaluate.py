"""`agents-env eval` and `tasks`: a fixed set, its mean with an error, its table, its JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from agents_env.cli import main
from tests.unit.agents_env.scripted_server import Refusal, perfect, serving
from tests.unit.agents_env.test_cli import start

pytestmark = pytest.mark.slow  # each starts the command itself


async def test_a_fixed_set_is_scored_with_its_error_and_by_task(tmp_path: Path) -> None:
    def script(conversation: list[dict[str, str]]) -> str:
        return "no" if "Multiply" in conversation[-1]["content"] else perfect(conversation)

    found = []
    for name in ("a", "b"):
        async with serving(script) as server:
            options = ["--gateway", server.url, "--tasks", "12", "--samples", "2", "--version", "7"]
            process = await start("eval", "tool-chain", *options, "--json", str(tmp_path / name))
            output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert {body["split"] for body in server.sessions.values()} == {"eval"}
        assert {body["version"] for body in server.sessions.values()} == {7}
        found.append(json.loads((tmp_path / name).read_text()))
    one, two = found
    assert one == two  # the same tasks, scored alike
    means = [sum(task["rewards"]) / 2 for task in one["tasks"]]
    mean = sum(means) / 12
    error = math.sqrt(sum((m - mean) ** 2 for m in means) / 11 / 12)
    assert 0 < mean < 1
    assert (one["reward_mean"], one["reward_error"]) == (pytest.approx(mean), pytest.approx(error))
    assert f"mean reward {mean:.4f} +- {error:.4f} (standard error over 12 tasks of 2 samples), 0 failed" in (
        output.decode()
    )
    assert all(task["task_id"][:8] in output.decode() for task in one["tasks"])


async def test_without_a_reward_it_fails_and_names_the_last_failure() -> None:
    async with serving(perfect) as server:
        server.refuse["open"].extend([Refusal(500)] * 99)
        process = await start("eval", "tool-chain", "--gateway", server.url, "--tasks", "2", "--attempts", "1")
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert "no rollout came to a reward; the last failure: session (http 500)" in errors.decode()


def test_tasks_prints_rows_of_a_pool() -> None:
    result = CliRunner().invoke(main, ["tasks", "tool-chain", "--count", "5", "--seed", "2"])
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert len({row["id"] for row in rows}) == 5
    assert all(row["steps"] for row in rows)
    result = CliRunner().invoke(main, ["tasks", "reasoning", "--count", "2", "--dataset", "chain_sum"])
    assert all({"id", "question", "answer", "metadata"} <= set(json.loads(r)) for r in result.output.splitlines())
