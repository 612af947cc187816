"""`gateway export` and `gateway import` as docs/tables.md shows them: real rollouts, from one gateway to another."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

from protos.trajectories import Trajectory
from tests.support import processes
from tests.support.client_gateways import over_embedded
from tests.support.pages import blocks, lines
from tests.support.tiny_model import tiny_model
from trainer_client import ExperienceReader

pytestmark = pytest.mark.slow


def rollout(url: str, name: str, *prompts: str, reward: float, branch: str = "") -> None:
    """A session with a turn for each prompt; `branch` is asked in place of the second."""
    session = {
        "session_id": name,
        "group_id": "group",
        "group_size": 3,
        "tags": {"environment": "chat", "color": "größe"},
    }
    opened = httpx.post(f"{url}/sessions", json=session).raise_for_status().json()

    def ask(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body = {"model": "policy", "messages": messages, "max_tokens": 9, **more}
        headers = {"Authorization": f"Bearer {opened['api_key']}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        found: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
        return {"role": "assistant", "content": found["content"]}

    messages: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        if branch and number == 1:
            ask([*messages, {"role": "user", "content": branch}])
        messages.append({"role": "user", "content": prompt})
        messages.append(ask(messages, temperature=1.3, seed=number, logit_bias={"7": -3.5}))
    finish = {"reward": reward, "metrics": {"steps": 0.1}}
    httpx.post(f"{url}/sessions/{name}/finish", json=finish, timeout=60).raise_for_status()


def waiting(url: str) -> list[Trajectory]:
    with ExperienceReader(url) as reader:
        batch = reader.sample(groups=1, group_size=3, wait_s=60, staleness_max=1000)
        reader.give_back(batch)
        return list(batch.trajectories)


def run(command: str, directory: Path) -> str:
    words = shlex.split(command.replace("/data/", f"{directory}/"))
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=directory, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rollouts_of_one_gateway_are_read_from_another_to_the_bit(tmp_path: Path) -> None:
    export, import_ = lines(blocks("docs/tables.md", "sh")[0])
    with over_embedded(tmp_path) as gateway:
        rollout(gateway.url, "one", "hello", "why?", reward=1 / 3)
        rollout(gateway.url, "two", "hello", "why?", "and?", reward=-2.0, branch="what else?")
        rollout(gateway.url, "three", "größe: 七", reward=0.0)
        (tmp_path / "gateway").symlink_to(tmp_path / "data")
        assert "3 sessions, 4 trajectories" in run(export, tmp_path)
        recorded = waiting(gateway.url)
    assert len(recorded) == 4
    table = pq.read_table(tmp_path / "rollouts.parquet")
    assert table["token_ids"].to_pylist() == [one.token_ids for one in recorded]
    for one, logprobs in zip(recorded, table["logprobs"], strict=True):
        assert np.array(one.logprobs).tobytes() == np.array(logprobs.as_py()).tobytes(), "float32 holds them exactly"
    assert "3 sessions added, 0 were there already" in run(import_, tmp_path)
    assert "0 sessions added, 3 were there already" in run(import_, tmp_path)
    command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={tiny_model()}"]
    daemon = processes.start("replay", [*command, f"--data={tmp_path / 'replay'}"], tmp_path)
    assert waiting(daemon.ready["url"]) == recorded
    assert daemon.stop() == 0, daemon.log()
