"""Tool calls: what the model is offered, what it gets back, and what counts; and their way over OpenAI's client."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest

from agents_env.environment import Message, Reply, ToolCall
from agents_env.environments.tool_calls import (
    CALCULATOR,
    TURNS_MAX,
    Expression,
    ToolCalls,
    answer_call,
    last_number,
)
from agents_env.server import Sampling, Server, SessionSpec
from tests.unit.agents_env.scripted_chat import ScriptedChat
from tests.unit.agents_env.scripted_server import Conversation, serving

TASK = Expression("(48 * 37) - 519")


def called(expression: str, name: str = "calculator") -> Reply:
    return Reply("", tool_calls=(ToolCall("c1", name, json.dumps({"expression": expression})),))


async def play(*replies: Reply | str) -> tuple[float, ScriptedChat]:
    left = list(replies)
    chat = ScriptedChat(lambda _: left.pop(0) if len(left) > 1 else left[0])
    return (await ToolCalls().rollout(TASK, chat)).reward, chat


async def test_a_call_and_the_answer_are_half_the_reward_each() -> None:
    reward, chat = await play(called("48 * 37 - 519"), "It is 1257.")
    assert reward == 1.0
    assert chat.tools == [[CALCULATOR], [CALCULATOR]]
    assert chat.conversations[1][-1] == {"role": "tool", "content": "1257", "tool_call_id": "c1"}
    assert (await play("1,257"))[0] == 0.5
    assert (await play(called("48 * 37 - 519"), "1258"))[0] == 0.5
    assert (await play(called("48 * 37"), "0"))[0] == 0.0


async def test_a_call_that_is_wrong_in_form_is_told_so_and_may_be_repeated() -> None:
    reward, chat = await play(called("2", name="search"), called("two"), called("48*37-519"), "1257")
    assert reward == 1.0
    results = [message["content"] for message in chat.conversations[-1] if message["role"] == "tool"]
    assert results == [
        "error: there is no tool 'search', only calculator",
        "error: Name is not arithmetic on whole numbers",
        "1257",
    ]


async def test_a_model_that_only_calls_is_stopped() -> None:
    reward, chat = await play(called("48*37-519"))
    assert (reward, len(chat.conversations)) == (0.5, TURNS_MAX)


@pytest.mark.parametrize("arguments", ["", "{", "[]", "1", "null", '{"expression": 7}', "{}", "[" * 100_000])
def test_arguments_of_any_kind_are_refused(arguments: str) -> None:
    value, result = answer_call(ToolCall("c", "calculator", arguments))
    assert value is None
    assert result.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 1,257.", 1257),
        ("-3", -3),
        ("first 2, then 5", 5),
        ("none", None),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: int | None) -> None:
    assert last_number(text) == (None if number is None else Fraction(number))


def test_tasks_are_the_same_for_a_seed_and_come_back_from_their_data() -> None:
    environment = ToolCalls()
    tasks = list(islice(environment.tasks(1), 200))
    assert tasks == list(islice(environment.tasks(1), 200)) != list(islice(environment.tasks(2), 200))
    assert all(environment.task_of(task.task_id, environment.data_of(task)) == task for task in tasks)
    assert all(task.value.denominator == 1 for task in tasks)
    with pytest.raises(ValueError, match="not arithmetic"):
        environment.task_of("x", {"expression": "x"})


async def test_calls_and_results_pass_openais_client_as_they_are() -> None:
    def script(conversation: Conversation) -> Any:
        if conversation[-1]["role"] == "user":
            function = {"name": "calculator", "arguments": '{"expression": "48*37-519"}'}
            return {"tool_calls": [{"id": "call-7", "type": "function", "function": function}]}
        return conversation[-1]["content"]

    async with serving(script) as server, Server(server.url, Sampling("policy")) as client:
        session = await client.open(SessionSpec("s", "g", 0, 1))
        outcome = await ToolCalls().rollout(TASK, client.chat(session))
    assert outcome.reward == 1.0
    first, second = server.chats
    assert first["tools"] == second["tools"]
    assert first["tools"][0]["function"]["name"] == "calculator"
    assistant, tool = second["messages"][-2:]
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "call-7"
    assert tool["content"] == "1257"


async def test_other_environments_send_no_tools() -> None:
    messages: list[Message] = [{"role": "user", "content": "hello"}]
    async with serving(lambda _: "hi") as server, Server(server.url, Sampling("policy")) as client:
        session = await client.open(SessionSpec("s", "g", 0, 1))
        assert (await client.chat(session).reply(messages, max_tokens=5)).text == "hi"
    assert "tools" not in server.chats[0]
