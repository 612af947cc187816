"""Bridging turns: what is kept, closed and compared. Whole conversations: see gateway_api/test_openai_templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.tokens import Codec
from gateway.tokens.bridge import ANSWER_MARK, comparable, difference
from protos.errors import InvalidRequest
from tests.support import codecs

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
CODECS = [codecs.tiny, codecs.llama3, codecs.qwen25, codecs.qwen3, codecs.smollm2]


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("make", CODECS)
def test_a_truncated_turn_is_closed_by_the_template_visibly(make: Callable[[], Codec]) -> None:
    codec = make()
    ids = [*codec.render([user("xhiy")]), *codec.encode("xunfinishedy")]
    recorded = [user("xhiy"), answer("xunfinishedy")]
    bridged = codec.bridge(ids, recorded, [user("xgo ony")])
    assert bridged.closed_turn
    assert codec.decode(bridged.prompt_ids) == codec.render_text([*recorded, user("xgo ony")])


def test_what_was_sampled_is_kept_even_where_text_would_tokenise_otherwise() -> None:
    codec = codecs.smollm2()
    prompt = codec.render([user("hello")])
    odd = [token for letter in "The answer" for token in codec.encode(letter)]  # letter by letter: not the usual merges
    recorded = [user("hello"), answer("The answer")]
    bridged = codec.bridge([*prompt, *odd, 2], recorded, [user("why?")])
    assert bridged.prompt_ids[len(prompt) :][: len(odd)] == odd
    assert bridged.prompt_ids != codec.render([*recorded, user("why?")])


RECORDED = [
    user("2+3?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        ],
    },
]


def test_clients_may_change_what_means_the_same() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "2+3?"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "other", "type": "function", "function": {"name": "add", "arguments": '{"b":3,"a":2}'}}
            ],
        },
    ]
    assert list(map(comparable, RECORDED)) == list(map(comparable, sent))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user("2+3?")], "1 messages, the record 2"),
        ([user("2+4?"), RECORDED[1], user("?")], "message 0 (user) differs from the record in its content"),
        ([RECORDED[0], answer("5"), user("?")], "message 1 (assistant) differs"),
    ],
)
def test_where_a_history_parts_from_the_record_is_said(messages: list[dict[str, Any]], reason: str) -> None:
    assert reason in difference(RECORDED, messages)


def test_the_reserved_mark_is_refused_in_messages() -> None:
    recorded = [user("a"), answer("b")]
    with pytest.raises(InvalidRequest, match="reserved"):
        codecs.tiny().bridge([1], recorded, [user(ANSWER_MARK)])
