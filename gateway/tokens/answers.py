"""The text of an answer to what a client sees of it: reasoning, content and tool calls, up to where it is over.

Invariants:
- stop strings count in the content alone: neither in reasoning nor within a call;
- an answer of one call is over with the first one that is complete, and none within reasoning counts;
- while it is undecided whether a text is reasoning, it is read as content, and withheld.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.tokens.arguments import Tool
from gateway.tokens.reasoning import ReasoningFormat, ReasoningParser
from gateway.tokens.stream import StopStrings
from gateway.tokens.toolcalls import ToolCall, ToolCallParser
from gateway.tokens.toolformats import ToolFormat


class AnswerDelta(msgspec.Struct, frozen=True, gc=False):
    """`over`: nothing more is read; `stopped_by` has the stop string, if one is the reason."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    stopped_by: str | None = None
    over: bool = False


class AnswerParser:
    """One answer. `feed` its text as it comes, token by token where it `ends_early`; the `last` piece once.

    `begun`: whether the prompt opened reasoning, None where it said nothing; `continues`: the text of the message that
    the answer continues. `tools`: None where calls are not parsed. `stop`: the stop strings. `one_call`: at most one.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat = "none",
        begun: bool | None = False,
        continues: str = "",
        calls: ToolFormat = "none",
        tools: Sequence[Tool] | None = None,
        stop: Sequence[str] = (),
        one_call: bool = False,
    ) -> None:
        self._calls, self._tools, self._stop_strings = calls, tools, stop
        self._one_call = one_call and tools is not None
        self._reasoning: ReasoningParser | None = None
        if reasoning != "none":
            in_reasoning = None if tools is None else ToolCallParser(calls, tools, one=True)
            self._reasoning = ReasoningParser(reasoning, begun=begun, calls=in_reasoning)
            if continues:
                self._reasoning.feed(continues.rstrip())
        self.plain = reasoning == "none" and tools is None and not stop  # the text is the answer, as it is
        self.ends_early = bool(stop) or self._one_call
        self._begin_content()

    def _begin_content(self) -> None:
        self._withheld: list[str] = []
        self._stop = StopStrings(self._stop_strings)
        self._parser = None if self._tools is None else ToolCallParser(self._calls, self._tools, one=self._one_call)

    @property
    def in_call(self) -> bool:
        """Whether what comes next may be part of a call: all of its text is the call's then."""
        within_reasoning = self._reasoning is not None and self._reasoning.in_call
        return within_reasoning or (self._parser is not None and self._parser.in_call)

    def call_id(self, digest: str) -> str:
        assert self._parser is not None  # where calls are parsed
        return self._parser.call_id(digest)

    def feed(self, text: str, *, checked: bool = True, last: bool = False) -> AnswerDelta:
        """Not `checked`: no stop string counts yet."""
        parts = [text] if self._reasoning is None else self._reasoning.parts(text)
        found = self._feed(parts[0], checked, last and len(parts) == 1)
        if len(parts) == 1 or found.over:
            return found
        rest = self._feed(parts[1], checked, last)
        reasoning, shown, calls = found.reasoning + rest.reasoning, found.text + rest.text, found.calls + rest.calls
        return AnswerDelta(reasoning, shown, calls, rest.stopped_by, rest.over)

    def _feed(self, text: str, checked: bool, last: bool) -> AnswerDelta:
        reasoning = ""
        if self._reasoning is not None:
            found = self._reasoning.feed(text)
            if found.takes_back:
                self._begin_content()
            rest = self._reasoning.finish() if last else None
            reasoning, text = found.reasoning, found.text
            if rest is not None:
                reasoning, text = reasoning + rest.reasoning, text + rest.text
        text, calls, stopped_by = self._content(text, checked, last)
        over = stopped_by is not None or (self._one_call and bool(calls))
        if self._reasoning is None:
            return AnswerDelta("", text, calls, stopped_by, over)
        if self._reasoning.undecided:
            if not (over or calls or last):
                self._withheld.append(text)
                return AnswerDelta()
            self._reasoning.decide()
        if self._reasoning.over:
            self._reasoning = None
        if self._withheld:
            text, self._withheld = "".join([*self._withheld, text]), []
        return AnswerDelta(reasoning, text, calls, stopped_by, over)

    def _content(self, text: str, checked: bool, last: bool) -> tuple[str, tuple[ToolCall, ...], str | None]:
        parser, stopped_by = self._parser, None
        if self._stop_strings:
            within = parser is not None and parser.in_call
            text, stopped_by = self._stop.feed(text, checked=checked and not within)
            if last and stopped_by is None:
                text += self._stop.finish()
        if parser is None:
            return text, (), stopped_by
        found = parser.feed(text)
        if not last and stopped_by is None:
            return found.text, found.calls, None
        rest = parser.finish()
        return found.text + rest.text, found.calls + rest.calls, stopped_by
