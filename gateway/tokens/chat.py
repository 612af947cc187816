"""One chat template with what it makes of messages: how it takes them, and what it drops.

A template writes what it was made to write. One iterates over the parts of a content and finds none in a string; one
reads the first system message alone. So each role and shape is rendered once with a mark in place of its text: as a
string, and where the mark is missing then, as a list of parts. A mark is one word of ASCII, which trimming and escaping
leave as it is. What a template does with some conversations only (long ones, certain arguments or texts) no mark shows:
so each rendering is searched for the texts that it was made from, each in a place of its own.

Invariants:
- no prompt lacks the text of one of its messages: a request that would is refused by name;
- reasoning is the exception: templates drop it by a rule of their own (Qwen3 before the last question), and
  `Probe.no_reasoning` names where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from gateway.tokens.bridge import arguments_object, content_text
from gateway.tokens.reasoning import TAGS, ReasoningFormat, reasoning_format_of
from gateway.tokens.template import ChatTemplate, Message
from gateway.tokens.toolcalls import ToolCallParser
from gateway.tokens.toolformats import Tool, ToolFormat, format_of
from protos.errors import InvalidRequest

Form = Literal["string", "parts"]

TOOL_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Qwen2.5's wording, added to the system message for models whose template has no tools (SmolLM2)."""

DEEPSEEK_TOOL_PROMPT = """\
## Tools

You may call one or more of these functions, each described by a line of JSON:
{tools}

A call has this form, with the arguments as a JSON object:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
ARGUMENTS
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""
"""The same in the format of templates that write calls and list no tools (DeepSeek V3 and R1)."""

MARK, OTHER = "LAMINARmarkA", "LAMINARmarkB"


def _call(number: int, name: str, argument: str) -> dict[str, Any]:
    arguments = {"key": argument}
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _calling(*calls: dict[str, Any], text: str | None = None, **more: str) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": list(calls), **more}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": text}


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of message, as a conversation that has it with `marks` as its texts. `mend`: what would be right."""

    what: str
    mend: str
    messages: Sequence[Message]
    marks: tuple[str, ...] = (MARK,)


_ASKED: Message = {"role": "user", "content": "?"}
_ANSWERED: Message = {"role": "assistant", "content": "!"}
_SYSTEM: Message = {"role": "system", "content": MARK}
_ONE, _TWO = _call(1, "first", "x"), _call(2, "second", "y")
_BOTH = (MARK, OTHER)
_REPAIR = "repair the template"
SHAPES: Mapping[str, Shape] = {
    "user": Shape("a user's message", _REPAIR, [{**_ASKED, "content": MARK}]),
    "system": Shape("a system message", "put its text into the user's message", [_SYSTEM, _ASKED]),
    "assistant": Shape("an answer", _REPAIR, [_ASKED, {**_ANSWERED, "content": MARK}, _ASKED]),
    "tool": Shape("a call's result", "send it as a user's message", [_ASKED, _calling(_ONE), _result(1, MARK)]),
    "second system": Shape(
        "a second system message",
        "send one system message with both texts",
        [{**_SYSTEM, "content": OTHER}, _SYSTEM, _ASKED],
        _BOTH,
    ),
    "late system": Shape(
        "a system message behind the first question",
        "put its text into the first system message, or into a user's",
        [_ASKED, _ANSWERED, _SYSTEM, _ASKED],
    ),
    "call": Shape(
        "a call", "send it as the answer's text", [_ASKED, _calling(_call(1, OTHER, MARK)), _result(1, "!")], _BOTH
    ),
    "calls": Shape(
        "a second call of one answer",
        "let each answer make one call (`parallel_tool_calls`: false)",
        [_ASKED, _calling(_ONE, _call(2, OTHER, MARK)), _result(1, "!"), _result(2, "!")],
        _BOTH,
    ),
    "text and call": Shape(
        "the text or the calls of an answer that has both",
        "send one of them",
        [_ASKED, _calling(_call(1, OTHER, "x"), text=MARK), _result(1, "!")],
        _BOTH,
    ),
    "results": Shape(
        "a second result",
        "let each answer make one call (`parallel_tool_calls`: false)",
        [_ASKED, _calling(_ONE, _TWO), _result(1, OTHER), _result(2, MARK)],
        _BOTH,
    ),
}
"""The first four, in this order, show the form of their roles, which are those of the API."""
LONGER = Shape(
    "the text beside some calls of a longer history",
    "",
    [
        _ASKED,
        _calling(_ONE, text=MARK),
        _result(1, "!"),
        _calling(_TWO, text=OTHER),
        _result(2, "!"),
        _ANSWERED,
        _ASKED,
    ],
    _BOTH,
)
"""Which ones depends on the messages around it (DeepSeek V3, gpt-oss): so it is told, and each rendering decides."""
ROLES = ("user", "system", "assistant", "tool")
TOOLS: Sequence[Tool] = [
    {"type": "function", "function": {"name": OTHER, "description": MARK, "parameters": {"type": "object"}}}
]
REASONING: Mapping[str, Sequence[Message]] = {
    "before the last question": [_ASKED, {**_ANSWERED, "reasoning_content": MARK}, _ASKED],
    "beside calls since then": [_ASKED, _calling(_ONE, reasoning_content=MARK), _result(1, "!")],
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that templates have for an answer's reasoning (Qwen and others, Gemma 4, gpt-oss)."""
REASONING_ENDS = (*(end for _, end in TAGS.values()), "<channel|>")
"""What ends reasoning within an answer's text; templates that know it drop the text before."""


@dataclass(frozen=True, slots=True)
class Probe:
    """`forms`: how the content of each role is given. `dropped`: the names of shapes that lose a text. `no_tools`: the
    descriptions of tools are lost. `no_reasoning`: where earlier answers' reasoning is not in the prompt."""

    forms: Mapping[str, Form]
    dropped: frozenset[str]
    no_tools: bool
    no_reasoning: tuple[str, ...]


class Chat:
    """Renders conversations of the API. Immutable, and it probes its template once."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls: the template's, or "none" if what it writes as a call is not read as one; Hermes'
        where it has no calls."""
        form = self._marked_format
        try:
            prepared = self._in_forms(self._prepared(SHAPES["call"].messages), self.probe.forms)
            written = self._rendered(prepared, None, False)
        except InvalidRequest:  # it refuses this conversation, so that its marks have to do
            return form
        parser = ToolCallParser(form, TOOLS)
        return form if (parser.feed(written).calls or parser.finish().calls) else "none"

    @property
    def _marked_format(self) -> ToolFormat:
        return format_of(self.template.source) if self.template.knows_calls else "hermes"

    @property
    def reasoning_format(self) -> ReasoningFormat:
        return reasoning_format_of(self.template.source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        new: int | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The rendering. Raises InvalidRequest where the template refuses these messages, and where it drops a message
        of the last `new` ones, or of all, by its shape."""
        found = self.probe
        _check_shapes(found, messages, 0 if new is None else len(messages) - new, tools)
        prepared = self._in_forms(self._prepared(messages, tools), found.forms)
        return self._rendered(prepared, tools, add_generation_prompt, template_kwargs)

    def check(self, messages: Sequence[Message], rendered: str, new: int | None = None) -> None:
        """Raises InvalidRequest unless the text of each message, or of the last `new` ones, stands in the rendering."""
        position = _lost(messages, 0 if new is None else len(messages) - new, rendered)
        if position is not None:
            raise InvalidRequest(
                f"{_named(messages, position)}: this model's chat template does not write its text into the prompt",
                hint="it depends on the text, the messages around it, or `chat_template_kwargs`: change one of them",
            )

    @property
    def notes(self) -> list[str]:
        """What an operator has to know of the template."""
        found, notes = self.probe, list[str]()
        if found.no_reasoning:
            notes.append(f"leaves out the reasoning of earlier answers {' and '.join(found.no_reasoning)}")
        lost = [shape.what for name, shape in SHAPES.items() if name in found.dropped]
        if not found.dropped & {"call", "text and call"} and self._writes(LONGER, found.forms) is False:
            lost.append(LONGER.what)
        if lost or found.no_tools:
            names = ", ".join(lost + ["descriptions of tools"] * found.no_tools)
            notes.append(f"drops {names}: requests with such are refused")
        return notes

    @cached_property
    def probe(self) -> Probe:
        forms: dict[str, Form] = dict.fromkeys(ROLES, "string")
        for role in ROLES:
            as_parts: dict[str, Form] = {**forms, role: "parts"}
            if not self._writes(SHAPES[role], forms) and self._writes(SHAPES[role], as_parts):
                forms = as_parts
        lost = [name for name, shape in SHAPES.items() if self._writes(shape, forms) is False]
        thoughts = [at for at, messages in REASONING.items() if not self._writes(Shape("", "", messages), forms)]
        no_tools = self._writes(Shape("", "", [_ASKED], _BOTH), forms, TOOLS) is False
        return Probe(forms, frozenset(lost), no_tools, tuple(thoughts))

    def _writes(self, shape: Shape, forms: Mapping[str, Form], tools: Sequence[Tool] | None = None) -> bool | None:
        """Whether all marks stand in the rendering, and not as the Python of a list; None: the template refuses the
        conversation, as it will any like it, in its own words."""
        try:
            prepared = self._in_forms(self._prepared(shape.messages, tools), forms)
            rendered = self._rendered(prepared, tools, False)
        except InvalidRequest:
            return None
        return all(mark in rendered and f"'text': '{mark}" not in rendered for mark in shape.marks)

    def _rendered(
        self,
        prepared: Sequence[Message],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return self.template.render(
            prepared,
            tools=tools if self.template.knows_tools else None,
            add_generation_prompt=add_generation_prompt,
            kwargs=kwargs,
        )

    def _prepared(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[dict[str, Any]]:
        """Messages in the template's words, with contents as strings."""
        prepared = [self._message(message) for message in messages]
        if self.template.knows_tools or not tools:
            return prepared
        return _with_tool_prompt(prepared, tools, self._marked_format)

    def _message(self, message: Message) -> dict[str, Any]:
        out: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
        calls = out.pop("tool_calls", None) or ()
        out["content"] = content_text(message.get("content"))
        given = [out.pop(name) for name in REASONING_FIELDS if name in out]
        if reasoning := next(filter(None, given), ""):
            out.update(dict.fromkeys(self.template.names.intersection(REASONING_FIELDS), reasoning))
        if calls and self.template.knows_calls:
            out["tool_calls"] = [_template_call(call, self.template.takes_objects) for call in calls]
            out["content"] = out["content"] or (None if self.template.knows_no_content else "")
        elif calls:
            texts = [out["content"], *(hermes_text(call["function"]) for call in calls)]
            out["content"] = "\n".join(filter(None, texts))
        return out

    def _in_forms(self, prepared: list[dict[str, Any]], forms: Mapping[str, Form]) -> list[dict[str, Any]]:
        for message in prepared:
            if forms.get(message["role"]) == "parts" and message["content"] is not None:
                message["content"] = [{"type": "text", "text": message["content"]}]
        return prepared


def _check_shapes(found: Probe, messages: Sequence[Message], first: int, tools: Sequence[Tool] | None) -> None:
    for position in range(first if found.dropped else len(messages), len(messages)):
        for name in _shapes_of(messages, position):
            if name in found.dropped:
                shape = SHAPES[name]
                drops = f"this model's chat template drops {shape.what}"
                raise InvalidRequest(f"{_named(messages, position)}: {drops}", hint=shape.mend)
    if tools and (found.no_tools or found.dropped & {"call", "tool"}):
        lost = "the descriptions of tools" if found.no_tools else "calls or their results"
        raise InvalidRequest(
            f"`tools`: this model's chat template drops {lost}",
            hint="leave them out, or give the model a chat template for tools",
        )


def _shapes_of(messages: Sequence[Message], position: int) -> Iterator[str]:
    """The names of a message's shapes."""
    message = messages[position]
    role, calls = message["role"], message.get("tool_calls") or ()
    if calls:
        yield "call"
        if len(calls) > 1:
            yield "calls"
    if not content_text(message.get("content")):
        return
    yield "text and call" if calls else role
    if role == "system" and position:
        yield "second system" if messages[position - 1]["role"] == "system" else "late system"
    if role == "tool" and messages[position - 1]["role"] == "tool":
        yield "results"


def _named(messages: Sequence[Message], position: int) -> str:
    return f"message {position} ({messages[position]['role']})"


def _lost(messages: Sequence[Message], first: int, rendered: str) -> int | None:
    """The position of the first message, from `first` on, whose text the rendering lacks.

    No two texts are found in one place: else a short one would be found within a longer one. They stand in their order,
    but for a role that the template moves. Then either of its texts and the others may have the other within it, so
    that it is tried which are to be placed first.
    """
    owed = [(at, messages[at]["role"], _owed(messages[at])) for at in range(first, len(messages))]
    orders = [[owed]]
    for moved in MOVED_ROLES:
        if its := [each for each in owed if each[1] == moved]:
            others = [each for each in owed if each[1] != moved]
            orders += [[its, others], [others, its]]
    if any(_not_placed(order, rendered, ESCAPES) is None for order in orders):
        return None
    bare = _bare(rendered)
    if any(_not_placed(order, bare, BARE_ESCAPES) is None for order in orders):
        return None
    return _too_few(owed, bare)


def _too_few(owed: Sequence[tuple[int, str, str]], bare: str) -> int | None:
    """The position of a text that the rendering has less often than all texts together, or None.

    Whatever a template moves, texts that all stand there have no part of each other's places, so that none is too few.
    Beyond `COUNTED_MAX` characters none is counted any more.
    """
    together = "\0".join(text for _, _, text in owed)
    positions = {text: at for at, _, text in owed}  # of equal ones the last
    counted = 0
    for text, at in positions.items():
        forms = {escape(text) for escape in BARE_ESCAPES} - {""}
        counted += len(together) + len(forms) * len(bare)
        if counted > COUNTED_MAX:
            return None
        if forms and sum(map(bare.count, forms)) < together.count(text):
            return at
    return None


def _not_placed(
    order: Sequence[Sequence[tuple[int, str, str]]], rendered: str, escapes: Sequence[Escape]
) -> int | None:
    """The position of the first text for which there is no place behind the one before, or None. `order`: groups, each
    of which begins anew, where no earlier one is; of a text its position, its role and itself."""
    taken: list[tuple[int, int]] = []
    for group in order:
        places = _Places(rendered, taken, escapes)
        for at, role, text in group:
            if not places.take(role, text):
                return at
        taken = sorted([*taken, *places.found])
    return None


class _Places:
    """Where texts stand in a rendering, each behind the one before: so a long rendering is searched once. How a role's
    text was escaped is tried first for its next one. `taken`: where none may stand, in order."""

    def __init__(self, rendered: str, taken: Sequence[tuple[int, int]], escapes: Sequence[Escape]) -> None:
        self._rendered, self._taken, self._escapes = rendered, taken, escapes
        self._likely: dict[str, Escape] = {}
        self._at = self._passed = 0  # behind the last one, and how many of `taken` are before that
        self.found: list[tuple[int, int]] = []

    def take(self, role: str, text: str) -> bool:
        """The first place of any of the text's forms."""
        begin, found = len(self._rendered), ""
        likely = self._likely.get(role)
        for escape in ([likely] if likely else []) + [each for each in self._escapes if each is not likely]:
            form = escape(text)
            if (at := self._find(form, begin)) >= 0:
                begin, found, self._likely[role] = at, form, escape
            if not form:
                return True
        if not found:
            return False
        self._at = begin + len(found)
        self.found.append((begin, self._at))
        return True

    def _find(self, form: str, before: int) -> int:
        """The first place that begins before `before`, or -1."""
        while self._passed < len(self._taken) and self._taken[self._passed][1] <= self._at:
            self._passed += 1
        limit = before + len(form) - 1
        at, number = self._rendered.find(form, self._at, limit), self._passed
        while at >= 0 and number < len(self._taken) and self._taken[number][0] < at + len(form):
            end = self._taken[number][1]
            at, number = self._rendered.find(form, end, limit) if at < end else at, number + 1
        return at


def _bare(text: str) -> str:
    """Without white space, since templates wrap and indent, and without the switches of reasoning, which some take out
    of a text and obey (SmolLM3, Nemotron)."""
    return "".join("".join(_SWITCH.sub("", piece).split()) for piece in _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces: one call of C, in which no other thread runs, takes some ms of each. None cuts a switch."""
    begin = 0
    while begin < len(text):
        end = begin + PIECE_CHARS
        for found in _SWITCH.finditer(text, end - SWITCH_CHARS + 1, end + SWITCH_CHARS - 1):
            end = max(end, found.end()) if found.start() < end else end
        yield text[begin:end]
        begin = end


def _plain(text: str) -> str:
    return text


def _json(text: str) -> str:
    return "".join(json.dumps(piece, ensure_ascii=False)[1:-1] for piece in _pieces(text))


def _ascii_json(text: str) -> str:
    return "".join(json.dumps(piece)[1:-1] for piece in _pieces(text))


Escape = Callable[[str], str]
ESCAPES: Sequence[Escape] = (_plain, _json, _ascii_json)
"""How templates write a text."""
MOVED_ROLES = ("system", "tool")
"""What templates write elsewhere: into the last question (Mistral), or before the text beside the call (Gemma)."""
PIECE_CHARS = 1 << 18
_SWITCH, SWITCH_CHARS = re.compile(r"/(no_?)?think"), len("/no_think")
COUNTED_MAX = 200_000_000
"""Characters that are searched, some tenth of a second, before a text is taken to be there."""
BARE_ESCAPES: Sequence[Escape] = (_bare, lambda text: _bare(_json(text)), lambda text: _bare(_ascii_json(text)))


def _owed(message: Message) -> str:
    """What of its text has to stand in the prompt: not the white space around it, nor an answer's reasoning."""
    text = content_text(message.get("content"))
    if message["role"] == "assistant":
        text = text[max(text.rfind(end) + len(end) if end in text else 0 for end in REASONING_ENDS) :]
    return text.strip()


def _with_tool_prompt(messages: list[dict[str, Any]], tools: Sequence[Tool], form: ToolFormat) -> list[dict[str, Any]]:
    described = DEEPSEEK_TOOL_PROMPT if form == "deepseek" else TOOL_PROMPT
    prompt = described.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _template_call(call: Mapping[str, Any], objects: bool) -> dict[str, Any]:
    """`objects`: the template takes arguments as an object; else as JSON text."""
    function = call["function"]
    arguments = arguments_object(function.get("arguments"))
    if not objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def hermes_text(function: Mapping[str, Any]) -> str:
    """A tool call as Hermes and Qwen models write it."""
    call = {"name": function["name"], "arguments": arguments_object(function.get("arguments"))}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
