"""Results of parallel calls: rendered in the order of the calls, over each API."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from gateway.api.errors import BadField
from gateway.api.openai.requests import in_order_of_calls
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving
from tests.unit.gateway_api.test_openai_bad_input import USER

IDS = ["call_a", "call_b", "call_c"]


def called(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call_id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str | None, text: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text or f"of {call_id}"}


@pytest.mark.parametrize(
    ("messages", "order"),
    [
        ([USER, called(*IDS), result("call_c"), result("call_a"), result("call_b")], [0, 1, 3, 4, 2]),
        ([USER, called("call_a", "call_b"), result("call_b"), USER, result("call_a"), USER], [0, 1, 4, 3, 2, 5]),
        ([called("call_a"), result("call_a"), called(*IDS), result("call_b"), result("call_a")], [0, 1, 2, 4, 3]),
        ([called("call_a", "call_b"), result("call_b", "1"), result("call_b", "2"), result("call_a")], [0, 3, 1, 2]),
        ([called(None, "call_b"), result("call_b"), result("other")], [0, 1, 2]),
        ([called("call_a", "call_b"), result("call_b"), result(None)], [0, 1, 2]),
        ([USER, result("call_a")], [0, 1]),
    ],
)  # fmt: skip
def test_results_have_the_order_of_their_calls(messages: list[Any], order: list[int]) -> None:
    assert in_order_of_calls(messages) == [messages[at] for at in order]


def test_a_result_of_no_call_is_refused_by_name() -> None:
    with pytest.raises(BadField, match=r"message 2 \(tool\): no call .* has the id 'x' \(its calls: 'call_a'\)"):
        in_order_of_calls([USER, called("call_a"), result("x")])


USE = [{"type": "tool_use", "id": call_id, "name": "f", "input": {}} for call_id in IDS[:2]]
RESULTS = [{"type": "tool_result", "tool_use_id": call_id, "content": f"of {call_id}"} for call_id in IDS[1::-1]]
ITEMS = [{"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"} for call_id in IDS[:2]]
OUTPUTS = [{"type": "function_call_output", "call_id": call_id, "output": f"of {call_id}"} for call_id in IDS[1::-1]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER, called(*IDS[:2]), *(result(call_id) for call_id in IDS[1::-1])]},
        ),
        ("/v1/responses", {"input": [USER, *ITEMS, *OUTPUTS]}),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [USER, {"role": "assistant", "content": USE}, {"role": "user", "content": RESULTS}],
            },
        ),
    ],
)
async def test_every_api_renders_results_in_the_order_of_the_calls(path: str, body: dict[str, Any]) -> None:
    codec = codecs.tiny()
    turns = ScriptedTurns(lambda request: Script([2]))
    unknown = json.loads(json.dumps(body).replace('_id": "call_b", "content', '_id": "other", "content'))
    unknown = json.loads(json.dumps(unknown).replace('_id": "call_b", "output', '_id": "other", "output'))
    async with serving(turns, codec) as url, aiohttp.ClientSession(url) as http:
        for sent, status in ((body, 200), (unknown, 400)):
            async with http.post(path, json={"model": "policy", **sent}) as answer:
                assert answer.status == status, await answer.text()
                told = await answer.text()
    assert "no call of the answer before it has the id 'other' (its calls: 'call_a', 'call_b')" in told
    [asked] = turns.requests
    prompt = codec.decode(asked.prompt_ids)
    assert 0 < prompt.index("of call_a") < prompt.index("of call_b")


async def test_results_in_another_order_than_before_extend_the_record() -> None:
    """A client may send the same results in any order, in each of its requests."""
    codec = codecs.tiny()
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answers = [f"{call}\n{call}", "Fine.", "Yes."]
    turns = ScriptedTurns(lambda _: Script([*codec.encode(answers[len(turns.requests) - 1]), *codec.turn_end_ids]))
    tools = [{"type": "function", "function": {"name": "f"}}]
    history: list[Any] = [USER]
    async with serving(turns, codec) as url, aiohttp.ClientSession(url) as http:

        async def ask() -> tuple[str, dict[str, Any]]:
            body = {"model": "policy", "messages": history, "tools": tools}
            async with http.post("/s/s1/v1/chat/completions", json=body) as answer:
                return answer.headers["X-Laminar-History"], (await answer.json())["choices"][0]["message"]

        _, said = await ask()
        first, second = (call["id"] for call in said["tool_calls"])
        history += [said, result(second, "later"), result(first, "sooner")]
        assert (await ask())[0] == "extended"
        history[2:] = [
            result(first, "sooner"),
            result(second, "later"),
            {"role": "assistant", "content": "Fine."},
            USER,
        ]
        assert (await ask())[0] == "extended"
    prompt = codec.decode(turns.requests[-1].prompt_ids)
    assert 0 < prompt.index("sooner") < prompt.index("later")
