"""Everything wrong with a request is named, with what would be right; nothing runs."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.api import bodies
from gateway.api.anthropic.bodies import MessagesRequest
from gateway.api.errors import RefusedField
from gateway.api.openai.bodies import NEUTRAL_CHAT, NEUTRAL_COMPLETION, ChatRequest, CompletionRequest
from gateway.api.openai.requests import check_trainable, decode_chat, decode_completion, sampling
from gateway.api.openai.routes import BODY_BYTES_MAX
from gateway.core.tree import TurnTree
from gateway.core.types import SamplingParams, SessionId
from gateway.ports import ModelInfo, SessionView
from protos.engines import ENGINE_KINDS
from protos.errors import InvalidRequest, TooLarge
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

USER = {"role": "user", "content": "x"}
CHAT = {"model": "policy", "messages": [USER]}
TEXT = {"model": "policy", "prompt": "x"}
MESSAGES = msgspec.json.Decoder(MessagesRequest)
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def turns() -> ScriptedTurns:
    return ScriptedTurns(lambda request: Script([2]))


@pytest.fixture
async def url(turns: ScriptedTurns) -> AsyncIterator[str]:
    async with serving(turns, codecs.tiny()) as url:
        yield url


async def post(url: str, path: str, body: Any) -> tuple[int, dict[str, Any], aiohttp.ClientResponse]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(url + path, data=data) as answer:
        return answer.status, json.loads(await answer.text())["error"], answer


def with_unknown(value: dict[str, Any]) -> list[Any]:
    """A chat's and Anthropic's body with these fields at each depth."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **value}, **value}
    messages = [{**USER, **value}, {"role": "assistant", "content": "ok", "tool_calls": [call], **value}]
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, **value}, **value}
    block = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x", **value}], **value}
    return [
        decode_chat(json.dumps({**CHAT, "messages": messages, "tools": [tool], **value}).encode()),
        bodies.decode(
            MESSAGES, json.dumps({**CHAT, "max_tokens": 9, "messages": [{**USER, "content": [block]}]}).encode()
        ),
    ]


def test_null_means_no_field_at_every_depth() -> None:
    assert with_unknown({"provider_specific_fields": None, "parsed_output": None}) == with_unknown({})
    with pytest.raises(RefusedField, match=r"unknown field `messages\[0\]\.color`"):
        decode_chat(json.dumps({**CHAT, "messages": [{**USER, "colour": None, "color": 1}]}).encode())


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"model": "gpt"}, None, "no model 'gpt' here (served: 'policy')"),
        ({"messages": []}, "messages", "`messages` is empty"),
        ({"messages": "hello"}, "messages", "`messages`: expected `array`, got `str`"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required field `messages[0].role` is missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "one of system, developer, user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a user message needs content"),
        ({"messages": [{**USER, "colour": 1}]}, "messages[0].colour", "unknown field `messages[0].colour`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "'image_url' is not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
        ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls", "cannot"),
        ({"messages": [{**USER, "function_call": {"name": "f"}}]}, "messages[0].function_call", "not supported"),
        ({"temprature": 1}, "temprature", "did you mean `temperature`?"),
        ({"best_of": 2}, "best_of", "unknown field `best_of`"),
        ({"max_tokens": "many"}, "max_tokens", "`max_tokens`: expected `int | null`, got `str`"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
        ({"temperature": 2.5}, "temperature", "0.0 to 2.0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -2}, "top_k", "out of range"),
        ({"min_p": 1.1}, "min_p", "0.0 to 1.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"repetition_penalty": 2.1}, "repetition_penalty", "at most 2"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "0 to 5"),
        ({"n": 65}, "n", "1 to 64"),
        ({"stop": [""]}, "stop", "1 to 256"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs `stream`"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "unknown field"),
        ({"presence_penalty": 2.5}, "presence_penalty", "-2.0 to 2.0"),
        ({"response_format": {"type": "grammar"}}, "response_format", "'grammar' is not supported"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "object",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "one constraint"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "one constraint"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "a JSON schema is an object"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "unknown field"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "not a token id"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no function 'f'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "'required', or"),
        (
            {"tool_choice": "required", "tools": [FUNCTION], "response_format": {"type": "json_object"}},
            "response_format",
            "each constrain the answer",
        ),
        ({"tool_choice": "maybe"}, "tool_choice", "unknown"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "'retrieval'"),
        ({"functions": [{"name": "f"}]}, "functions", "use `tools`"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "-100.0 to 100.0"),
    ],
)
async def test_chat(url: str, turns: ScriptedTurns, change: dict[str, Any], param: str | None, message: str) -> None:
    status, error, answer = await post(url, "/v1/chat/completions", {**CHAT, **change})
    assert status == (404 if "model" in change else 400)
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_request", "unsupported_field", "model_not_found")
    assert answer.headers["x-should-retry"] == "false"
    assert turns.requests == []


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": ""}, None, "the prompt is empty"),
        ({"prompt": [1, "a"]}, "prompt", "token ids"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [-1]}, "prompt", "token ids"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64 answers"),
        ({"prompt": [[1], [600]]}, "prompt", "not in the vocabulary"),
        ({"prompt": [999_999]}, "prompt", "999999"),
        ({"echo": True}, "echo", "prepend the prompt"),
        ({"best_of": 2}, "best_of", "request `n`"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"logprobs": True}, "logprobs", "expected `int | null`, got `bool`"),
        ({"messages": []}, "messages", "unknown field"),
    ],
)
async def test_completions(
    url: str, turns: ScriptedTurns, change: dict[str, Any], param: str | None, message: str
) -> None:
    status, error, _ = await post(url, "/v1/completions", {**TEXT, **change})
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
    assert turns.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"model": "\xff"}'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/s/x/v1/completions"])
async def test_malformed_bodies(url: str, path: str, body: bytes) -> None:
    status, error, _ = await post(url, path, body)
    assert (status, error["code"]) == (400, "invalid_request")
    assert "JSON" in error["message"] or "object" in error["message"]


async def test_a_prompt_longer_than_the_context_names_both_lengths(url: str, turns: ScriptedTurns) -> None:
    turns.context_tokens = 50
    status, error, _ = await post(url, "/v1/completions", {**TEXT, "prompt": [5] * 50})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "prompt"
    assert "maximum context length is 50 tokens" in error["message"]
    assert "at most 49" in error["message"]
    assert turns.requests == []
    assert turns.sessions == {}  # a refused call leaves no session behind


def test_max_tokens_are_bounded_by_the_context() -> None:
    model = ModelInfo("policy", 100, 0)
    chat = ChatRequest(model="policy", messages=[])
    assert sampling(chat, prompt_tokens=60, model=model, top=0).max_tokens == 40
    chat = ChatRequest(model="policy", messages=[], max_completion_tokens=99, temperature=0.0, top_k=-1, stop="x")
    found = sampling(chat, prompt_tokens=60, model=model, top=3)
    assert (found.max_tokens, found.temperature, found.top_k, found.stop) == (40, 0.0, 0, ("x",))
    text = CompletionRequest(model="policy", prompt="x")
    assert sampling(text, prompt_tokens=1, model=model, top=0).max_tokens == 16
    with pytest.raises(TooLarge, match=r"100 tokens.* 100"):
        sampling(text, prompt_tokens=100, model=model, top=0)


def test_every_neutral_value_is_taken_and_every_field_of_the_table_exists() -> None:
    for base, decode, table in ((CHAT, decode_chat, NEUTRAL_CHAT), (TEXT, decode_completion, NEUTRAL_COMPLETION)):
        for name, allowed in table.items():
            for value in allowed:
                decode(json.dumps({**base, name: value}).encode())  # type: ignore[operator]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_no_field_of_the_official_client_is_unknown(kind: type) -> None:
    """Each parameter of the SDK is supported or refused for a reason, never as a misspelling."""
    import inspect

    from openai.resources import Completions
    from openai.resources.chat import Completions as ChatCompletions

    create = ChatCompletions.create if kind is ChatRequest else Completions.create
    theirs = set(inspect.signature(create).parameters) - {
        "self",
        "extra_headers",
        "extra_query",
        "extra_body",
        "timeout",
    }
    assert theirs - set(kind.__struct_fields__) == set()  # type: ignore[attr-defined]


def test_a_body_over_msgpack_depth_or_a_huge_number_is_refused() -> None:
    deep = b'{"model":"policy","messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    for raw in (deep, b'{"model":"policy","messages":[],"seed":1e400}', b'{"model":"policy","prompt":1}'):
        with pytest.raises(InvalidRequest):
            decode_chat(raw)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/chat/completions", 404, "no route /chat/completions (the base_url ends in /v1)"),
        ("GET", "/", 404, "no route / (the dashboard is at /ui, OpenAI's API at /v1)"),
        ("GET", "/models", 404, "the base_url ends in /v1"),
        ("POST", "/v1/embeddings", 404, "no route /v1/embeddings (completions are at /v1/chat/completions"),
        ("POST", "/sessions/s/rewards", 404, "GET /openapi.json lists every route"),
        ("GET", "/v1/chat/completions", 405, "/v1/chat/completions takes POST, not GET"),
    ],
)
async def test_a_wrong_address_is_answered_in_the_apis_own_shape(
    url: str, method: str, path: str, status: int, message: str
) -> None:
    async with aiohttp.ClientSession() as session, session.request(method, url + path) as answer:
        error = json.loads(await answer.text())["error"]
        assert (answer.status, answer.headers["x-should-retry"]) == (status, "false")
        assert message in error["message"]


@pytest.mark.slow
async def test_a_body_over_the_limit_is_refused_by_size(url: str) -> None:
    body = io.BytesIO(b" " * (BODY_BYTES_MAX + 1))
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", data=body) as answer:
        assert (answer.status, json.loads(await answer.text())["error"]["code"]) == (413, "too_large")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("change", "schema", "in_place"),
    [
        ({}, "", False),
        ({"response_format": {"type": "text"}}, "", False),
        ({"response_format": {"type": "json_object"}}, '{"type":"object"}', True),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, json.dumps(SCHEMA), True),
        ({"structured_outputs": {"json": SCHEMA}}, json.dumps(SCHEMA), True),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json.dumps(SCHEMA), True),
        ({"presence_penalty": 0.5}, "", True),
        ({"frequency_penalty": -0.5}, "", True),
        ({"presence_penalty": 0}, "", False),
        ({"repetition_penalty": 1.2}, "", True),
        ({"repetition_penalty": 1.0, "min_p": 0.1, "logit_bias": {"5": 1}}, "", False),
    ],
)
def test_what_has_to_end_where_it_began(change: dict[str, Any], schema: str, in_place: bool) -> None:
    body = decode_chat(json.dumps({"model": "policy", "messages": [], **change}).encode())
    found = sampling(body, prompt_tokens=1, model=ModelInfo("policy", 50, 0), top=0)
    assert (found.json_schema.replace(" ", ""), found.in_place) == (schema.replace(" ", ""), in_place)
    allowed = sampling(body, prompt_tokens=1, model=ModelInfo("policy", 50, 0, penalties_move=True), top=0)
    assert allowed.in_place is bool(schema), "penalties may move where that is allowed, a grammar never"


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_an_answer_may_be_held_to_a_pattern_where_engines_can(api: str) -> None:
    asked = json.dumps({"model": "policy", "messages": [], "structured_outputs": {"regex": "yes|no"}}).encode()
    body = (
        decode_chat(asked) if api == "chat" else decode_completion(asked.replace(b'"messages": []', b'"prompt": "p"'))
    )
    found = sampling(body, prompt_tokens=1, model=ModelInfo("policy", 50, 0), top=0)
    assert (found.regex, found.json_schema, found.constrained, found.in_place) == ("yes|no", "", True, True)
    with pytest.raises(RefusedField, match=r"no engine of this gateway can constrain.*sglang, vllm") as refused:
        sampling(body, prompt_tokens=1, model=ModelInfo("policy", 50, 0, kinds=frozenset({"embedded"})), top=0)
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize("more", [{}, {"temperature": 0}], ids=["sampled", "greedy"])
def test_a_parameter_that_no_engine_here_takes_is_refused(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = dataclasses.replace(ENGINE_KINDS["embedded"], lacks=frozenset({"min_p"}))
    monkeypatch.setitem(ENGINE_KINDS, "embedded", lacking)

    def of(value: float, *kinds: str) -> SamplingParams:
        body = decode_chat(json.dumps({"model": "policy", "messages": [], "min_p": value, **more}).encode())
        model = ModelInfo("policy", 50, 0, kinds=frozenset(kinds))
        return sampling(body, prompt_tokens=1, model=model, top=0)

    with pytest.raises(RefusedField, match=r"no engine of this gateway takes `min_p`.*sglang, vllm") as refused:
        of(0.1, "embedded")
    assert refused.value.param == "min_p"
    assert of(0.1, "embedded", "sglang").min_p == 0.1
    assert of(0, "embedded").min_p == 0, "the default is no parameter to take"


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "presence_penalty",
        "response_format",
    ],
)
def test_a_session_that_is_trained_on_refuses_what_raw_logprobs_do_not_tell(name: str) -> None:
    values = {"top_k": 5, "min_tokens": 2, "response_format": {"type": "json_object"}}
    body = decode_chat(json.dumps({"model": "policy", "messages": [], name: values.get(name, 0.5)}).encode())
    plain = decode_chat(b'{"model": "policy", "messages": [], "seed": 3, "stop": "x"}')
    found, neutral = (sampling(b, prompt_tokens=1, model=ModelInfo("policy", 50, 0), top=0) for b in (body, plain))
    raw = SessionView(SessionId("s"), TurnTree(), ephemeral=False, trains=True, logprobs_kind="raw")
    with pytest.raises(RefusedField, match=f"with `{name}` the recorded") as refused:
        check_trainable(found, raw)
    assert refused.value.param == name
    check_trainable(neutral, raw)
    check_trainable(found, dataclasses.replace(raw, trains=False))
    check_trainable(found, dataclasses.replace(raw, logprobs_kind="processed"))


@pytest.mark.parametrize(
    "text", [rb"\ud83d", rb"it is \ud83d and more of it", rb"\ude00 first", rb"\ud83d\u0041 later", b"\xed\xa0\xbd raw"]
)
@pytest.mark.parametrize("whole", [b"}", b'], "more": "and a longer end"}'])
def test_half_a_surrogate_pair_is_named_as_such(text: bytes, whole: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"half of a surrogate pair.*cut between characters"):
        decode_completion(b'{"model": "policy", "prompt": "' + text + b'"' + whole)


@pytest.mark.parametrize("body", [b'{"model": "policy", "prompt": "x', b'{"model": "policy", "prompt": "\xff"}'])
def test_what_is_cut_or_no_utf_8_is_no_surrogate(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body is not JSON"):
        decode_completion(body)
