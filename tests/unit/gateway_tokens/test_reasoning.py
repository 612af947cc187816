"""Reasoning told apart from the answer, however the text is cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens.reasoning import ReasoningParser

TEXTS = st.text(alphabet=st.sampled_from("ab é\n<>/think"), max_size=12)


def read(pieces: list[str], *, begun: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(begun=begun)
    told = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(d.reasoning for d in told), "".join(d.text for d in told)


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "answer"),
    [
        ("<think>\nwhy\n</think>\n\n42", False, "why", "42"),
        ("\n<think>why</think>42", False, "why", "42"),
        ("why\n</think>\n\n42", True, "why", "42"),
        ("<think>\n\n</think>\n\n42", False, "", "42"),
        ("<think>\ncut in mid", False, "cut in mid", ""),
        ("<think>\ncut in </thi", False, "cut in </thi", ""),
        ("42", False, "", "42"),
        ("42 <think>no</think>", False, "", "42 <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("  x", False, "", "  x"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", False, "", ""),
    ],
)
def test_what_is_reasoning(text: str, begun: bool, reasoning: str, answer: str) -> None:
    assert read([text], begun=begun) == (reasoning, answer)
    assert read(list(text), begun=begun) == (reasoning, answer)


@given(st.lists(TEXTS, max_size=4), TEXTS, st.booleans(), st.booleans(), st.data())
def test_cuts_change_nothing_and_nothing_vanishes(
    parts: list[str], rest: str, opened: bool, begun: bool, data: st.DataObject
) -> None:
    text = ("<think>" if opened else "") + "</think>".join([*parts, rest])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    reasoning, answer = read(cut, begun=begun)
    assert (reasoning, answer) == read([text], begun=begun)
    kept = "".join((reasoning + answer).split())
    written = "".join(text.split())
    assert kept in (
        written,
        written.replace("<think>", "", 1).replace("</think>", "", 1),
        written.replace("</think>", "", 1),
        written.replace("<think>", "", 1),
    )


def test_reasoning_is_released_as_it_comes() -> None:
    parser = ReasoningParser()
    assert [parser.feed(piece).reasoning for piece in ("<think>", "\na b", " c", " ", "</", "x")] == [
        *("", "a b", " c", "", "", " </x"),
    ]
