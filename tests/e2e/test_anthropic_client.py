"""`/v1/messages` as its users meet it: a real gateway, driven by the official `anthropic` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.client_gateways import ServedGateway, over_embedded, over_script
from tests.support.fleet import until
from tests.support.middleman import Middleman

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "What is the sum of 12 and 30?"}]
OWN = {"return_token_ids": True}
GREEDY = {"temperature": 0}  # the client itself has no such parameter any more
CALCULATOR: Any = {
    "name": "calculator",
    "description": "Computes.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    with over_embedded(tmp_path_factory.mktemp("messages"), "--disconnect-grace-s=120") as found:
        yield found


def tool_user(prompt: str) -> str:
    """Asks the calculator, then reads its answer out."""
    _, answered, result = prompt.rpartition("<tool_response>\n")
    if answered:
        return f"It is {result.split()[0]}."
    return 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 30"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    with over_script(tmp_path_factory.mktemp("messages-tools"), tool_user) as found:
        yield found


def client_of(gateway: ServedGateway, session: str = "", **options: Any) -> anthropic.Anthropic:
    """`session`: its name, for the URL."""
    path = f"/s/{session}" if session else ""
    return anthropic.Anthropic(base_url=gateway.url + path, api_key="unused", max_retries=0, **options)


def test_whole_and_streamed_say_the_same(gateway: ServedGateway) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 8, "extra_body": GREEDY}
    with client_of(gateway) as client:
        counted = client.messages.count_tokens(model="policy", messages=HELLO, system="Be brief.")
        whole = client.messages.create(**asked, system="Be brief.")
        with client.messages.stream(**asked, system=[{"type": "text", "text": "Be brief."}]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    [block] = whole.content
    assert block.type == "text"
    assert block.text
    assert [block.text for block in streamed.content if block.type == "text"] == [block.text]
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 8)
    assert whole.usage.input_tokens == counted.input_tokens
    assert whole._request_id is not None
    assert whole._request_id.startswith("req_")
    raw = [kind for kind in kinds if kind != "text"]  # made by the client
    deltas = raw.count("content_block_delta")
    assert raw == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert deltas > 1


def test_a_session_over_turns_is_one_record(gateway: ServedGateway) -> None:
    made = httpx.post(f"{gateway.url}/sessions", json={"group_id": "g"}).json()
    messages, ids, sampled = list(HELLO), [], 0
    with anthropic.Anthropic(base_url=gateway.url, api_key=made["api_key"], max_retries=0) as client:
        for turn in range(3):
            counted = client.messages.count_tokens(model="policy", messages=messages)
            raw = client.messages.with_raw_response.create(
                model="policy", messages=messages, max_tokens=6, extra_body=OWN
            )
            answer: Any = raw.parse()
            assert raw.headers["X-Session-ID"] == made["session_id"]
            assert raw.headers["X-Laminar-Session-From"] == "api_key"
            assert raw.headers["X-Laminar-History"] != "branch", raw.headers["X-Laminar-History-Reason"]
            assert answer.prompt_token_ids[: len(ids)] == ids, f"turn {turn} does not extend the record"
            assert counted.input_tokens == answer.usage.input_tokens == len(answer.prompt_token_ids)
            ids = answer.prompt_token_ids + answer.token_ids
            sampled += len(answer.token_ids)
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": f"And {turn}?"}]
    finished = httpx.post(f"{gateway.url}/sessions/{made['session_id']}/finish", json={"reward": 0.5}).json()
    assert (finished["leaves"], finished["turns"]) == (1, 3)
    sample = {"reader": "test", "trainer_version": 0, "trajectories": 1, "wait_s": 10}
    [trajectory] = httpx.post(f"{gateway.url}/experience/sample", json=sample, timeout=60).json()["trajectories"]
    assert trajectory["token_ids"] == ids
    assert sum(trajectory["loss_mask"]) == sampled


def test_a_session_goes_on_through_another_api(gateway: ServedGateway) -> None:
    """Both have one record: what was said through one is history of the other."""
    with client_of(gateway, "both") as client:
        first = client.messages.create(model="policy", messages=HELLO, max_tokens=6)
    [block] = first.content
    assert block.type == "text"
    more = [*HELLO, {"role": "assistant", "content": block.text}, {"role": "user", "content": "And?"}]
    body = {"model": "policy", "messages": more, "max_tokens": 4}
    answer = httpx.post(f"{gateway.url}/s/both/v1/chat/completions", json=body, timeout=60).raise_for_status()
    assert answer.headers["X-Laminar-History"] in ("extended", "closed")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(gateway: ServedGateway, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 32, "extra_body": GREEDY}
    with client_of(gateway) as client:
        [said] = client.messages.create(**asked).content
        assert said.type == "text"
        stop = said.text[len(said.text) // 2 : len(said.text) // 2 + 3]
        if stream:
            with client.messages.stream(**asked, stop_sequences=[stop]) as events:
                answer: Any = events.get_final_message()
        else:
            answer = client.messages.create(**asked, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == said.text[: said.text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(tool_gateway: ServedGateway, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "policy", "tools": [CALCULATOR], "max_tokens": 100}
    messages = list(HELLO)
    with client_of(tool_gateway, f"tools-{stream}") as client:
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                inputs = [event.partial_json for event in events if event.type == "input_json"]
                called = events.get_final_message()
            assert json.loads("".join(inputs)) == {"expression": "12 + 30"}
        else:
            called = client.messages.create(messages=messages, **asked)  # type: ignore[assignment]
        assert called.stop_reason == "tool_use"
        text, call = called.content
        assert text.type == "text"
        assert call.type == "tool_use"
        assert text.text == "Let me see."
        assert (call.name, call.input) == ("calculator", {"expression": "12 + 30"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        raw = client.messages.with_raw_response.create(messages=messages, **asked)
    assert raw.headers["X-Laminar-History"] == "extended"
    answer = raw.parse()
    assert [block.text for block in answer.content if block.type == "text"] == ["It is 42."]
    assert answer.stop_reason == "end_turn"


def test_the_clients_own_tool_runner(tool_gateway: ServedGateway) -> None:
    """A coding agent's loop: the client runs the tools, and asks until none is called."""

    @anthropic.beta_tool
    def calculator(expression: str) -> str:
        """Computes.

        Args:
            expression: a sum
        """
        return str(sum(map(int, expression.split("+"))))

    with client_of(tool_gateway, "runner") as client:
        runner = client.beta.messages.tool_runner(
            model="policy", max_tokens=100, messages=HELLO, tools=[calculator], max_iterations=5
        )
        *_, last = list(runner)
    assert [block.text for block in last.content if block.type == "text"] == ["It is 42."]
    finished = httpx.post(f"{tool_gateway.url}/sessions/runner/finish", json={"reward": 1.0}).raise_for_status().json()
    assert (finished["turns"], finished["leaves"]) == (2, 1)


def test_errors_are_the_clients_own(gateway: ServedGateway) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 8}
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with client_of(gateway) as client:
        with pytest.raises(anthropic.NotFoundError, match="served: 'policy'") as caught:
            client.messages.create(**{**asked, "model": "claude"})
        assert caught.value.type == "not_found_error"
        assert caught.value.request_id is not None
        with pytest.raises(anthropic.BadRequestError, match="unknown field `temprature`"):
            client.messages.create(**asked, extra_body={"temprature": 1})
        with pytest.raises(anthropic.BadRequestError, match="'image' is not supported"):
            client.messages.create(**{**asked, "messages": [{"role": "user", "content": [image]}]})
        with pytest.raises(anthropic.BadRequestError, match="2048 tokens"):
            client.messages.create(**{**asked, "messages": [{"role": "user", "content": "a b " * 3000}]})
        with pytest.raises(anthropic.NotFoundError, match=r"does not end in /v1"):
            client.with_options(base_url=f"{gateway.url}/v1").messages.create(**asked)
        with pytest.raises(anthropic.NotFoundError, match="no live session has this API key"):
            client.with_options(api_key="sk-session-gone").messages.create(**asked)


def test_a_client_that_comes_back_reads_the_same_answer(gateway: ServedGateway) -> None:
    """It leaves in the middle of its stream, and sends the request again: the turn is not sampled twice."""
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 400}
    orphaned, joined = gateway.counter("turns_orphaned"), gateway.counter("turns_joined")
    gateway.hold.touch()
    with client_of(gateway, "returns") as client:
        stream = client.messages.create(**asked, stream=True)
        first = next(iter(stream))
        assert first.type == "message_start"
        stream.close()
        until(lambda: gateway.counter("turns_orphaned") == orphaned + 1, "a turn whose client left")
        gateway.hold.unlink()
        with client.messages.stream(**asked) as again:
            answer = again.get_final_message()
            assert again.response.headers["X-Laminar-Joined"] == "true"
    assert answer.id == first.message.id
    assert gateway.counter("turns_joined") == joined + 1
    session = httpx.get(f"{gateway.url}/sessions/returns").raise_for_status().json()
    assert session["turns"] == 1, session


def test_the_clients_own_retry_gets_the_turn_that_was_sampled(gateway: ServedGateway) -> None:
    """Its connection is cut when the answer is there, and on its way: the client sends the request again by itself."""
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "max_tokens": 8}
    started, completed, joined = (gateway.counter(f"turns_{what}") for what in ("started", "completed", "joined"))
    with (
        Middleman(gateway.url.removeprefix("http://")) as between,
        anthropic.Anthropic(base_url=f"http://{between.address}/s/cut", api_key="unused", max_retries=10) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        between.hold("answers")
        answer = thread.submit(client.messages.create, **asked)
        until(lambda: gateway.counter("turns_completed") > completed, "the end of the turn")
        between.cut()
        between.mend()
        assert answer.result(timeout=120).role == "assistant"
    assert gateway.counter("turns_started") == started + 1
    assert gateway.counter("turns_joined") == joined + 1
