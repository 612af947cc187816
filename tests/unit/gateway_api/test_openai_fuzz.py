"""Whatever JSON comes, it is taken or refused with a named field: no other exception leaves the request side."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.calls.history import chat_prompt
from gateway.api.openai import requests
from gateway.api.openai.bodies import ChatRequest, CompletionRequest
from gateway.core.tree import TurnTree
from gateway.core.types import SamplingParams, SessionId
from gateway.ports import ModelInfo, SessionView
from protos.errors import InvalidRequest
from tests.support import codecs
from tests.support.quick import examples

MODEL = ModelInfo("policy", 2048, 0)
SCALARS: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
        optional={
            "content": st.one_of(st.text(max_size=8), JSON, st.just([{"type": "text", "text": "a"}])),
            "tool_calls": st.one_of(JSON, st.just([{"function": {"name": "f", "arguments": "{"}}])),
            "name": SCALARS,
            "tool_call_id": SCALARS,
        },
    ),
    max_size=3,
)


def fields(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(kind.__struct_fields__), JSON, max_size=3)  # type: ignore[attr-defined]


def take_chat(raw: bytes) -> SamplingParams:
    """Everything that the handler does before it starts a turn."""
    codec = codecs.tiny()
    body = requests.decode_chat(raw)
    requests.chat_shape(body)
    messages = requests.chat_messages(body.messages)
    tools = requests.chat_tools(body, codec.tool_format)
    view = SessionView(SessionId("s"), TurnTree(), ephemeral=True)
    prompt = chat_prompt(codec, view, messages, tools, body.chat_template_kwargs)
    return requests.sampling(body, prompt_tokens=len(prompt.token_ids), model=MODEL, top=0)


@examples(60)
@given(messages=MESSAGES, more=fields(ChatRequest))
def test_chat_bodies(messages: list[dict[str, Any]], more: dict[str, Any]) -> None:
    raw = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    with contextlib.suppress(InvalidRequest):
        assert take_chat(raw).max_tokens >= 1


@examples(60)
@given(more=fields(CompletionRequest), prompt=st.one_of(JSON, st.lists(st.integers(-1, 600), max_size=3)))
def test_completion_bodies(more: dict[str, Any], prompt: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        body = requests.decode_completion(json.dumps({"model": "policy", "prompt": prompt, **more}).encode())
        requests.completion_shape(body, len(requests.completion_prompts(body, 512)))
        assert requests.sampling(body, prompt_tokens=3, model=MODEL, top=0).max_tokens >= 1


@given(st.binary(max_size=40))
def test_any_bytes(raw: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        requests.decode_chat(raw)
