"""Splits a streamed answer into reasoning, between two tags at its beginning, and text.

The tags are `<think>` and `</think>` (Qwen, DeepSeek, GLM), or `[THINK]` and `[/THINK]` (Mistral).

Invariants:
- only the beginning of an answer can be reasoning; a tag in the middle of a text is text;
- reasoning and text are released as they come, but for the tags and the white space beside them;
- an answer that ends within its reasoning is all reasoning: the model was cut before it answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ReasoningFormat = Literal["think", "brackets", "none"]

THINK, END_THINK = "<think>", "</think>"
TAGS: Mapping[ReasoningFormat, tuple[str, str]] = {"think": (THINK, END_THINK), "brackets": ("[THINK]", "[/THINK]")}
REASONING_MARKERS = tuple(tag for tags in TAGS.values() for tag in tags)
"""Tokens that the parser has to see even where the vocabulary declares them special."""


def reasoning_format_of(source: str) -> ReasoningFormat:
    """The format of the reasoning that a chat template knows, by its closing tag."""
    return next((form for form, (_, end) in TAGS.items() if end in source), "none")


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    reasoning: str = ""
    text: str = ""


class ReasoningParser:
    """One answer. `feed` its text as it comes, `finish` at its end. `begun`: the prompt itself opened the tag."""

    def __init__(self, form: ReasoningFormat = "think", *, begun: bool = False) -> None:
        self._open, self._close = TAGS[form]
        self._phase: Literal["before", "opened", "within", "closed", "after"] = "opened" if begun else "before"
        self._held = ""

    def feed(self, text: str) -> ReasoningDelta:
        if self._phase == "after":
            return ReasoningDelta(text=text)
        self._held += text
        if self._phase == "before":
            self._look_for_start()
        if self._phase == "opened":  # white space after the tag is the tag's
            self._held = self._held.lstrip()
            self._phase = "within" if self._held else "opened"
        reasoning = self._take_reasoning() if self._phase == "within" else ""
        return ReasoningDelta(reasoning, self._take_text())

    def finish(self) -> ReasoningDelta:
        """The text held back as the possible beginning of a tag."""
        held, self._held = self._held, ""
        if self._phase == "within":
            return ReasoningDelta(reasoning=held.rstrip())
        return ReasoningDelta(text=held) if self._phase == "before" else ReasoningDelta()

    def _look_for_start(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._phase, self._held = "opened", start[len(self._open) :]
        elif not self._open.startswith(start):
            self._phase = "after"

    def _take_reasoning(self) -> str:
        """The reasoning up to the closing tag. A possible beginning of the tag, and white space before it, is held."""
        at = self._held.find(self._close)
        if at >= 0:
            reasoning, self._held, self._phase = self._held[:at].rstrip(), self._held[at + len(self._close) :], "closed"
            return reasoning
        begun = next((n for n in range(len(self._close) - 1, 0, -1) if self._held.endswith(self._close[:n])), 0)
        keep = len(self._held[: len(self._held) - begun].rstrip())
        reasoning, self._held = self._held[:keep], self._held[keep:]
        return reasoning

    def _take_text(self) -> str:
        if self._phase == "closed":
            self._held = self._held.lstrip("\n")
            self._phase = "after" if self._held else "closed"
        if self._phase != "after":
            return ""
        text, self._held = self._held, ""
        return text
