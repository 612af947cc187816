"""The text of an answer to what a client sees of it: reasoning, content and tool calls, up to where it is over.

Invariants:
- stop strings count in the content alone: neither in reasoning nor within a call; so a text that may be a call is
  searched once it is none, and the answer is over then;
- an answer of one call is over with the first one that is complete, and none within reasoning counts;
- while it is undecided whether a text is reasoning, it is read as content, and withheld.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gateway.tokens.arguments import Tool
from gateway.tokens.reasoning import ReasoningFormat, ReasoningParser
from gateway.tokens.stream import StopStrings
from gateway.tokens.toolcalls import ToolCall, ToolCallParser, ToolDelta
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
        self._free = 0  # characters at the beginning of what the parser holds, in which no stop string counts
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
        if parser is not None and self._stop_strings:
            return self._up_to_stop(parser, text, checked, last)
        if self._stop_strings:
            text, stopped_by = self._stop.feed(text, checked=checked)
            if last and stopped_by is None:
                text += self._stop.finish()
        if parser is None:
            return text, (), stopped_by
        found = parser.feed(text)
        if not last:
            return found.text, found.calls, None
        rest = parser.finish()
        return found.text + rest.text, found.calls + rest.calls, None

    def _up_to_stop(
        self, parser: ToolCallParser, text: str, checked: bool, last: bool
    ) -> tuple[str, tuple[ToolCall, ...], str | None]:
        """It is read character by character, so that it ends at the same one however the text is cut."""
        texts: list[str] = []
        calls: list[ToolCall] = []
        for found in self._by_character(parser, text, last):
            begin = 0
            for end, call in zip(found.ends, found.calls, strict=True):
                if (stopped_by := self._take(texts, found.text[begin:end], checked)) is not None:
                    return "".join(texts), tuple(calls), stopped_by
                texts.append(self._stop.finish())  # no stop string goes on behind a call
                calls.append(call)
                self._free, begin = 0, end
                if self._one_call:
                    return "".join(texts), tuple(calls), None
            stopped_by = self._take(texts, found.text[begin:], checked, parser.before_call)
            if stopped_by is not None:
                return "".join(texts), tuple(calls), stopped_by
            if not checked:
                self._free = parser.num_held
        if last:
            texts.append(self._stop.finish())
        return "".join(texts), tuple(calls), None

    def _by_character(self, parser: ToolCallParser, text: str, last: bool) -> Iterator[ToolDelta]:
        yield from map(parser.feed, text)
        if last:
            yield parser.finish()

    def _take(self, texts: list[str], text: str, checked: bool, ahead: str = "") -> str | None:
        """Adds what no stop string holds back of a text that is no call's; the stop string that ends it."""
        if not text and not ahead:
            return None
        free, self._free = text[: self._free], max(0, self._free - len(text))
        if free:
            texts.append(self._stop.feed(free, checked=False)[0])
        shown, stopped_by = self._stop.feed(text[len(free) :], checked=checked, ahead=ahead[self._free :])
        texts.append(shown)
        return stopped_by
