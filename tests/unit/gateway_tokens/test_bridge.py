"""Bridged prompts against the templates' own rendering, on random conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tokens import Codec
from gateway.tokens.bridge import ANSWER_MARK, comparable, difference
from protos.errors import InvalidRequest
from tests.support import codecs

WORDS = st.text(alphabet=st.sampled_from("ab é€7.\n{"), min_size=1, max_size=12).map(lambda text: f"x{text}y")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
CODECS = [codecs.tiny, codecs.llama3, codecs.smollm2]


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@st.composite
def conversations(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """The messages that each turn adds: the first with or without a system message, later ones user's or tools'."""
    system = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    first = [*system, user(draw(WORDS))]
    later = st.lists(
        st.one_of(WORDS.map(user), WORDS.map(lambda text: {"role": "tool", "content": text, "tool_call_id": "call_1"})),
        min_size=1,
        max_size=3,
    )
    return [first, *draw(st.lists(later, min_size=1, max_size=3))]


@settings(deadline=None, max_examples=25)
@given(turns=conversations(), texts=st.lists(WORDS, min_size=4, max_size=4), tools=st.booleans())
@pytest.mark.parametrize("make", CODECS)
def test_bridged_turns_equal_the_templates_own_rendering(
    make: Callable[[], Codec], turns: list[list[dict[str, Any]]], texts: list[str], tools: bool
) -> None:
    codec = make()
    offered = TOOLS if tools else None
    [end] = codec.turn_end_ids if len(codec.turn_end_ids) == 1 else [codec.tokenizer.token_to_id("<|eot_id|>")]
    history = list(turns[0])
    ids = codec.render(history, offered)
    for added, text in zip(turns[1:], texts, strict=False):
        ids = [*ids, *codec.encode(text), end]
        recorded = [*history, answer(text)]
        history = [*recorded, *added]
        bridged = codec.bridge(ids, recorded, added, offered)
        assert bridged.prompt_ids[: len(ids)] == ids
        assert not bridged.closed_turn
        whole = codec.render(history, offered)
        new = bridged.prompt_ids[len(ids) :]
        assert whole[-len(new) :] == new
        assert codec.decode(bridged.prompt_ids) == codec.render_text(history, offered)
        ids = bridged.prompt_ids


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
