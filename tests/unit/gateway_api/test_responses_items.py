"""Input items to messages: what belongs to one answer becomes one, and whatever is sent is taken or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.errors import BadField, RefusedField
from gateway.api.responses.items import input_messages
from gateway.ports import Message
from gateway.tokens.bridge import comparable
from tests.support.quick import examples

TEXT = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
USER = {"role": "user", "content": "hi"}


def said(text: str) -> dict[str, Any]:
    return {**TEXT, "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ([USER, said("a")], ["user", "assistant"]),
        ([THOUGHT, said("a"), CALL, CALL, OUTPUT, OUTPUT], ["assistant", "tool", "tool"]),
        ([said("a"), said("b")], ["assistant", "assistant"]),
        ([said("a"), CALL, said("b"), OUTPUT], ["assistant", "tool"]),
        ([CALL, OUTPUT, CALL, OUTPUT], ["assistant", "tool", "assistant", "tool"]),
        ([said("a"), THOUGHT, said("b")], ["assistant", "assistant"]),
        ([CALL, THOUGHT, CALL], ["assistant", "assistant"]),
        ([{"role": "developer", "content": "x"}, USER], ["system", "user"]),
    ],
)
def test_items_of_one_answer_are_one_message(items: list[Any], roles: list[str]) -> None:
    assert [message["role"] for message in input_messages(items)] == roles


def test_text_around_calls_joins_to_the_recorded_text() -> None:
    [message] = input_messages([THOUGHT, said("a "), CALL, said("b")])
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("a b", "Hm.", 1)


FIELDS = ["type", "role", "content", "call_id", "name", "arguments", "output", "summary", "id", "other"]
VALUES: Any = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.sampled_from(
            ["message", "reasoning", "function_call", "function_call_output", "user", "assistant", "", "x"]
        ),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
)
ITEMS: Any = st.lists(
    st.sampled_from([USER, THOUGHT, CALL, OUTPUT, said("a")])
    | st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)
    | st.tuples(st.sampled_from([USER, THOUGHT, CALL, OUTPUT]), st.sampled_from(FIELDS), VALUES).map(
        lambda made: {**made[0], made[1]: made[2]}
    ),
    max_size=5,
)


@given(ITEMS)
@examples(300)
def test_whatever_is_sent_is_taken_or_refused_by_name(items: list[Any]) -> None:
    messages, refused = attempted(items)
    assert refused is None or refused.startswith("input")
    assert len(messages) <= len(items)
    for message in messages:
        comparable(message)  # as the record compares it


def attempted(items: list[Any]) -> tuple[list[Message], str | None]:
    """The messages, or the path that is refused."""
    try:
        return input_messages(items), None
    except (BadField, RefusedField) as e:
        return [], e.param
