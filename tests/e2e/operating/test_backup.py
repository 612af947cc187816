"""docs/operations.md, "Backup and restore": its commands as they stand, and what is there after a restore."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_docs import blocks, lines
from tests.support import processes
from tests.support.fleet import until
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine, in_thread, scripted
from tests.support.words import tokenizer
from trainer_client import ExperienceReader

pytestmark = pytest.mark.slow

PAGE = "docs/operations.md"
PROMPT = [5, 6, 7]


@contextlib.contextmanager
def serving(root: Path, engine_url: str) -> Iterator[tuple[Daemon, httpx.Client]]:
    command = ["gateway", "serve", "--model=policy", f"--tokenizer={root / 'models' / 'policy'}", "--port=0"]
    data = f"--data={root / 'data' / 'gateway'}"
    daemon = processes.start("gateway", [*command, data, f"--engine=e0=vllm={engine_url}"], root)
    try:
        with httpx.Client(base_url=daemon.ready["url"], timeout=60.0) as http:
            until(lambda: http.get("/healthz").status_code == 200, "a serving engine")
            yield daemon, http
    finally:
        daemon.kill()


def turn(http: httpx.Client, session: str, prompt: list[int]) -> list[int]:
    body = {"model": "policy", "prompt": prompt, "max_tokens": 4, "return_token_ids": True, "logprobs": 0}
    answer = http.post(f"/s/{session}/v1/completions", json=body).raise_for_status().json()
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def finish(http: httpx.Client, session: str, reward: float) -> None:
    http.post(f"/sessions/{session}/finish", json={"reward": reward}).raise_for_status()


def waiting(http: httpx.Client) -> dict[str, tuple[float, list[int]]]:
    """Session to its reward and ids."""
    with ExperienceReader(str(http.base_url)) as reader:
        batch = reader.sample(trajectories=2, wait_s=60, staleness_max=1000)
        reader.give_back(batch)
        return {one.session_id: (one.reward, list(one.token_ids)) for one in batch.trajectories}


def run(command: str, root: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    here = re.sub(r"(?<= )/(?=data|backups|models)", f"{root}/", command)
    here = re.sub(r"^gateway", f"{sys.executable} -m gateway", here)
    return subprocess.run(here, shell=True, capture_output=True, text=True, timeout=180, check=False, **options)


def test_sessions_and_trajectories_are_there_after_a_restore(tmp_path: Path) -> None:
    backup, *restore = [line for block in blocks(PAGE, "sh") for line in lines(block)]
    (tmp_path / "models").mkdir()
    tokenizer(tmp_path / "models" / "policy")
    with in_thread(ScriptedEngine("e0")) as engine_url:
        with serving(tmp_path, engine_url) as (daemon, http):
            for session, reward in (("first", 0.25), ("second", -1.0)):
                turn(http, session, PROMPT)
                finish(http, session, reward)
            recorded = waiting(http)
            said = turn(http, "live", PROMPT)
            done = run(backup, tmp_path)
            assert done.returncode == 0, done.stderr
            assert "1 live sessions" in done.stdout
            assert done.stdout.rstrip().endswith("trainer: 2")
            turn(http, "later", PROMPT)
            finish(http, "later", 1.0)
            daemon.kill()
        for command in restore:
            done = run(command, tmp_path)
            if "doctor" not in command:
                assert done.returncode == 0, done.stderr
        assert re.search(r"^ok +earlier sessions", done.stdout, re.MULTILINE), done.stdout
        shutil.rmtree(tmp_path / "data" / "gateway.before")
        with serving(tmp_path, engine_url) as (daemon, http):
            assert waiting(http) == recorded
            assert len(recorded) == 2
            assert http.get("/sessions/live").json()["turns"] == 1
            assert http.get("/sessions/later").status_code == 404
            history = [*PROMPT, *said]
            assert turn(http, "live", history) == scripted(history, 4)[0]
            finish(http, "live", 3.0)
            with ExperienceReader(str(http.base_url)) as reader:
                batch = reader.sample(trajectories=3, wait_s=60, staleness_max=1000)
                [live] = [one for one in batch.trajectories if one.session_id == "live"]
                assert live.token_ids == [*history, *scripted(history, 4)[0]], "its earlier turn is in it"
                assert [live.reward, sum(live.loss_mask)] == [3.0, 8]
            assert daemon.stop() == 0, daemon.log()[-3000:]
