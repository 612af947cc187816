"""`/inference/v1/generate`: token ids in and out, in the form that train clients check token by token."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

EOS = 2
PROMPT = [5, 6, 7]
ANSWER = [40, 41, EOS]


@contextlib.asynccontextmanager
async def door(turns: ScriptedTurns) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession(url) as http:
        yield http


def scripted(**script: Any) -> ScriptedTurns:
    return ScriptedTurns(lambda _: Script(ANSWER, **script))


def asked(token_ids: list[int] = PROMPT, **sampling: Any) -> dict[str, Any]:
    """As the train client of verifiers sends it."""
    sampling = {"stop_token_ids": [EOS], "logprobs": 1, "skip_special_tokens": False, **sampling}
    return {"model": "policy", "token_ids": token_ids, "sampling_params": sampling, "cache_salt": "3", "priority": 1}


def check_tokens(choice: Any) -> None:
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert [entry["logprob"] for entry in content] == [-0.5 - token_id / 1024 for token_id in choice["token_ids"]]


async def test_ids_and_logprobs_come_back_token_by_token() -> None:
    turns = scripted(chunk=2)
    async with door(turns) as http, http.post("/inference/v1/generate", json=asked()) as answer:
        assert answer.status == 200, await answer.text()
        body = await answer.json()
    [choice] = body["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ANSWER, "stop")
    check_tokens(choice)
    assert body["request_id"] == answer.headers["X-Request-Id"]
    [turn] = turns.requests
    assert list(turn.prompt_ids) == PROMPT
    assert turn.sampling.top_logprobs == 0, "alternatives that nobody reads cost every token"
    assert turn.sampling.max_tokens == turns.context_tokens - len(PROMPT), "what the context has left"


async def test_a_stream_has_the_same_tokens() -> None:
    body = {**asked(), "stream": True}
    async with door(scripted()) as http, http.post("/inference/v1/generate", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    for choice in choices[:-1]:
        check_tokens(choice)
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ANSWER
    assert [choice["finish_reason"] for choice in choices] == [None] * len(ANSWER) + ["stop"]


async def test_a_prompt_that_begins_with_the_record_extends_it() -> None:
    turns, named = scripted(), {"X-Session-ID": "trace-1"}
    async with door(turns) as http:
        async with http.post("/inference/v1/generate", json=asked(), headers=named) as first:
            assert (first.headers["X-Session-ID"], first.headers["X-Laminar-History"]) == ("trace-1", "first")
        more = [*PROMPT, *ANSWER, 8, 9]
        async with http.post("/inference/v1/generate", json=asked(more), headers=named) as second:
            assert second.headers["X-Laminar-History"] == "extended"
        async with http.post("/sessions/trace-1/inference/v1/generate", json=asked([9])) as other:
            assert (other.headers["X-Session-ID"], other.headers["X-Laminar-History"]) == ("trace-1", "branch")
    assert turns.requests[1].parent == turns.requests[0].turn_id


async def test_alternatives_stand_beside_the_sampled_token_from_two_on() -> None:
    async with door(scripted()) as http, http.post("/inference/v1/generate", json=asked(logprobs=2)) as answer:
        content = (await answer.json())["choices"][0]["logprobs"]["content"]
    assert [[other["token"] for other in entry["top_logprobs"]] for entry in content] == [
        ["token_id:5", "token_id:6"]
    ] * len(ANSWER)


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        ({"token_ids": []}, "token_ids", "the prompt is empty"),
        ({"token_ids": [1 << 40]}, "token_ids", "not in the vocabulary"),
        ({"token_ids": [-1]}, "token_ids", "not in the vocabulary"),
        ({"token_ids": [5] * 3000}, "prompt", "2048 tokens"),
        ({"features": {}}, "features", "unknown field"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs", "not supported"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature", "unknown field"),
        ({"sampling_params": {"temperature": 9}}, "temperature", "out of range"),
    ],
)
async def test_what_it_does_not_do_is_refused_by_name(change: dict[str, Any], named: str, message: str) -> None:
    turns = scripted()
    async with door(turns) as http, http.post("/inference/v1/generate", json={**asked(), **change}) as answer:
        assert answer.status in (400, 413), await answer.text()
        error = (await answer.json())["error"]
    assert error["param"] == named
    assert message in error["message"]
    assert not turns.requests
