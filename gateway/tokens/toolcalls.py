"""Tool calls in a streamed text: found as it comes, and released whole once they parse.

Formats (a model's chat template shows which one it writes):
- `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, after free text (Hermes, Qwen);
- `llama`: the whole answer is a JSON object `{"name": ..., "parameters": {...}}`, or several joined by `;`, optionally
  after `<|python_tag|>` (Llama 3.1 and later).

Invariants:
- text outside calls is released as soon as it cannot be the beginning of a call; calls are released whole;
- text that began like a call and does not parse is released unchanged: nothing that a model wrote vanishes;
- the white space around calls belongs to the calls.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.tokens.values import NotJson, parse, parse_first

ToolFormat = Literal["hermes", "llama", "none"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MARKERS = (OPEN, CLOSE, PYTHON_TAG)
"""Tokens that the parser has to see even where the vocabulary declares them special."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as in the API. The id is made once, here."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class ToolDelta:
    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser:
    """One answer. `feed` its text as it comes, `finish` at its end."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._held = ""
        self._begun = False  # text was released
        self._after_call = False  # white space that follows belongs to the call before it
        self.num_calls = 0

    def feed(self, text: str) -> ToolDelta:
        self._held += text
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        if self._form == "hermes":
            return self._feed_hermes()
        if self._form == "llama":
            return self._feed_llama()
        return self._release(ToolDelta(self._take_all()))

    def finish(self) -> ToolDelta:
        rest = self._take_all()
        if self._form == "hermes" and rest.lstrip().startswith(OPEN):
            calls = _hermes_calls(rest.lstrip().removeprefix(OPEN))  # complete but for its closing tag
        elif self._form == "llama" and not self._begun:
            calls = _llama_calls(rest)
        else:
            calls = None
        if calls:
            self.num_calls += len(calls)
            return ToolDelta("", tuple(calls))
        return ToolDelta(rest)

    def _feed_hermes(self) -> ToolDelta:
        text: list[str] = []
        calls: list[ToolCall] = []
        while (at := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, at)
            if end < 0:
                break
            parsed = _hermes_calls(self._held[at + len(OPEN) : end])
            end += len(CLOSE)
            text.append(self._held[:at].rstrip() if parsed else self._held[:end])
            calls += parsed or ()
            self._held = self._held[end:].lstrip() if parsed else self._held[end:]
            self._after_call = bool(parsed) and not self._held
        if at < 0:
            keep = _undecided(self._held)
            text.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        elif at > 0:
            text.append(self._held[:at].rstrip())
            self._held = self._held[len(self._held[:at].rstrip()) :]
        return self._release(ToolDelta("".join(text), tuple(calls)))

    def _feed_llama(self) -> ToolDelta:
        if not self._begun and self._could_be_llama():
            return ToolDelta()
        return self._release(ToolDelta(self._take_all()))

    def _could_be_llama(self) -> bool:
        start = self._held.lstrip()
        return not start or start[0] == "{" or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)])

    def _release(self, delta: ToolDelta) -> ToolDelta:
        self.num_calls += len(delta.calls)
        self._begun = self._begun or bool(delta.text)
        return delta

    def _take_all(self) -> str:
        held, self._held = self._held, ""
        return held


def _undecided(text: str) -> int:
    """Length of the end of `text` that may belong to a call: white space, then the beginning of an opening tag."""
    body = text
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            body = text[:-length]
            break
    return len(text) - len(body.rstrip())


def _hermes_calls(text: str) -> list[ToolCall] | None:
    """The calls in one `<tool_call>` block: an object, or a list of them (SmolLM2). None if it is neither."""
    try:
        value = parse(text)
    except NotJson:
        return None
    return _calls(value if isinstance(value, list) else [value])


def _llama_calls(text: str) -> list[ToolCall] | None:
    rest, values = text.strip().removeprefix(PYTHON_TAG).lstrip(), []
    while rest:
        try:
            value, end = parse_first(rest)
        except NotJson:
            return None
        values.append(value)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return _calls(values)


def _calls(values: list[Any]) -> list[ToolCall] | None:
    calls = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(value["name"], text))
    return calls or None
