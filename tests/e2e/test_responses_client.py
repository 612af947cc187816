"""The Responses API of a running gateway, driven by the official `openai` client; the gateway is killed in between."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.tokens import Codec
from tests.support import processes
from tests.support.fleet import until
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine, in_thread
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.slow

EOS = 2
QUESTION = "What is the sum of 12 and 30?"
CALL = '{"name": "calculator", "arguments": {"expression": "12 + 30"}}'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
]
IDS = {"return_token_ids": True}


def tool_user(prompt: str) -> str:
    """Asks the calculator, then reads its answer out; without tools it says what it was told last."""
    _, answered, result = prompt.rpartition("<tool_response>\n")
    if answered:
        return f"It is {result.split()[0]}."
    if "calculator" in prompt:
        return f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"
    return f"You said {prompt.rpartition('user')[2].split('<')[0].split()[0]}."


class World:
    """An engine that says what `tool_user` says, and a gateway that can be killed."""

    def __init__(self, directory: Path, engine_url: str) -> None:
        self._directory, self._engine_url = directory, engine_url
        self.codec = Codec.load(tiny_model())
        self.daemon = self._start()

    def _start(self) -> Daemon:
        command = ["gateway", "serve", "--port", "0", "--model", "policy", "--tokenizer", str(tiny_model())]
        command += ["--data", str(self._directory / "data"), "--engine", f"e0=vllm={self._engine_url}"]
        daemon = processes.start("gateway", command, self._directory)
        url = daemon.ready["url"]
        serving = lambda: httpx.get(f"{url}/status", timeout=60).json()["engines"][0]["state"] == "serving"  # noqa: E731
        until(serving, "a serving engine")
        return daemon

    def kill_and_start(self) -> None:
        self.daemon.kill()
        self.daemon = self._start()

    def client(self, path: str = "/v1") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.daemon.ready["url"] + path, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    codec = Codec.load(tiny_model())

    def says(prompt: Sequence[int]) -> list[int]:
        return [*codec.encode(tool_user(codec.decode(prompt))), EOS]

    with in_thread(ScriptedEngine(generate=says, chunk=3, burst=True)) as url:
        found = World(tmp_path_factory.mktemp("responses"), url)
        yield found
        assert found.daemon.stop() == 0, found.daemon.log()


def test_whole_and_streamed_say_the_same(world: World) -> None:
    asked: dict[str, Any] = {"model": "policy", "input": "alpha", "instructions": "Repeat."}
    with world.client() as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            streamed = stream.get_final_response()
    assert text == whole.output_text == streamed.output_text == "You said alpha."
    assert (streamed.usage, streamed.status) == (whole.usage, "completed")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_by_the_previous_response(world: World, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "policy", "tools": TOOLS, "instructions": "Compute."}
    with world.client() as client:
        if stream:
            with client.responses.stream(input=QUESTION, **asked) as events:
                first: Any = events.get_final_response()
        else:
            first = client.responses.create(input=QUESTION, **asked)
        message, call = first.output
        assert message.content[0].text == "Let me see."
        assert json.loads(call.arguments) == {"expression": "12 + 30"}
        output: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        raw = client.responses.with_raw_response.create(input=output, previous_response_id=first.id, **asked)
    assert raw.headers["X-Laminar-History"] == "extended"
    assert raw.parse().output_text == "It is 42."


def test_a_previous_response_outlives_the_gateway(world: World) -> None:
    """kill -9 after the answer: the next turn extends the same ids, and the session is one trajectory."""
    with world.client("/sessions/killed/v1") as client:
        first: Any = client.responses.create(model="policy", input="alpha", extra_body=IDS)
    with world.client() as client:
        unnamed: Any = client.responses.create(model="policy", input="beta", extra_body=IDS)
    world.kill_and_start()
    with world.client() as client:
        for previous in (first, unnamed):
            raw = client.responses.with_raw_response.create(
                model="policy", input="gamma", previous_response_id=previous.id, extra_body=IDS
            )
            assert raw.headers["X-Laminar-History"] == "extended"
            again: Any = raw.parse()
            record = previous.prompt_token_ids + previous.token_ids
            assert again.prompt_token_ids[: len(record)] == record
    ended = httpx.post(f"{world.daemon.ready['url']}/sessions/killed/finish", json={"reward": 1.0}, timeout=60)
    assert ended.status_code == 200, ended.text
    assert (ended.json()["turns"], ended.json()["leaves"], ended.json()["stored"]) == (2, 1, True)


def test_a_repeated_call_gets_the_same_response(world: World) -> None:
    """Without a session, too: both are the first call of one that others may continue."""
    key = {"Idempotency-Key": "alpha-1"}
    with world.client() as client:
        first = client.responses.create(model="policy", input="alpha", extra_headers=key)
        raw = client.responses.with_raw_response.create(model="policy", input="alpha", extra_headers=key)
        more = client.responses.create(model="policy", input="delta", previous_response_id=first.id)
    assert raw.headers["X-Laminar-Joined"] == "true"
    assert raw.parse().id == first.id
    assert more.output_text == "You said delta."


def test_errors_are_the_clients_own(world: World) -> None:
    with world.client() as client:
        with pytest.raises(openai.NotFoundError, match="served: 'policy'"):
            client.responses.create(model="gpt-5", input="hello")
        with pytest.raises(openai.BadRequestError) as lost:
            client.responses.create(model="policy", input="hello", previous_response_id="resp_nobody")
        assert lost.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError, match="web_search"):
            client.responses.create(model="policy", input="hello", tools=[{"type": "web_search"}])
        with pytest.raises(openai.BadRequestError) as large:
            client.responses.create(model="policy", input="word " * 3000)
        assert (large.value.code, large.value.param) == ("context_length_exceeded", "input")
