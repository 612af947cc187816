"""An environment of the verifiers library, run by its own `vf-eval` with a gateway as its model, by text and by ids."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from gateway.app import Gateway, start
from tests.support.scripted_engine import ScriptedEngine, until
from tests.support.tiny_model import EOS_ID, tiny_model
from tests.unit.gateway_api.test_status import config
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post

pytestmark = pytest.mark.verifiers

HERE = Path(__file__).parent
NULL_HARNESS = ("--env.agent.runtime.type", "subprocess", "--env.agent.harness.id", "null")
CLIENTS = {
    "eval": (),
    "train": ("--client.renderer.name", "default", "--client.renderer.tool-parser", "qwen3"),
}


class Policy:
    """Looks a capital up by the tool, then says it; of `wrong` countries another city."""

    def __init__(self, model: Path, wrong: str = "") -> None:
        self._tokenizer, self._wrong = Tokenizer.from_file(str(model / "tokenizer.json")), wrong

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        country = re.findall(r'capital of "(\w+)"', text)[-1]
        found = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
        call = f'<tool_call>\n{{"name": "atlas_capital", "arguments": {{"country": "{country}"}}}}\n</tool_call>'
        answer = f"It is {'Nowhere' if country == self._wrong else found[-1]}." if found else call
        return [*self._tokenizer.encode(answer, add_special_tokens=False).ids, EOS_ID]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[Gateway, ScriptedEngine, Path]]:
    model = tiny_model()
    engine = ScriptedEngine("e0", generate=Policy(model, wrong="Ruritania"), vocab_size=512)
    async with engine:
        found = await start(dataclasses.replace(config(tmp_path, engine), tokenizer=model))
        await until(lambda: [e.status for e in found.fleet.state.engines.values()] == ["serving"], "the engine")
        yield found, engine, model
        await found.close(1.0)


async def agents_env(gateway: Gateway, commands: Path, out: Path, *options: str) -> asyncio.subprocess.Process:
    path = f"{commands}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{Path.cwd()}:{HERE / 'environments'}"}
    command = ("verifiers", "capitals", "--gateway", gateway.url, "--out", str(out), *options)
    return await asyncio.create_subprocess_exec(
        str(Path.cwd() / ".venv" / "bin" / "agents-env"),
        *command,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.parametrize("client", CLIENTS)
async def test_rollouts_become_trajectories_with_the_rewards_of_their_traces(
    fleet: tuple[Gateway, ScriptedEngine, Path], commands: Path, tmp_path: Path, client: str
) -> None:
    gateway, engine, model = fleet
    train = () if client == "eval" else ("--client", "train", "--tokenizer", str(model))
    options = (*train, "--tasks", "3", "--rollouts", "2", "--", *NULL_HARNESS, *CLIENTS[client])
    process = await agents_env(gateway, commands, tmp_path / "out", *options)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert "6 sessions finished (mean reward 0.333), 0 abandoned" in output.decode()
    async with aiohttp.ClientSession(gateway.url) as http:
        found = (await post(http, "/experience/sample", {**SAMPLE, "trajectories": 6}))["trajectories"]
    assert sorted(t["reward"] for t in found) == [0.0, 0.0, 0.5, 0.5, 0.5, 0.5]
    for trajectory in found:
        check_trajectory(trajectory)
    assert len(engine.requests) == 12, "two turns of each rollout, and no other"


def check_trajectory(trajectory: dict[str, Any]) -> None:
    """Two turns of one session, token by token: the second continues the record of the first."""
    assert (trajectory["turns"], trajectory["status"]) == (2, "completed")
    sampled = [i for i, mine in enumerate(trajectory["loss_mask"]) if mine]
    assert sum(segment["end"] - segment["start"] for segment in trajectory["segments"]) == len(sampled)
    assert all(trajectory["versions"][i] == 0 for i in sampled)
    assert trajectory["token_ids"].count(EOS_ID) >= 2


async def test_an_interrupted_run_leaves_no_program_behind(
    fleet: tuple[Gateway, ScriptedEngine, Path], commands: Path, tmp_path: Path
) -> None:
    gateway, engine, _ = fleet
    engine.hold_at = 0
    process = await agents_env(gateway, commands, tmp_path / "out", "--", *NULL_HARNESS)
    await until(lambda: engine.requests, "the first model call", timeout_s=240.0)
    process.send_signal(signal.SIGTERM)
    output, _ = await process.communicate()  # the pipe ends with the last program that has it
    assert process.returncode == 130, output.decode()
    engine.go.set()


async def test_a_program_that_is_not_there_is_named(
    fleet: tuple[Gateway, ScriptedEngine, Path], commands: Path, tmp_path: Path
) -> None:
    process = await agents_env(fleet[0], commands, tmp_path / "out", "--vf-eval", str(tmp_path / "vf-eval"))
    output, _ = await process.communicate()
    assert process.returncode == 1
    assert "install verifiers 0.4 in an environment of its own, and pass --vf-eval PATH" in output.decode()
