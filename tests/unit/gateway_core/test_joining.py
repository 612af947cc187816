"""Which turn a request joins: by key, by session, by being the only orphan; siblings never merge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.retries import Attention, Call, Known, join
from gateway.core.types import SessionId, TurnId
from protos.errors import Conflict

S1 = SessionId("s1")


def known(
    name: str, attention: Attention = "unread", *, session: SessionId | None = None, key: str | None = None
) -> Known:
    return Known(TurnId(name), "same", session, key, attention)


@pytest.mark.parametrize("attention", ["read", "unread", "answered", "unknown"])
def test_a_key_joins_its_turn_whoever_has_the_answer(attention: Attention) -> None:
    call = Call("same", None, "k1")
    assert join(call, [known("other", key="k2"), known("t", attention, key="k1")]) == "t"
    assert join(call, [known("keyless")]) is None


def test_a_key_that_was_used_for_something_else_is_refused() -> None:
    with pytest.raises(Conflict, match="k1"):
        join(Call("different", None, "k1"), [known("t", key="k1")])


def test_a_key_belongs_to_its_session() -> None:
    assert join(Call("same", S1, "k1"), [known("t", key="k1")]) is None


@pytest.mark.parametrize(
    ("attention", "retried", "joins"),
    [
        ("unread", False, True),
        ("unread", True, True),
        ("read", False, False),  # a sub-agent that asks the same
        ("read", True, True),  # the gateway has not noticed yet that the first connection is gone
        ("answered", False, False),  # a second sample
        ("answered", True, True),  # the answer got lost on its way
        ("unknown", False, True),
    ],
)
def test_in_a_session(attention: Attention, retried: bool, joins: bool) -> None:
    found = join(Call("same", S1, retried=retried), [known("t", attention, session=S1)])
    assert (found == "t") is joins


def test_another_body_or_session_never_joins() -> None:
    assert join(Call("different", S1, retried=True), [known("t", session=S1)]) is None
    assert join(Call("same", SessionId("s2"), retried=True), [known("t", session=S1)]) is None
    assert join(Call("same", None, retried=True), [known("t", session=S1)]) is None


def test_without_a_session_exactly_one_orphan_must_match() -> None:
    call = Call("same", None, retried=True)
    assert join(call, [known("a", "read"), known("b"), known("c", "answered")]) == "b"
    assert join(call, [known("a"), known("b")]) is None
    assert join(call, [known("a", "unknown")]) == "a"
    assert join(Call("same", None), [known("a", "unknown")]) is None  # it may have been answered: a sibling's


@given(st.lists(st.sampled_from(["read", "answered"])), st.booleans())
def test_siblings_never_merge(attentions: list[Attention], retried: bool) -> None:
    siblings = [known(f"t{i}", attention) for i, attention in enumerate(attentions)]
    assert join(Call("same", None, retried=retried), siblings) is None
