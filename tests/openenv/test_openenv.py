"""Environments of OpenEnv behind their own servers, played through a gateway: text, tools, and actions of fields."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tokenizers import Tokenizer

from agents_env.environment import Message, Reply, ToolCall
from agents_env.failures import RolloutFailed, RunFailed
from agents_env.openenv.environment import OpenEnv, Reset
from agents_env.openenv.serving import served
from gateway.app import Gateway, start
from tests.openenv.conftest import serve
from tests.support.scripted_engine import ScriptedEngine, until
from tests.support.tiny_model import EOS_ID, tiny_model
from tests.unit.agents_env.scripted_chat import ScriptedChat
from tests.unit.gateway_api.test_status import config
from tests.unit.gateway_sessions.test_rewards import SAMPLE, post

pytestmark = pytest.mark.openenv

ONE = ("--concurrency", "1")


class Policy:
    """Writes what `script` makes of the prompt's text."""

    def __init__(self, model: Path, script: Callable[[str], str]) -> None:
        self._tokenizer, self._script = Tokenizer.from_file(str(model / "tokenizer.json")), script

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        text = self._script(self._tokenizer.decode(list(prompt), skip_special_tokens=False))
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID]


@contextlib.asynccontextmanager
async def fleet(directory: Path, script: Callable[[str], str]) -> AsyncIterator[tuple[Gateway, ScriptedEngine]]:
    model = tiny_model()
    async with ScriptedEngine("e0", generate=Policy(model, script), vocab_size=512) as engine:
        found = await start(dataclasses.replace(config(directory, engine), tokenizer=model))
        await until(lambda: [e.status for e in found.fleet.state.engines.values()] == ["serving"], "the engine")
        try:
            yield found, engine
        finally:
            await found.close(1.0)


async def agents_env(gateway: Gateway, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents_env", "run", "openenv", "--gateway", gateway.url, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def played(gateway: Gateway, *options: str) -> str:
    """The output of a run that has to end well."""
    process = await agents_env(gateway, *options)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def trajectories(gateway: Gateway, number: int) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession(gateway.url) as http:
        found = await post(http, "/experience/sample", {**SAMPLE, "trajectories": number})
    return list(found["trajectories"])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def geographer(prompt: str) -> str:
    """Looks the capital up, then gives it as the answer; of Ruritania another one."""
    country = re.findall(r"the capital of (\w+)\?", prompt)[-1]
    found = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    if not found:
        return call("capital", f'{{"country": "{country}"}}')
    return call("answer", f'{{"city": "{"Nowhere" if country == "Ruritania" else found[-1]}"}}')


async def test_tools_of_an_environment_are_the_models_and_its_reward_is_recorded(tmp_path: Path, server: str) -> None:
    async with fleet(tmp_path, geographer) as (gateway, engine):
        options = ("--server", f"{server}/atlas", "--groups", "8", "--group-size", "2")
        assert "16 rollouts, 8 whole groups" in await played(gateway, *options)
        found = await trajectories(gateway, 16)
    assert {(t["turns"], t["status"]) for t in found} == {(2, "completed")}
    seeds = [int(t["tags"]["task_id"].removeprefix("seed-")) for t in found]
    assert [t["reward"] for t in found] == [float(seed % 4 != 0) for seed in seeds], "the first country is Ruritania"
    assert {seeds.count(seed) for seed in seeds} == {2}
    assert len(engine.requests) == 32, "two turns of each rollout, and no other"


async def test_openenvs_own_echo_environment_is_started_for_a_run_and_ended_with_it(
    tmp_path: Path, commands: Path, parrot: Path
) -> None:
    """It has room for one episode, so the other rollouts wait for it. 0.1 for each character, at most 1."""
    command = serve(commands, parrot, "server.app:app")
    async with fleet(tmp_path, lambda _: "seven ch") as (gateway, _):
        options = ("--serve", command, "--groups", "2", "--group-size", "2", "--turns-max", "2")
        output = await played(gateway, *options, "--observe", "echoed_message")
        found = await trajectories(gateway, 4)
    assert "is full and waited for" in output
    assert [t["reward"] for t in found] == [pytest.approx(1.6)] * 4
    assert {(t["turns"], t["status"]) for t in found} == {(2, "truncated")}, "it never ends by itself"
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(parrot) in " ".join(p.info["cmdline"] or ())]


async def test_sigterm_ends_the_server_with_the_run(tmp_path: Path, commands: Path, parrot: Path) -> None:
    async with fleet(tmp_path, lambda _: "hello") as (gateway, engine):
        engine.hold_at = 0
        process = await agents_env(gateway, "--serve", serve(commands, parrot, "server.app:app"), *ONE)
        await until(lambda: engine.requests, "the first model call", timeout_s=240.0)
        process.send_signal(signal.SIGTERM)
        output, _ = await process.communicate()  # the pipe ends with the last process that has it
        assert process.returncode == 0, output.decode()
        assert "1 abandoned" in output.decode()
        engine.go.set()


async def test_the_server_does_not_outlive_a_killed_run(tmp_path: Path, commands: Path, parrot: Path) -> None:
    async with fleet(tmp_path, lambda _: "hello") as (gateway, engine):
        engine.hold_at = 0
        process = await agents_env(gateway, "--serve", serve(commands, parrot, "server.app:app"), *ONE)
        await until(lambda: engine.requests, "the first model call", timeout_s=240.0)
        process.kill()
        await process.communicate()  # as above: the server has the pipe as well
        engine.go.set()


def in_turn(*replies: Reply | str) -> ScriptedChat:
    left = list(replies)
    return ScriptedChat(lambda _: left.pop(0))


def acts(*arguments: str) -> Reply:
    return Reply("", tool_calls=tuple(ToolCall(f"c{n}", "act", text) for n, text in enumerate(arguments)))


async def test_actions_of_several_fields_are_calls_of_one_tool(server: str) -> None:
    chat = in_turn(acts('{"letter": "A", "number": 7}'), acts('{"letter": "B", "number": 7}'))
    outcome = await OpenEnv(f"{server}/vault").rollout(Reset("x", {}), chat)
    assert (outcome.reward, outcome.status) == (1.5, "completed")
    assert outcome.metrics == {"steps": 2, "bad_actions": 0, "rewards": 2, "done": 1.0}
    (tool,) = chat.tools[0]
    assert (tool.name, tool.parameters["required"]) == ("act", ["letter", "number"])
    assert "metadata" not in tool.parameters["properties"]
    assert said(chat.conversations[-1]) == [
        '{"told": "The number is 7; find the letter.", "tries": 0}',
        '{"told": "1 right", "tries": 1}',
    ]
    last = await OpenEnv(f"{server}/vault", reward="last").rollout(
        Reset("x", {}), in_turn(acts('{"letter": "A", "number": 7}', '{"letter": "B", "number": 7}'))
    )
    assert last.reward == 1.0


def said(conversation: Sequence[Message]) -> list[str]:
    """What the model read."""
    return [message["content"] for message in conversation if message["role"] in ("user", "tool")]


async def test_a_bad_action_is_answered_and_costs_no_step(server: str) -> None:
    bad = acts('{"letter": "Z", "number": 7}', "[]", "{", '{"letter": "B"}', '{"letter": "B", "number": 7}', "{}")
    chat = in_turn(bad)
    environment = OpenEnv(f"{server}/vault")
    outcome = await environment.rollout(Reset("x", {}), chat)
    assert (outcome.reward, outcome.metrics["steps"], outcome.metrics["bad_actions"]) == (1.0, 1, 4)
    chat = in_turn(acts('{"letter": "Z"}'), "I give up")
    outcome = await environment.rollout(Reset("x", {}), chat)
    assert (outcome.reward, outcome.status) == (0.0, "completed")
    assert "letter: Input should be 'A', 'B' or 'C'; number: Field required" in said(chat.conversations[-1])[-1]


async def test_an_environment_that_fails_is_no_reward(server: str) -> None:
    with pytest.raises(RolloutFailed, match=r"environment \(EXECUTION_ERROR\): step: the vault is on fire"):
        await OpenEnv(f"{server}/vault").rollout(Reset("x", {}), in_turn(acts('{"letter": "B", "number": 0}')))
    with pytest.raises(RolloutFailed, match="does not answer as OpenEnv's servers do"):
        await OpenEnv(f"{server}/nowhere").rollout(Reset("x", {}), in_turn())
    with pytest.raises(RolloutFailed, match="does not answer as OpenEnv's servers do"):
        await OpenEnv("http://127.0.0.1:9").rollout(Reset("x", {}), in_turn())


async def test_a_server_that_dies_in_an_episode_is_the_environments_failure(commands: Path, parrot: Path) -> None:
    with served(serve(commands, parrot, "server.app:app")) as url:
        port = int(url.rpartition(":")[2])

        def die(_: list[Message]) -> str:
            (process,) = [p for p in psutil.Process().children() if f"--port {port}" in " ".join(p.cmdline())]
            process.kill()
            process.wait()
            return "hello"

        with pytest.raises(RolloutFailed, match="environment"):
            await OpenEnv(url).rollout(Reset("x", {}), ScriptedChat(die))


def test_a_server_that_does_not_start_is_named() -> None:
    with pytest.raises(RunFailed, match="--serve has no"), served("true"):
        pass
    with pytest.raises(RunFailed, match="ended with status 3 before it answered"), served("sh -c 'exit 3' {port}"):
        pass
    with pytest.raises(RunFailed, match="no-such-program: No such file"), served("no-such-program {port}"):
        pass


async def test_one_of_server_and_serve_is_wanted() -> None:
    for options in ((), ("--server", "http://x", "--serve", "x {port}")):
        command = (sys.executable, "-m", "agents_env", "run", "openenv", "--gateway", "http://x", *options)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert "name the environment's server by --server URL, or let --serve COMMAND start one" in errors.decode()
