"""Tool calls out of streamed text: released when parsed, the same however the text is cut, nothing lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens import ToolCallParser, ToolFormat
from gateway.tokens.toolcalls import ToolDelta

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ("add", {"a": 1, "b": "é"})


def run(form: ToolFormat, chunks: list[str]) -> tuple[str, list[tuple[str, object]], list[ToolDelta]]:
    parser = ToolCallParser(form)
    deltas = [*map(parser.feed, chunks), parser.finish()]
    calls = [(call.name, json.loads(call.arguments)) for delta in deltas for call in delta.calls]
    assert parser.num_calls == len(calls)
    return "".join(delta.text for delta in deltas), calls, deltas


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text", "plain text", []),
        (CALL, "", [ADD]),
        (f"I add.\n\n{CALL}", "I add.", [ADD]),
        (f"{CALL}\n{CALL}", "", [ADD, ADD]),
        (f"{CALL} and then", "and then", [ADD]),
        ('<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>', "", [("a", {}), ("b", {})]),
        ('<tool_call>{"name": "a", "arguments": {}}', "", [("a", {})]),  # ended before its closing tag
        ("<tool_call>{broken</tool_call> tail", "<tool_call>{broken</tool_call> tail", []),
        (f"<tool_call>oops</tool_call>{CALL}", "<tool_call>oops</tool_call>", [ADD]),
        ("<tool_call>{unfinished", "<tool_call>{unfinished", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("a < b and <tool", "a < b and <tool", []),
        ("  trailing space  ", "  trailing space  ", []),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    for chunks in ([text], list(text), [text[:7], text[7:]]):
        assert run("hermes", chunks)[:2] == (content, calls)


@given(
    st.lists(st.sampled_from([CALL, "word ", "<", "<tool", " \n", "</tool_call>", "<tool_call>{no"]), max_size=6),
    st.data(),
)
def test_hermes_does_not_depend_on_the_chunks(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run("hermes", chunks)[:2] == run("hermes", [text])[:2]


def test_text_streams_before_a_call_and_calls_come_whole() -> None:
    parser = ToolCallParser("hermes")
    assert parser.feed("Let me add").text == "Let me add"
    assert parser.feed(". ").text == "."
    assert parser.feed("<tool_") == ToolDelta()
    assert parser.feed(CALL[6:-1]) == ToolDelta()
    [call] = parser.feed(">").calls
    assert (call.name, json.loads(call.arguments)) == ADD
    assert call.id.startswith("call_")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "a", "parameters": {"x": 1}}', "", [("a", {"x": 1})]),
        ('<|python_tag|>{"name": "a", "arguments": {}}', "", [("a", {})]),
        (' {"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "", [("a", {}), ("b", {})]),
        ('{"answer": 3}', '{"answer": 3}', []),
        ('{"name": "a", "parameters": ', '{"name": "a", "parameters": ', []),
        ("The answer is {3}", "The answer is {3}", []),
        ("<|python", "<|python", []),
    ],
)
def test_llama(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    for chunks in ([text], list(text)):
        assert run("llama", chunks)[:2] == (content, calls)


def test_no_format_parses_nothing() -> None:
    assert run("none", [CALL])[:2] == (CALL, [])
