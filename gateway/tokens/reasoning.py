"""Splits a streamed answer into reasoning, between two tags at its beginning, and text.

The tags are `<think>` and `</think>` (Qwen, DeepSeek, GLM), or `[THINK]` and `[/THINK]` (Mistral).

Invariants:
- only the beginning of an answer can be reasoning; a tag in the middle of a text is text;
- reasoning and text are released as they come, but for the tags and the white space beside them;
- reasoning that nothing closes ends where a complete tool call begins; without one, the answer is all reasoning: the
  model was cut before it answered. From such a call on reasoning is held: a closing tag makes all of it reasoning;
- text that lacks the opening tag is reasoning as well, where the prompt said nothing and a closing tag comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.tokens.toolcalls import ToolCallParser

ReasoningFormat = Literal["think", "brackets", "none"]

THINK, END_THINK = "<think>", "</think>"
TAGS: Mapping[ReasoningFormat, tuple[str, str]] = {"think": (THINK, END_THINK), "brackets": ("[THINK]", "[/THINK]")}
REASONING_MARKERS = tuple(tag for tags in TAGS.values() for tag in tags)
"""Tokens that the parser has to see even where the vocabulary declares them special."""


def reasoning_format_of(source: str) -> ReasoningFormat:
    """The format of the reasoning that a chat template knows, by its closing tag."""
    return next((form for form, (_, end) in TAGS.items() if end in source), "none")


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """`takes_back`: what was given as text so far was reasoning, and is given as such now."""

    reasoning: str = ""
    text: str = ""
    takes_back: bool = False


class ReasoningParser:
    """One answer. `feed` its text as it comes, `finish` at its end.

    `begun`: the prompt itself opened the tag, or, where that is None, said nothing of it: then an answer without an
    opening tag is `undecided`, and its text may be taken back, until it ends, or is said to be none by `decide`.
    `calls`: a new parser of the request's calls, for the first one within the reasoning.
    """

    def __init__(
        self, form: ReasoningFormat = "think", *, begun: bool | None = False, calls: ToolCallParser | None = None
    ) -> None:
        self._open, self._close = TAGS[form]
        self._phase: Literal["before", "undecided", "opened", "within", "closed", "after"]
        self._phase = "opened" if begun else "before"
        self._may_lack_opening = begun is None
        self._calls = calls
        self._held = ""  # what may be a tag, or white space beside one
        self._kept: list[str] = []  # text that may be taken back, or reasoning that may be a call

    @property
    def undecided(self) -> bool:
        return self._phase == "undecided"

    @property
    def in_call(self) -> bool:
        return self._phase == "within" and self._calls is not None and self._calls.in_call

    @property
    def over(self) -> bool:
        """Whether all that comes is text."""
        return self._phase == "after"

    def decide(self) -> None:
        """What was undecided is text."""
        if self._phase == "undecided":
            self._phase, self._held, self._kept = "after", "", []

    def parts(self, text: str) -> tuple[str, ...]:
        """The text in one or two pieces, to be fed one by one: a tag that takes text back ends in the second, so that
        what comes before it may `decide`."""
        seen = self._held + text
        if not self._may_lack_opening or self._phase not in ("before", "undecided") or self._close not in seen:
            return (text,)
        end = seen.find(self._close) + len(self._close) - 1 - len(self._held)
        return (text[:end], text[end:]) if end > 0 else (text,)

    def feed(self, text: str) -> ReasoningDelta:
        if self._phase == "after":
            return ReasoningDelta(text=text)
        if self._phase == "undecided":
            return self._look_for_end(text)
        self._held += text
        if self._phase == "before" and self._begins_without_opening():
            held, self._held = self._held, ""
            return self._look_for_end(held)
        if self._phase == "opened":  # white space after the tag is the tag's
            self._held = self._held.lstrip()
            self._phase = "within" if self._held else "opened"
        reasoning = self._take_reasoning() if self._phase == "within" else ""
        return ReasoningDelta(reasoning, self._take_text())

    def finish(self) -> ReasoningDelta:
        """What was held back: as the possible beginning of a tag, or as a call within the reasoning."""
        held, self._held = self._held, ""
        if self._phase == "within":
            reasoning = self._without_call(held[: len(held.rstrip())], last=True)
            return ReasoningDelta(reasoning, "".join(self._kept))
        return ReasoningDelta(text=held) if self._phase == "before" else ReasoningDelta()

    def _begins_without_opening(self) -> bool:
        """Whether the answer turns out to be undecided."""
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._phase, self._held = "opened", start[len(self._open) :]
        elif not self._open.startswith(start):
            self._phase = "undecided" if self._may_lack_opening else "after"
            return self._may_lack_opening
        return False

    def _look_for_end(self, text: str) -> ReasoningDelta:
        """Text that a closing tag takes back. `_held` is the end of what was given, which may begin the tag."""
        self._kept.append(text)
        seen = self._held + text
        if self._close not in seen:
            self._held = seen[1 - len(self._close) :]
            return ReasoningDelta(text=text)
        reasoning, _, self._held = "".join(self._kept).partition(self._close)
        self._phase, self._kept = "closed", []
        return ReasoningDelta(reasoning.strip(), self._take_text(), takes_back=True)

    def _take_reasoning(self) -> str:
        """The reasoning up to the closing tag. A possible beginning of the tag, and white space before it, is held."""
        at = self._held.find(self._close)
        if at >= 0:
            reasoning, self._held, self._phase = self._held[:at].rstrip(), self._held[at + len(self._close) :], "closed"
            released, kept = self._without_call(reasoning), "".join(self._kept)
            self._kept = []
            return released + kept
        begun = self._held.rfind(self._close[0], 1 - len(self._close))
        if begun < 0 or not self._close.startswith(self._held[begun:]):
            begun = len(self._held)
        keep = len(self._held[:begun].rstrip())
        reasoning, self._held = self._held[:keep], self._held[keep:]
        return self._without_call(reasoning)

    def _without_call(self, reasoning: str, *, last: bool = False) -> str:
        """The reasoning up to its first call; what may be one is kept, and all that follows one."""
        if self._calls is None:
            return reasoning
        called = self._calls.num_calls > 0
        if reasoning:
            self._kept.append(reasoning)
        text = "" if called else self._calls.feed(reasoning).text
        if last and not called:
            text += self._calls.finish().text
        if text:
            self._kept = ["".join(self._kept)[len(text) :]]
        return text

    def _take_text(self) -> str:
        if self._phase == "closed":
            self._held = self._held.lstrip("\n")
            self._phase = "after" if self._held else "closed"
        if self._phase != "after":
            return ""
        text, self._held = self._held, ""
        return text
