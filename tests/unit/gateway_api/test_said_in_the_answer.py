"""What a request asks for and does not get is said in its answer; what is refused needs refusing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from gateway.config import parse_engine
from protos.errors import InvalidRequest
from tests.support import codecs
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.tiny_model import tiny_tokenizer
from tests.support.turns import Script, ScriptedTurns, serving
from tests.unit.gateway_api.test_responses import TOOLS, client_of, says
from tests.unit.gateway_api.test_status import gateway
from tests.unit.gateway_sessions.test_rewards import post

USER = {"role": "user", "content": "Hello."}
CHAT = {"model": "policy", "messages": [USER]}
TEXT = {"model": "policy", "prompt": "Hello."}
STRICT = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
NOTES = "X-Laminar-Without-Effect"


async def noted(path: str, body: Any) -> str | None:
    turns = ScriptedTurns(lambda request: Script([5, 6, 2]), context_tokens=256)
    async with (
        serving(turns, codecs.tiny()) as url,
        aiohttp.ClientSession(url) as http,
        http.post(path, json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return answer.headers.get(NOTES)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", CHAT, None),
        ("/v1/chat/completions", {**CHAT, "tools": [STRICT]}, "tools.function.strict"),
        ("/v1/chat/completions", {**CHAT, "tools": [STRICT], "tool_choice": "required"}, None),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 4}, None),
        ("/v1/completions", {**TEXT, "max_tokens": 100_000}, "max_tokens="),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 100_000}, "max_tokens="),
        ("/v1/responses", {"model": "policy", "input": "Hello.", "max_output_tokens": 100_000}, "max_tokens="),
        ("/v1/messages", {**CHAT, "max_tokens": 100_000}, "max_tokens="),
        (
            "/v1/responses",
            {"model": "policy", "input": "Hello.", "include": ["reasoning.encrypted_content"]},
            "include=reasoning.encrypted_content",
        ),
        ("/v1/responses", {"model": "policy", "input": "Hi.", "tools": [{**TOOLS[0], "strict": True}]}, "tools.strict"),
    ],
)
async def test_what_has_no_effect_is_said(path: str, body: Any, said: str | None) -> None:
    found = await noted(path, body)
    assert (found or "").startswith(said or "")
    assert bool(found) is bool(said)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *[
            ("/v1/chat/completions", field, value)
            for field, value in {
                "top_logprobs": 0,
                "return_token_ids": None,
                "return_weight_versions": None,
                "skip_special_tokens": None,
                "continue_final_message": None,
                "separate_reasoning": None,
                "ignore_eos": None,
                "stream_options": None,
                "verbosity": "medium",
                "prompt_cache_retention": "24h",
                "prompt_cache_options": {},
                "add_special_tokens": False,
                "logits_processors": None,
            }.items()
        ],
        ("/v1/completions", "prompt_embeds", None),
        ("/v1/completions", "add_special_tokens", None),
        ("/v1/responses", "text", {"verbosity": "medium"}),
        ("/v1/responses", "prompt_cache_options", {}),
    ],
)
async def test_what_asks_for_nothing_is_taken(path: str, field: str, value: Any) -> None:
    body = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}.get(path, {"model": "policy", "input": "Hello."})
    assert await noted(path, {**body, field: value}) is None


async def test_padding_of_events_is_refused() -> None:
    turns = ScriptedTurns(lambda request: Script([5, 2]))
    async with serving(turns, codecs.tiny()) as url, aiohttp.ClientSession(url) as http:
        options = {"stream": True, "stream_options": {"include_obfuscation": True}}
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", {"model": "policy", "input": "x"})):
            refused = await post(http, path, {**body, **options}, 400)
            assert refused["error"]["param"] == "stream_options.include_obfuscation"


async def test_what_is_asked_of_a_response() -> None:
    turns = ScriptedTurns(says("First.", "Second."))
    async with client_of(turns) as client:
        first = await client.responses.create(model="policy", input="one", instructions="Be brief.")
        second = await client.responses.create(model="policy", input="two", previous_response_id=first.id)
        found = [item.to_dict() async for item in client.responses.input_items.list(second.id, order="asc", limit=100)]
        told = [(item["type"], item["role"], item["content"][0]["text"]) for item in found]  # type: ignore[index]
        assert told == [("message", "user", "one"), ("message", "assistant", "First."), ("message", "user", "two")]
        newest = await client.responses.input_items.list(second.id, limit=1)
        assert ([item.to_dict() for item in newest.data], newest.has_more) == (found[-1:], True)
        pages = [item.to_dict() async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert pages == found, "page by page"
        with pytest.raises(openai.BadRequestError, match="no item has that id"):
            await client.responses.input_items.list(second.id, after="item_none")
        for ask in (client.responses.delete, client.responses.cancel):
            with pytest.raises(Exception, match="part of its session's record"):
                await ask(first.id)
        with pytest.raises(Exception, match="the query `stream` is not supported"):
            await client.responses.retrieve(first.id, stream=True)
        with pytest.raises(Exception, match="the query `starting_after` is not supported"):
            await client.responses.retrieve(first.id, starting_after=1)


@pytest.mark.parametrize("name", ["..", ".", "a#b", "a?b", "a%2fb", "a b", "a/b", ""])
async def test_names_that_no_url_can_have_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        parse_engine(f"{name}=vllm=http://127.0.0.1:1")
    async with gateway(tmp_path) as (_, http):
        await post(http, "/admin/engines", {"name": name, "url": "http://127.0.0.1:1", "check": False}, 400)
        if name:
            refused = await post(http, "/groups", {"group_id": name, "group_size": 1}, 400)
            assert refused["error"]["param"] == "group_id"


async def test_a_finish_key_makes_no_calls(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        made = await post(http, "/sessions", {})
        headers = {"Authorization": f"Bearer {made['finish_key']}"}
        body = {"model": MODEL, "prompt": [5], "max_tokens": 2}
        async with http.post("/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 403
            assert "this is a finish key" in (await answer.json())["error"]["message"]
        assert not found.sessions.counters.turns_started


async def test_an_idempotency_key_is_for_one_number_of_answers(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, gateway(tmp_path, e0) as (found, http):
        headers = {"Idempotency-Key": "k"}
        body = {"model": MODEL, "prompt": [5], "max_tokens": 2, "temperature": 1.0}
        for number, status in ((1, 200), (2, 409), (1, 200)):
            async with http.post("/s/s/v1/completions", json={**body, "n": number}, headers=headers) as answer:
                assert answer.status == status, await answer.text()
        assert found.sessions.counters.turns_started == 1


async def test_a_response_that_its_stop_ended_at_the_limit_is_complete_when_it_is_read_back(tmp_path: Path) -> None:
    """The engine ends it for its length, with the token that completes the stop string."""
    model = tiny_tokenizer()
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode("one two three", add_special_tokens=False).ids
    engine = ScriptedEngine("e0", generate=lambda prompt: [*ids, *ids], vocab_size=512)
    async with engine as e0, gateway(tmp_path, e0, tokenizer=model) as (_, http):
        body = {"model": MODEL, "input": "Count.", "max_output_tokens": len(ids), "stop": "three"}
        sent = await post(http, "/s/s/v1/responses", body)
        async with http.get(f"/v1/responses/{sent['id']}") as answer:
            read = await answer.json()
    assert (sent["status"], sent["usage"]["output_tokens"]) == ("completed", len(ids))
    assert (read["status"], read["usage"]) == (sent["status"], sent["usage"])
