"""What a client sees of an answer's text: the right reading of each, whole and cut at every place."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens import AnswerParser, ToolFormat
from gateway.tokens.reasoning import ReasoningFormat

MODE = {"$ref": "#/$defs/Mode"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "mode": MODE,
        "maybe": {"anyOf": [MODE, {"type": "null"}]},
        "tags": {"type": "array"},
        "map": {"type": "object"},
        "n": {"type": "integer"},
        "endless": {"$ref": "#/properties/endless"},
    },
    "$defs": {"Mode": {"type": "string", "enum": ["1", "2"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("write", "read")
]

Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class Case:
    name: str
    form: ToolFormat
    text: str
    content: str = ""
    calls: Calls = field(default_factory=list)
    reasoning: str = ""
    begun: bool | None = False
    thinks: ReasoningFormat = "think"


def wrote(**arguments: Any) -> Calls:
    return [("write", arguments)]


def hermes(value: object) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


def xml(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"


def glm(**values: str) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>write\n{pairs}</tool_call>"


def v31(arguments: str) -> str:
    return (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>"
        f"{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


CALL = hermes({"name": "write", "arguments": {"path": "real"}})
REAL = wrote(path="real")
MARKS = "Use <tool_call>, </tool_call>, <think> and [TOOL_CALLS] here."
FENCE = "Run:\n```python\nprint(1)\n```\n"
JSON = '{"name": "Ada", "age": 36}'

CASES = [
    # a call within reasoning
    Case("unclosed reasoning", "hermes", f"<think>\nI will.\n\n{CALL}", calls=REAL, reasoning="I will."),
    Case("the same in XML", "qwen_xml", f"I will.\n{xml(path='a')}", "", wrote(path="a"), "I will.", begun=True),
    Case("the same in GLM's", "glm", f"I will.{glm(path='a')}", "", wrote(path="a"), "I will.", begun=True),
    Case("and text behind it", "hermes", f"<think>So.\n{CALL}\nDone.", "Done.", REAL, "So."),
    Case("closed reasoning", "hermes", f"<think>Not {CALL} yet.\n</think>\n\nNo.", "No.", [], f"Not {CALL} yet."),
    Case("two calls", "hermes", f"<think>{CALL}\n{CALL}", "", REAL * 2),
    Case("a mention", "hermes", "<think>The <tool_call> tag", "", [], "The <tool_call> tag"),
    Case("a broken call", "hermes", "<think>Hm <tool_call>{broken", "", [], "Hm <tool_call>{broken"),
    Case("a cut call", "hermes", '<think>Hm <tool_call>{"name": "wr', "", [], 'Hm <tool_call>{"name": "wr'),
    Case("nobody's call", "hermes", f"<think>{CALL.replace('write', 'erase')}", "", [], CALL.replace("write", "erase")),
    Case("Mistral's", "mistral", '[THINK]So.[TOOL_CALLS]write[ARGS]{"n": 1}', "", wrote(n=1), "So.", thinks="brackets"),
    # reasoning without an opening tag
    Case("no opening tag", "hermes", "Hm.\n</think>\n\nAnswer.", "Answer.", [], "Hm.", begun=None),
    Case("no tag at all", "hermes", "Hm.\nAnswer. </thin", "Hm.\nAnswer. </thin", [], begun=None),
    Case("an opening tag", "hermes", "<think>\nHm.\n</think>\n\nYes.", "Yes.", [], "Hm.", begun=None),
    Case("a call behind it", "hermes", f"Hm.\n</think>\n\n{CALL}", "", REAL, "Hm.", begun=None),
    Case("a call instead", "hermes", f"I write.\n{CALL}", "I write.", REAL, begun=None),
    Case("a call before it", "hermes", f"I write.\n{CALL}\n</think> x", "I write.</think> x", REAL, begun=None),
    Case("a prompt that closed it", "hermes", "Hm.\n</think>\n\nYes.", "Hm.\n</think>\n\nYes."),
    # the format's marks within an argument
    Case("in JSON", "hermes", hermes({"name": "write", "arguments": {"text": MARKS}}), "", wrote(text=MARKS)),
    Case("in XML", "qwen_xml", xml(text=MARKS), "", wrote(text=MARKS)),
    Case(
        "ends in XML", "qwen_xml", xml(text="</function> </parameter> x"), "", wrote(text="</function> </parameter> x")
    ),
    Case("in GLM's", "glm", glm(text=MARKS, path="a"), "", wrote(text=MARKS, path="a")),
    Case(
        "keys in GLM's",
        "glm",
        glm(text="<arg_key>a</arg_key> </arg_value>"),
        "",
        wrote(text="<arg_key>a</arg_key> </arg_value>"),
    ),
    Case(
        "in DeepSeek's",
        "deepseek",
        v31('{"text": "the <｜tool▁call▁end｜> mark"}'),
        "",
        wrote(text="the <｜tool▁call▁end｜> mark"),
    ),
    Case("in Mistral's", "mistral", f'[TOOL_CALLS]write[ARGS]{{"text": "{MARKS}"}}', "", wrote(text=MARKS)),
    Case(
        "in its list",
        "mistral",
        f'[TOOL_CALLS] [{{"name": "write", "arguments": {{"text": "{MARKS}"}}}}]',
        "",
        wrote(text=MARKS),
    ),
    Case(
        "in Llama's",
        "llama",
        '{"name": "write", "parameters": {"text": "}; {<|python_tag|>"}}',
        "",
        wrote(text="}; {<|python_tag|>"),
    ),
    Case("in Llama 4's", "llama4", "[write(text=')], [read(')]", "", wrote(text=")], [read(")),
    Case("calls in GLM's", "glm", glm(text="</tool_call>\n<tool_call>x"), "", wrote(text="</tool_call>\n<tool_call>x")),
    Case(
        "calls in XML",
        "qwen_xml",
        xml(text="</function>\n</tool_call>\n<tool_call>\n<function=x>"),
        "",
        wrote(text="</function>\n</tool_call>\n<tool_call>\n<function=x>"),
    ),
    # code fences
    Case(
        "a fence in V3.1",
        "deepseek",
        v31(json.dumps({"path": "a.md", "text": FENCE})),
        "",
        wrote(path="a.md", text=FENCE),
    ),
    Case(
        "a fence in V3",
        "deepseek",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{json.dumps({'text': FENCE})}\n```"
        "<｜tool▁call▁end｜>",
        "",
        wrote(text=FENCE),
    ),
    # data that looks like a call
    Case("data in Llama's", "llama", JSON, JSON),
    Case("data in Hermes'", "hermes", f"<tool_call>\n{JSON}\n</tool_call>", f"<tool_call>\n{JSON}\n</tool_call>"),
    Case("a tool's name alone", "llama", '{"name": "write", "age": 36}', '{"name": "write", "age": 36}'),
    Case(
        "a field too many",
        "llama",
        '{"name": "read", "parameters": {}, "x": 1}',
        '{"name": "read", "parameters": {}, "x": 1}',
    ),
    Case("nobody's tool", "hermes", CALL.replace("write", "erase"), CALL.replace("write", "erase")),
    Case(
        "a call within data",
        "llama",
        '{"plan": {"name": "read", "parameters": {}}}',
        '{"plan": {"name": "read", "parameters": {}}}',
    ),
    Case("arguments of another kind", "hermes", hermes({"name": "read", "arguments": [1]}), "", [("read", [1])]),
    Case("arguments written twice", "hermes", hermes({"name": "write", "arguments": '{"n": 1}'}), "", wrote(n=1)),
    Case("no arguments", "hermes", hermes({"name": "read"}), "", [("read", {})]),
    # a function without its opening tag
    Case(
        "bare",
        "qwen_xml",
        f"I write it.\n\n{xml(path='a').removeprefix('<tool_call>').lstrip()}",
        "I write it.",
        wrote(path="a"),
    ),
    Case("bare, nobody's", "qwen_xml", "<function=erase>\n</function>", "<function=erase>\n</function>"),
    Case("bare, a mention", "qwen_xml", "the <function=write> tag", "the <function=write> tag"),
    # types
    Case("behind a reference", "qwen_xml", xml(mode="1"), "", wrote(mode="1")),
    Case("one of several", "glm", glm(maybe="1"), "", wrote(maybe="1")),
    Case("a reference to itself", "glm", glm(endless="1"), "", wrote(endless=1)),
    Case("Python's list", "qwen_xml", xml(tags="['a', 'b']"), "", wrote(tags=["a", "b"])),
    Case("Python's dictionary", "glm", glm(map="{'a': (1, None)}"), "", wrote(map={"a": [1, None]})),
    Case("Python that is no value", "qwen_xml", xml(tags="[f(1)]"), "", wrote(tags="[f(1)]")),
    Case("a line break in JSON's list", "glm", glm(tags='["a\nb"]'), "", wrote(tags=["a\nb"])),
    # line breaks within JSON's strings
    Case("Hermes'", "hermes", CALL.replace("real", "one\ntwo\tthree"), "", wrote(path="one\ntwo\tthree")),
    Case("Mistral's line break", "mistral", '[TOOL_CALLS]write[ARGS]{"text": "a\nb"}', "", wrote(text="a\nb")),
    # an opening tag before the call's own
    Case("quoted", "hermes", f"The <tool_call> tag:\n{CALL}", "The <tool_call> tag:", REAL),
    Case("twice", "hermes", f"<tool_call>\n{CALL}", "<tool_call>", REAL),
    Case("of a broken call", "hermes", f"<tool_call>{{broken\n{CALL}", "<tool_call>{broken", REAL),
    Case("twice in XML", "qwen_xml", f"<tool_call>\n{xml(path='a')}", "<tool_call>", wrote(path="a")),
    Case("twice in GLM's", "glm", f"<tool_call>\n{glm(path='a')}", "<tool_call>", wrote(path="a")),
    Case("of a cut call", "hermes", f'<tool_call>{{"name": "wr {CALL}', '<tool_call>{"name": "wr', REAL),
    # closing tags that are missing
    Case(
        "the last value's",
        "glm",
        glm(path="a", mode="2").replace("2</arg_value>\n", "2"),
        "",
        wrote(path="a", mode="2"),
    ),
    Case("and a call behind it", "glm", glm(path="a").replace("</arg_value>\n", "") * 2, "", wrote(path="a") * 2),
    Case(
        "the last parameter's",
        "qwen_xml",
        xml(path="a", mode="2").replace("\n</parameter>\n</f", "\n</f"),
        "",
        wrote(path="a", mode="2"),
    ),
    Case(
        "another's",
        "qwen_xml",
        xml(path="a", mode="2").replace("\n</parameter>\n<p", "\n<p"),
        "",
        wrote(path="a", mode="2"),
    ),
    Case("nobody's parameter", "qwen_xml", xml(text="a\n<parameter=x>\nb"), "", wrote(text="a\n<parameter=x>\nb")),
    # text around Llama's
    Case(
        "behind",
        "llama",
        '{"name": "write", "parameters": {"path": "a"}}\n\nShall I go on?',
        "Shall I go on?",
        wrote(path="a"),
    ),
    Case("before", "llama", 'I write.\n{"name": "write", "parameters": {"path": "a"}}', "I write.", wrote(path="a")),
    Case("its tag twice", "llama", "So.<|python_tag|><|python_tag|>read.call()", "So.", [("read", {})]),
    Case("code", "llama", "int main() { return 0; }", "int main() { return 0; }"),
    # Llama 4's
    Case("a list", "llama4", "[write(path='a', n=-1), read()]", "", [*wrote(path="a", n=-1), ("read", {})]),
    Case(
        "between its marks",
        "llama4",
        "<|python_start|>[read(map={'a': [True, None]})]<|python_end|>",
        "",
        [("read", {"map": {"a": [True, None]}})],
    ),
    Case("JSON", "llama4", '{"name": "write", "parameters": {"n": 1}}', "", wrote(n=1)),
    Case(
        "as its template has it",
        "llama4",
        'So.<|python_start|><|python_end|>{"name": "write", "parameters": {"n": 1}}',
        "So.",
        wrote(n=1),
    ),
    Case("an escape that Python lacks", "llama4", r"[write(path='\d+')]", "", wrote(path=r"\d+")),
    Case("a computed value", "llama4", "[write(n=1 + f())]", "[write(n=1 + f())]"),
    Case("without a key", "llama4", "[write('a')]", "[write('a')]"),
    Case("nobody's call in Python", "llama4", "[erase()]", "[erase()]"),
    Case("a list of numbers", "llama4", "See [1], [2](url) and [write].", "See [1], [2](url) and [write]."),
    Case("a cut list", "llama4", "[write(path='a'), read(", "[write(path='a'), read("),
]


def read(case: Case, pieces: list[str], **how: Any) -> tuple[str, str, Calls]:
    parser = AnswerParser(reasoning=case.thinks, begun=case.begun, calls=case.form, tools=TOOLS, **how)
    deltas = [*map(parser.feed, pieces), parser.feed("", last=True)]
    calls = [(call.name, json.loads(call.arguments)) for delta in deltas for call in delta.calls]
    return "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas), calls


def cut(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: re.sub(r"\W+", "-", f"{case.form} {case.name}"))
def test_an_answer_is_read_alike_however_it_is_cut(case: Case) -> None:
    for pieces in cut(case.text):
        assert read(case, pieces) == (case.reasoning, case.content, case.calls)


PARTS: dict[ToolFormat, list[str]] = {
    "hermes": [CALL, "<tool_call>", "</tool_call>", '{"name": "write", "x": "', '"}'],
    "qwen_xml": [
        xml(path="a"),
        "<function=write>\n",
        "<parameter=path>\n",
        "\n</parameter>",
        "</function>",
        "</tool_call>",
    ],
    "glm": [glm(path="a"), "<tool_call>write", "<arg_key>n</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "llama4": ["[write(n=1)]", "[write(", "[", "path='", ")]", "<|python_start|>", '{"name": "read"}'],
}


@pytest.mark.parametrize("form", PARTS)
@given(data=st.data())
def test_cuts_change_nothing_and_nothing_vanishes(form: ToolFormat, data: st.DataObject) -> None:
    words = st.sampled_from([*PARTS[form], "<think>", "</think>", "</thi", " ", "\n", "word"])
    text = "".join(data.draw(st.lists(words, max_size=10)))
    case = Case("", form, text, begun=data.draw(st.sampled_from([None, True, False])))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    found = read(case, [text])
    assert found == read(case, pieces) == read(case, list(text))
    if not found[2]:
        kept, written = "".join((found[0] + found[1]).split()), "".join(text.split())
        opened = {written, written.removeprefix("<think>")}
        assert kept in opened | {each.replace("</think>", "", 1) for each in opened}


@pytest.mark.parametrize(
    ("stop", "text", "reasoning", "content", "stopped_by"),
    [
        (
            "Question:",
            "<think>\nIt asks. Question: what?\n</think>\n\nLess.\nQuestion: next",
            "It asks. Question: what?",
            "Less.\n",
            "Question:",
        ),
        ("\n\n", "<think>\na\n\nb\n</think>\n\nOne.\n\nTwo.", "a\n\nb", "One.", "\n\n"),
        ("END", "One. END </think>", "", "One. ", "END"),
        ("END", "Hm. EN</think>END", "Hm. EN", "", "END"),
        ("END", "Hm.</think>EN", "Hm.", "EN", None),
        ("real", f"{CALL}\nreal", "", "", "real"),
    ],
)
def test_a_stop_string_counts_in_the_content_alone(
    stop: str, text: str, reasoning: str, content: str, stopped_by: str | None
) -> None:
    parser = AnswerParser(reasoning="think", begun=None, calls="hermes", tools=TOOLS, stop=[stop])
    found = []
    for piece in [*text, ""]:
        found.append(parser.feed(piece, last=not piece))
        if found[-1].over:
            break
    assert ("".join(d.reasoning for d in found), "".join(d.text for d in found)) == (reasoning, content)
    assert found[-1].stopped_by == stopped_by


ONE_AND_TWO = f"One.\n{CALL}\nTwo."


@pytest.mark.parametrize(
    ("form", "stop", "text", "content", "calls", "stopped_by"),
    [
        ("llama", "\n\n", "int main() {\n\n  return 0;\n}\n", "int main() {", [], "\n\n"),
        ("llama", "DONE", '{"answer": "DONE"} and on', '{"answer": "', [], "DONE"),
        ("llama", "DONE", '{"answer": "DONE', '{"answer": "', [], "DONE"),
        ("hermes", "STOP", '<tool_call>\n{"x": "STOP"}</tool_call>', '<tool_call>\n{"x": "', [], "STOP"),
        ("hermes", "STOP", f"a STOP {CALL}", "a ", [], "STOP"),
        ("hermes", "\n\n", f"One.\n\n{CALL}", "One.", [], "\n\n"),
        ("hermes", "real", ONE_AND_TWO, "One.Two.", REAL, None),
        ("hermes", "Two", ONE_AND_TWO, "One.", REAL, "Two"),
        ("hermes", "One.Two", ONE_AND_TWO, "One.Two.", REAL, None),
        ("hermes", "<tool_call>", ONE_AND_TWO, "One.Two.", REAL, None),
        ("hermes", "<tool_call>", "The <tool_call> tag", "The ", [], "<tool_call>"),
        ("llama4", "[", "See [1].", "See ", [], "["),
    ],
)
def test_a_stop_string_counts_in_what_looked_like_a_call_and_is_none(
    form: ToolFormat, stop: str, text: str, content: str, calls: Calls, stopped_by: str | None
) -> None:
    for pieces in cut(text):
        assert stopped(form, pieces, [stop]) == (content, calls, stopped_by), pieces


def stopped(form: ToolFormat, pieces: list[str], stop: list[str], free: int = 0) -> tuple[str, Calls, str | None]:
    """What is read up to a stop string. `free`: pieces in which none counts."""
    parser, texts, calls = AnswerParser(calls=form, tools=TOOLS, stop=stop), "", []
    for number, piece in enumerate([*pieces, ""]):
        found = parser.feed(piece, checked=number >= free, last=number == len(pieces))
        texts += found.text
        calls += [(call.name, json.loads(call.arguments)) for call in found.calls]
        if found.over:
            return texts, calls, found.stopped_by
    return texts, calls, None


@pytest.mark.parametrize(
    ("pieces", "content", "stopped_by"),
    [
        (['{"a": "END', '"} on'], '{"a": "END"} on', None),
        (['{"a": "END', '"} on END'], '{"a": "END"} on ', "END"),
        (['{"a": "EN', 'D"}'], '{"a": "END"}', None),
    ],
)
def test_what_looked_like_a_call_before_stop_strings_count_ends_nothing(
    pieces: list[str], content: str, stopped_by: str | None
) -> None:
    assert stopped("llama", pieces, ["END"], free=1) == (content, [], stopped_by)


@pytest.mark.parametrize("form", PARTS)
@given(data=st.data())
def test_a_stop_string_ends_an_answer_alike_however_it_is_cut(form: ToolFormat, data: st.DataObject) -> None:
    words = st.lists(st.sampled_from([*PARTS[form], " ", "\n", "word", "END"]), max_size=8)
    text = "".join(data.draw(words))
    stop = data.draw(st.lists(st.sampled_from(["END", "\n", "d<", "<tool_call>", "[", "x"]), min_size=1, max_size=2))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    found = stopped(form, [text], stop)
    assert found == stopped(form, list(text), stop)
    assert found == stopped(form, [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])], stop)
    if not found[1]:
        assert not any(each in found[0] for each in stop), "none is left in what is no call"


@pytest.mark.parametrize(
    ("form", "text", "read"),
    [
        ("hermes", f"<think>The </tool_call> tag.</think>The </tool_call>.\n{CALL}\n{CALL}", f"\n{CALL}"),
        ("hermes", f"<think>{CALL}</think>{CALL}\n{CALL}", "</think>" + CALL),
        ("qwen_xml", f"{xml(path='a')}\n{xml(path='b')}", xml(path="a")),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"n": 1}[TOOL_CALLS]read[ARGS]{}', '{"n": 1}'),
        ("llama", '{"name": "read", "parameters": {}}; {"name": "read", "parameters": {}}', '"parameters": {}}'),
        ("llama4", "[read(), write(n=1)] and so on", "[read(), write(n=1)]"),
    ],
)
def test_an_answer_of_one_call_is_over_with_it(form: ToolFormat, text: str, read: str) -> None:
    """`read`: the end of what is read."""
    parser = AnswerParser(reasoning="think", calls=form, tools=TOOLS, one_call=True)
    at, found = 0, parser.feed("")
    while not found.over:
        at, found = at + 1, parser.feed(text[at])
    assert (len(found.calls), found.stopped_by) == (1, None)
    assert text[:at].endswith(read)
    assert at < len(text)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hermes", "glm", "llama4"])
def test_the_cost_of_a_piece_does_not_grow_with_the_argument(form: ToolFormat) -> None:
    """If the text is read again, or copied, with each piece, a piece of ten times the text costs seven times."""
    assert any(cost(form, 200_000) < 4 * cost(form, 20_000) for _ in range(5))


def cost(form: ToolFormat, size: int) -> float:
    """Seconds of the processor for each piece of a call of that many characters."""
    text = 'def f(x):\n    return x + 1  # <b> & "q" [1] {2}\n' * (size // 46)
    call = {
        "hermes": hermes({"name": "write", "arguments": {"text": text}}),
        "glm": glm(text=text),
        "llama4": f"[write(text={text!r})]",
    }[form]
    pieces = [call[at : at + 4] for at in range(0, len(call), 4)]
    began = time.process_time()
    assert read(Case("", form, call), pieces) == ("", "", wrote(text=text))
    return (time.process_time() - began) / len(pieces)
