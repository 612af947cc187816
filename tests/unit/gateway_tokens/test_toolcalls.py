"""Tool calls out of streamed text: released when parsed, the same however the text is cut, nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens import ToolCallParser, ToolFormat
from gateway.tokens.toolcalls import ToolDelta

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ("add", {"a": 1, "b": "é"})


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "string"},
                    "on": {"type": ["boolean", "null"]},
                    "of": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "which": {"enum": ["1", "2"]},
                }
            },
        },
    },
    *({"type": "function", "function": {"name": name}} for name in ("a", "b", "f", "now", "search")),
]
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>é</arg_value>\n"
    "</tool_call>"
)
JSON_ARGUMENTS = '{"a": 1, "b": "é"}'
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{JSON_ARGUMENTS}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON_ARGUMENTS}<｜tool▁call▁end｜>"
RUN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
MISTRAL = f'[TOOL_CALLS] [{{"name": "add", "arguments": {JSON_ARGUMENTS}, "id": "123456789"}}]'
NAMED = f"[TOOL_CALLS]add[ARGS]{JSON_ARGUMENTS}"


def run(form: ToolFormat, chunks: list[str]) -> tuple[str, list[tuple[str, object]], list[ToolDelta]]:
    parser = ToolCallParser(form, TOOLS)
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


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("qwen_xml", XML, "", [ADD]),
        ("qwen_xml", f"I add.\n\n{XML}\n{XML}", "I add.", [ADD, ADD]),
        ("qwen_xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
        ("qwen_xml", XML.removesuffix("\n</tool_call>"), "", [ADD]),  # ended before its closing tag
        ("qwen_xml", XML.removesuffix("</function>\n</tool_call>"), None, []),
        ("qwen_xml", "<tool_call>\n<function=add>\nstray\n</function>\n</tool_call>", None, []),
        ("qwen_xml", "<tool_call>{}</tool_call>", None, []),
        ("glm", GLM, "", [ADD]),
        ("glm", f"\nI add.\n{GLM}{GLM}", "\nI add.", [ADD, ADD]),
        ("glm", "<tool_call>now\n</tool_call>", "", [("now", {})]),
        ("glm", "<tool_call>not a name<b></tool_call>", None, []),
        ("glm", GLM.removesuffix("</tool_call>"), None, []),  # perhaps not its last argument
        ("deepseek", f"I add.{RUN}{V3}{END}", "I add.", [ADD]),
        ("deepseek", f"{RUN}{V3}\n{V3}{END}", "", [ADD, ADD]),
        ("deepseek", f"{RUN}{V31}{V31}{END}", "", [ADD, ADD]),
        ("deepseek", V31.removesuffix("<｜tool▁call▁end｜>"), "", [ADD]),
        ("deepseek", f"{RUN} and no call", None, []),
        ("deepseek", f"{RUN}{V3[:-30]}", None, []),
        ("mistral", MISTRAL, "", [ADD]),
        ("mistral", f"I add.\n{NAMED}{NAMED}", "I add.", [ADD, ADD]),
        ("mistral", "[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{}", "", [("add", {})]),
        ("mistral", NAMED[:-1], None, []),
        ("mistral", "[TOOL_CALLS]", None, []),
        ("mistral", "see [TOOL", None, []),
        ("llama", '<|python_tag|>search.call(query="a (b)", n=3)', "", [("search", {"query": "a (b)", "n": 3})]),
        ("llama", 'I look.\n<|python_tag|>search.call(query="a")', "I look.", [("search", {"query": "a"})]),
        ("llama", "<|python_tag|>print(open.call(x=f()))", None, []),
        ("llama", "<|python_tag|>x.call(a=1, **b)", None, []),
        ("llama", "<|python_tag|>x.call(a=f())", None, []),
    ],
)
def test_the_formats_of_the_families(
    form: ToolFormat, text: str, content: str | None, calls: list[tuple[str, object]]
) -> None:
    """`content` None: the text is no call, and comes back as it is."""
    for chunks in ([text], list(text), [text[:9], text[9:]]):
        assert run(form, chunks)[:2] == (text if content is None else content, calls)


@pytest.mark.parametrize("form", ["qwen_xml", "glm"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "12", 12),
        ("b", "12", "12"),
        ("b", "two\nlines\n", "two\nlines\n"),
        ("b", "<b>x</b>", "<b>x</b>"),
        ("on", "True", True),
        ("on", "false", False),
        ("on", "null", None),
        ("of", "null", None),
        ("of", "nothing", "nothing"),
        ("which", "1", "1"),
        ("unknown", '{"deep": [1, 2]}', {"deep": [1, 2]}),
        ("unknown", "a word", "a word"),
        ("a", "no number", "no number"),
    ],
)
def test_arguments_have_the_types_of_the_schema(form: ToolFormat, key: str, text: str, value: object) -> None:
    written = {
        "qwen_xml": f"<tool_call>\n<function=add>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>add\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[form]
    assert run(form, list(written))[:2] == ("", [("add", {key: value})])


PARTS: dict[ToolFormat, list[str]] = {
    "qwen_xml": [XML, "<tool_call>", "<function=x>", "</function>", "</tool_call>", "<parameter=", "</parameter>"],
    "glm": [GLM, "<tool_call>f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "deepseek": [
        RUN,
        END,
        V3,
        V31,
        RUN[:12],
        END[:9],
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    "mistral": [MISTRAL, NAMED, "[TOOL_CALLS]", "[ARGS]", "[TOOL", "{}", '{"name": "f"}'],
    "llama": ['{"name": "f"}', "<|python_tag|>", "f.call(", "x=1)", ";", "<|pyth", "{"],
}


@pytest.mark.parametrize("form", PARTS)
@given(data=st.data())
def test_calls_do_not_depend_on_the_chunks(form: ToolFormat, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from([*PARTS[form], "word ", "<", "[", " ", "\n"]), max_size=7))
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls, _ = run(form, chunks)
    assert (content, calls) == run(form, [text])[:2] == run(form, list(text))[:2]
    if not calls:
        assert content == text


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_end_of_a_run_written_twice_belongs_to_it(size: int) -> None:
    text = f"{RUN}{V3}{END}{END}"
    content, calls, _ = run("deepseek", [text[i : i + size] for i in range(0, len(text), size)])
    assert (content, len(calls)) == ("", 1)


def test_mistrals_ids_are_as_its_template_wants_them() -> None:
    assert ToolCallParser("mistral").call_id("0123456789abcdef") == "012345678"
    assert ToolCallParser("hermes").call_id("0123456789abcdef") == "call_0123456789abcdef"


def test_no_format_parses_nothing() -> None:
    assert run("none", [CALL])[:2] == (CALL, [])
