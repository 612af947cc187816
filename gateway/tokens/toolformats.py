"""The formats of tool calls that models write: the marks that begin and end a call, and what stands between. Pure.

- `hermes` (Hermes, Qwen 2.5 and 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`;
- `qwen_xml` (Qwen3-Coder, Qwen 3.5 and later):
  `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`;
- `glm` (GLM-4.5 and later): `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`;
- `deepseek` (V3, R1, V3.1): a name and JSON arguments between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`;
- `mistral`: `[TOOL_CALLS]` and a JSON list of calls, or `[TOOL_CALLS]NAME[ARGS]{...}` for each;
- `llama` (Llama 3): `{"name": ..., "parameters": {...}}`, several joined by `;`; after `<|python_tag|>` also
  `NAME.call(KEY=VALUE)`;
- `llama4`: `[NAME(KEY=VALUE), ...]`, perhaps between `<|python_start|>` and `<|python_end|>`; or Llama 3's JSON behind
  these, as its own template writes earlier calls.

A call is read by a *scan*, which begins at its opening mark and follows the text as it grows.

Invariants:
- a scan finds calls only of the request's tools, and only where nothing of what was written is lost;
- a value ends by its own syntax (JSON by its brackets, a tagged value by its tags in their order), so that the
  format's marks may stand within it;
- what a scan finds does not depend on how the text is cut.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from gateway.tokens.arguments import Tool as Tool
from gateway.tokens.arguments import expression, literal, properties_of, typed
from gateway.tokens.scanning import NOWHERE, BracketEnd, JsonEnd
from gateway.tokens.values import NotJson, parse

ToolFormat = Literal["hermes", "qwen_xml", "glm", "deepseek", "mistral", "llama", "llama4", "none"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER = "<function=", "</function>", "<parameter=", "</parameter>"
ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, CALL_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
MARKERS = (
    *(OPEN, CLOSE, PYTHON_TAG, PYTHON_START, PYTHON_END, TOOL_CALLS, ARGS, CALL_ID),
    *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, CALL_SEP, ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE),
)
"""Tokens that a parser has to see even where the vocabulary declares them special."""

SPACE_MAX = 256
"""White space that may stand between the marks of a call: more is no call. So it is not looked at again and again."""
NAME_MAX = 256
"""Characters of a name, before it is known whether it is a tool's."""
_GAP = re.compile(rf"\s{{0,{SPACE_MAX}}}")

Call = tuple[str, str]
"""A name and its arguments as JSON text."""
Tools = Mapping[str, Tool] | None
"""The request's tools by name; None where calls of any name are taken."""


class Found(NamedTuple):
    """What a scan came to. No `calls`: it was none, and the next may begin at `end`."""

    end: int
    calls: Sequence[Call] = ()


class Scan(Protocol):
    """One possible call, from behind its opening mark."""

    def read(self, text: str, last: bool) -> Found | None:
        """None: more of the text must come. `last`: none will. `text` is what was given before, and what follows."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """`opens`: the marks that begin a call, and how it is read from there. `before`, `after`: marks that may stand
    around calls, and belong to them."""

    opens: Mapping[str, Callable[[int, Tools], Scan]]
    before: Sequence[str] = ()
    after: str = ""
    opener: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "opener", re.compile("|".join(map(re.escape, self.opens))))


def _follow(text: str, at: int, marks: Sequence[str], last: bool) -> int | None:
    """The index behind `marks`, which follow in this order, with white space before each; None while they may come, or
    NOWHERE. The last one need not be there where the answer ends: the model may end its turn instead."""
    for number, mark in enumerate(marks, 1):
        at = _end_of_gap(text, at)
        if text.startswith(mark, at):
            at += len(mark)
        elif not mark.startswith(text[at:]):
            return NOWHERE
        else:
            return (len(text) if number == len(marks) else NOWHERE) if last else None
    return at


def _end_of_gap(text: str, at: int) -> int:
    found = _GAP.match(text, at)
    assert found is not None  # it matches nothing as well
    return found.end()


# JSON and Python: a head, a value in brackets, and marks behind it


@dataclass(frozen=True, slots=True)
class _Bracketed:
    """`head`: what is before the value's first character: a `name`, and a `fence` that `tail` closes. `waits`: whatever
    may become a head."""

    head: re.Pattern[str]
    waits: re.Pattern[str]
    tail: Sequence[str] = ()
    finder: type[JsonEnd] | type[BracketEnd] = JsonEnd
    calls: Callable[[str, str, Tools], Sequence[Call]] = lambda name, value, tools: _json_calls(name, value, tools)

    def __call__(self, at: int, tools: Tools) -> Scan:
        return _BracketScan(self, at, tools)


class _BracketScan:
    __slots__ = ("_at", "_end", "_finder", "_form", "_name", "_tail", "_tools", "_value_at")

    def __init__(self, form: _Bracketed, at: int, tools: Tools) -> None:
        self._form, self._at, self._tools = form, at, tools
        self._finder: JsonEnd | BracketEnd | None = None
        self._end: int | None = None
        self._name, self._value_at = "", 0
        self._tail: Sequence[str] = ()

    def read(self, text: str, last: bool) -> Found | None:
        broken = Found(self._at)
        if self._finder is None:
            head = self._form.head.match(text, self._at)
            if head is None:
                return None if self._form.waits.match(text, self._at) else broken
            groups, self._value_at = head.groupdict(), head.end()
            self._name = groups.get("name") or ""
            self._tail = (FENCE, *self._form.tail) if groups.get("fence") else self._form.tail
            self._finder = self._form.finder(self._value_at)
        if self._end is None:
            self._end = self._finder.find(text)
        if self._end is None or self._end == NOWHERE:
            return None if self._end is None else broken
        tail = _follow(text, self._end, self._tail, last)
        if tail is None:
            return None
        calls = self._form.calls(self._name, text[self._value_at : self._end], self._tools) if tail != NOWHERE else ()
        return Found(tail, calls) if calls else Found(self._end)  # what is within a value is no call of its own


_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
"""What a call in JSON may have: any other field would be lost, so that it is none."""


def _json_calls(name: str, value: str, tools: Tools) -> Sequence[Call]:
    """Of `name` with the arguments `value`; without one, of the calls that the value has. All of them, or none."""
    try:
        found = parse(value, strict=False)
    except NotJson:
        return ()
    wanted = [{"name": name, "arguments": found}] if name else found if isinstance(found, list) else [found]
    calls = [call for each in wanted if (call := _json_call(each, tools)) is not None]
    return calls if len(calls) == len(wanted) else ()


def _json_call(value: Any, tools: Tools) -> Call | None:
    if not isinstance(value, dict) or not _CALL_KEYS.issuperset(value) or {"arguments", "parameters"} <= value.keys():
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not _is_tool(name, tools):
        return None
    # What is no object is the agent's to answer. A text is JSON that was written twice, or such a mistake.
    return name, arguments if isinstance(arguments, str) else _json(arguments)


def _python_calls(name: str, value: str, tools: Tools) -> Sequence[Call]:
    """Of `name` with the keywords that `value` has in brackets; without one, of the list of calls that the value is."""
    try:
        found = expression(f"{name}{value}")
    except NotJson:
        return ()
    wanted = [found] if name else found.elts if isinstance(found, ast.List) else []
    calls = [call for each in wanted if (call := _python_call(each, tools)) is not None]
    return calls if len(calls) == len(wanted) else ()


def _python_call(call: ast.expr, tools: Tools) -> Call | None:
    if not isinstance(call, ast.Call) or call.args:
        return None
    name, arguments = ast.unparse(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    if None in arguments or len(arguments) < len(call.keywords) or not _is_tool(name, tools):
        return None
    try:
        return name, _json({key: literal(value) for key, value in arguments.items()})
    except NotJson:
        return None


def _is_tool(name: str, tools: Tools) -> bool:
    return bool(name) and (tools is None or name in tools)


# Tags: a name, then keys and values, each between its own tags


@dataclass(frozen=True, slots=True)
class _Tagged:
    """`head`: the name, up to the first key or the end. `key`: from behind the gap to the value's first character.

    `begins`, `ends`: the marks that begin a call, up to its head, and those that end it. `ends_itself`: the last of
    these need not be there where the answer ends.
    """

    head: re.Pattern[str]
    waits: re.Pattern[str]
    key: re.Pattern[str]
    key_waits: re.Pattern[str]
    next_key: str
    close: str
    begins: Sequence[str]
    ends: Sequence[str]
    ends_itself: bool
    lines: bool
    """A value has lines of its own, and another parameter of the schema may begin before it is closed."""

    def __call__(self, at: int, tools: Tools) -> Scan:
        return _TagScan(self, at, tools)


class _TagScan:
    """A value ends with its closing tag, if another key or the end of the call follows; so it may hold any mark.

    A value without its closing tag ends with the call's: taken where the next call or the end of the answer follows,
    and no closing tag came.
    """

    __slots__ = ("_at", "_early", "_form", "_key", "_look", "_look_early", "_name", "_pairs", "_start", "_tools")

    def __init__(self, form: _Tagged, at: int, tools: Tools) -> None:
        self._form, self._start, self._at, self._tools = form, at, at, tools
        self._name: str | None = None
        self._key: str | None = None  # of the value that is open
        self._pairs: list[tuple[str, str]] = []
        self._look = self._look_early = 0  # within an open value: from where its end is looked for
        self._early: tuple[int, int] | None = None  # where it ends without its closing tag, and where the call does

    def read(self, text: str, last: bool) -> Found | None:
        form, broken = self._form, Found(self._start)
        if self._name is None:
            head = form.head.match(text, self._at)
            if head is None:
                return None if form.waits.match(text, self._at) else broken
            self._name, self._at = head["name"].strip(), head.end()
            if not _is_tool(self._name, self._tools):
                return broken
        while True:
            if self._key is None:
                end = self._end(text, self._at, last)
                if end is not None and end != NOWHERE:
                    return self._found(end)
                at = _end_of_gap(text, self._at)
                key = form.key.match(text, at)
                if key is None:
                    return None if end is None or form.key_waits.match(text, at) else broken
                self._key, self._early = key["key"].strip(), None
                self._at = self._look = self._look_early = key.end()
            early = self._look_for_early(text, last)
            closed = self._look_for_close(text, last)
            if early is not None and (closed is None or closed > early[0]):
                self._take(text[self._at : early[0]])
                return self._found(early[1])
            if closed is None:
                return None
            self._take(text[self._at : closed])
            self._at = closed + len(form.close)

    def _end(self, text: str, at: int, last: bool) -> int | None:
        return _follow(text, at, self._form.ends, last and self._form.ends_itself)

    def _look_for_close(self, text: str, last: bool) -> int | None:
        close = self._form.close
        while (at := text.find(close, self._look)) >= 0:
            behind = at + len(close)
            key, end = _follow(text, behind, (self._form.next_key,), False), self._end(text, behind, last)
            if (key or NOWHERE) > 0 or (end or NOWHERE) > 0:
                return at
            self._look = at
            if key is None or end is None:
                return None
            self._look = behind
        self._look = max(self._look, len(text) - len(close) + 1)
        return None

    def _look_for_early(self, text: str, last: bool) -> tuple[int, int] | None:
        """The value's end by the call's first end within it, once it is certain that it is one."""
        mark = self._form.ends[0]
        while self._early is None:
            at = text.find(mark, self._look_early)
            if at < 0:
                self._look_early = max(self._look_early, len(text) - len(mark) + 1)
                return None
            end = self._end(text, at, last)
            self._look_early = at
            if end is None:
                return None
            self._look_early = at + len(mark)
            if end != NOWHERE:
                self._early = (at, end)
        return self._early if last or self._another_begins(text, self._early[1]) else None

    def _another_begins(self, text: str, at: int) -> bool:
        """Whether a call of the request's tools does: a value may have several calls that it only shows."""
        behind = _follow(text, at, self._form.begins, False)
        head = None if behind is None or behind == NOWHERE else self._form.head.match(text, behind)
        return head is not None and _is_tool(head["name"], self._tools)

    def _take(self, value: str) -> None:
        assert self._key is not None
        key, self._key = self._key, None
        if not self._form.lines:
            self._pairs.append((key, value))
            return
        for name in self._unclosed(value):
            before, _, value = value.partition(f"\n{PARAMETER}{name}>\n")
            self._pairs.append((key, before.removeprefix("\n")))
            key, value = name, f"\n{value}"
        self._pairs.append((key, value.removeprefix("\n").removesuffix("\n")))

    def _unclosed(self, value: str) -> list[str]:
        """The parameters that begin within a value, on lines of their own: those of the schema that were not given."""
        tool = None if self._tools is None else self._tools.get(self._name or "")
        if tool is None or PARAMETER not in value:
            return []
        missing = properties_of(tool)[0].keys() - {key for key, _ in self._pairs}
        return [name for name in dict.fromkeys(_UNCLOSED.findall(value)) if name in missing]

    def _found(self, end: int) -> Found:
        assert self._name is not None
        tool = (self._tools or {}).get(self._name, {})
        return Found(end, [(self._name, _json(typed(self._pairs, tool)))])


_UNCLOSED = re.compile(rf"\n{PARAMETER}([^<>\s]{{1,{NAME_MAX}}})>(?=\n)")

_NAME = rf"(?P<name>[^<>\[\]{{}}\s]{{1,{NAME_MAX}}})"
_NAME_WAITS = rf"[^<>\[\]{{}}\s]{{0,{NAME_MAX}}}"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.replace(" ", rf"\s{{0,{SPACE_MAX}}}"))


def _beginning(*marks: str) -> str:
    """A pattern of the beginnings of each mark, the empty one included."""
    found = ""
    for char in reversed("".join(marks)):
        found = f"(?:{re.escape(char)}{found})?"
    return found


_IDENTIFIER = rf"[A-Za-z_][\w.]{{0,{NAME_MAX}}}"


def _at_mark(form: _Bracketed) -> Callable[[int, Tools], Scan]:
    """Of a mark of one character that the value itself begins with."""
    return lambda at, tools: form(at - 1, tools)


_JSON_CALL = _at_mark(_Bracketed(_pattern("(?=[{])"), _pattern(r"\Z")))
SYNTAX: Mapping[ToolFormat, Syntax] = {
    "hermes": Syntax({OPEN: _Bracketed(_pattern(r" (?=[{\[])"), _pattern(r" \Z"), (CLOSE,))}),
    "qwen_xml": Syntax(
        {
            FUNCTION: _Tagged(
                _pattern(f"{_NAME}>"),
                _pattern(rf"{_NAME_WAITS}\Z"),
                _pattern(rf"{PARAMETER}(?P<key>[^<>\n]{{1,{NAME_MAX}}})>"),
                _pattern(rf"(?:{_beginning(PARAMETER)}|{PARAMETER}[^<>\n]{{0,{NAME_MAX}}})\Z"),
                next_key=PARAMETER,
                close=END_PARAMETER,
                begins=(OPEN, FUNCTION),
                ends=(END_FUNCTION, CLOSE),
                ends_itself=True,
                lines=True,
            )
        },
        before=(OPEN,),
    ),
    "glm": Syntax(
        {
            OPEN: _Tagged(
                _pattern(rf" {_NAME} (?={ARG_KEY}|{CLOSE})"),
                _pattern(rf" {_NAME_WAITS} (?:{_beginning(ARG_KEY)}|{_beginning(CLOSE)})\Z"),
                _pattern(rf"{ARG_KEY}(?P<key>[^<>\n]{{1,{NAME_MAX}}}){END_ARG_KEY} {ARG_VALUE}"),
                _pattern(
                    rf"(?:{_beginning(ARG_KEY)}|{ARG_KEY}[^<>\n]{{0,{NAME_MAX}}}"
                    rf"(?:{_beginning(END_ARG_KEY)}|{END_ARG_KEY} {_beginning(ARG_VALUE)}))\Z"
                ),
                next_key=ARG_KEY,
                close=END_ARG_VALUE,
                begins=(OPEN,),
                ends=(CLOSE,),
                ends_itself=False,
                lines=False,
            )
        }
    ),
    "deepseek": Syntax(
        {
            CALL_BEGIN: _Bracketed(
                _pattern(rf" (?:\w{{1,{NAME_MAX}}}{CALL_SEP} )?{_NAME} (?:{CALL_SEP}|(?P<fence>```json)) (?={{)"),
                _pattern(
                    rf" {_NAME_WAITS} {_beginning(CALL_SEP)}\Z"
                    rf"| {_NAME_WAITS}{CALL_SEP} {_NAME_WAITS} {_beginning('```json')} \Z"
                ),
                (CALL_END,),
            )
        },
        before=(CALLS_BEGIN,),
        after=CALLS_END,
    ),
    "mistral": Syntax(
        {
            TOOL_CALLS: _Bracketed(
                _pattern(rf" (?:{_NAME}(?:\[CALL_ID\]\w{{1,{NAME_MAX}}})?\[ARGS\] (?={{)|(?=\[))"),
                _pattern(
                    rf" {_NAME_WAITS}(?:{_beginning(ARGS)}|\[ARGS\] |{_beginning(CALL_ID)}"
                    rf"|\[CALL_ID\]\w{{0,{NAME_MAX}}}(?:{_beginning(ARGS)}|\[ARGS\] ))\Z"
                ),
            )
        }
    ),
    "llama": Syntax(
        {
            "{": _JSON_CALL,
            PYTHON_TAG: _Bracketed(
                _pattern(rf" (?P<name>{_IDENTIFIER}?)\.call(?=\()"),
                _pattern(rf" (?:{_IDENTIFIER})?\Z"),
                finder=BracketEnd,
                calls=_python_calls,
            ),
        },
        before=(PYTHON_TAG,),
        after=";",
    ),
    "llama4": Syntax(
        {
            "{": _JSON_CALL,
            "[": _at_mark(
                _Bracketed(
                    _pattern(rf"(?=\[ {_IDENTIFIER} \()"),
                    _pattern(rf"\[ (?:{_IDENTIFIER} )?\Z"),
                    finder=BracketEnd,
                    calls=_python_calls,
                )
            ),
        },
        before=(PYTHON_START, PYTHON_END),
        after=PYTHON_END,
    ),
}


def format_of(source: str) -> ToolFormat:
    """The format that a chat template writes calls in, by its marks; "none" for one that is not known."""
    if FUNCTION in source and PARAMETER in source:
        return "qwen_xml"
    if ARG_KEY in source:
        return "glm"
    if OPEN in source:
        return "hermes"
    if CALL_BEGIN in source:
        return "deepseek"
    if TOOL_CALLS in source:
        return "mistral"
    if "<|header_start|>" in source:
        return "llama4"
    return "llama" if PYTHON_TAG in source or '"parameters"' in source else "none"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
