"""Tool calls in a streamed text: found as it comes, and released whole once they parse.

The formats stand in `gateway.tokens.toolformats`; a model's chat template shows which one it writes.

Invariants:
- text outside calls is released as soon as it cannot be the beginning of a call; calls are released whole;
- text that began like a call and does not parse is released unchanged: nothing that a model wrote vanishes;
- the white space around calls, and the marks around a run of calls, belong to the calls;
- calls and text do not depend on how the text is cut into chunks.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.tokens.toolformats import PYTHON_TAG, SYNTAX, Call, Syntax, Tool, ToolFormat

MISTRAL_ID_CHARS = 9
"""Mistral's templates refuse ids of any other length, and characters besides letters and digits."""


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
    """One answer. `feed` its text as it comes, `finish` at its end. `tools` have the types of arguments."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool] = ()) -> None:
        self.form, self._syntax, self._tools = form, SYNTAX.get(form), tools
        self._held = ""
        self._begun = False  # text was released
        self._after_call = False  # white space that follows belongs to the call before it
        self.num_calls = 0

    @property
    def close(self) -> str | None:
        """The mark that ends each call."""
        return None if self._syntax is None else self._syntax.close

    def call_id(self, digest: str) -> str:
        """An id as the model's template takes it, from hexadecimal digits."""
        return digest[:MISTRAL_ID_CHARS] if self.form == "mistral" else f"call_{digest}"

    def feed(self, text: str) -> ToolDelta:
        self._held += text
        if self._syntax is None:
            return self._release(self._take_all(), [])
        if self._syntax.close is None:
            return self._feed_up_to_calls(self._syntax)
        return self._feed_blocks(self._syntax, self._syntax.close)

    def finish(self) -> ToolDelta:
        syntax, rest = self._syntax, self._take_all()
        if syntax is None or not syntax.ends_itself:
            return self._release(rest, [])
        start = rest.lstrip().removeprefix(syntax.before).lstrip()
        whole = self.form == "llama" and not self._begun
        if not (start.startswith(syntax.open) or (whole and start)):
            return self._release(rest, [])
        calls = syntax.parse(start.removeprefix(syntax.open), self._tools)
        return self._release("" if calls else rest, calls or [])

    def _feed_blocks(self, syntax: Syntax, close: str) -> ToolDelta:
        texts: list[str] = []
        calls: list[Call] = []
        while True:
            if self._after_call and self._within_run(syntax):
                return self._release("".join(texts), calls)
            at = self._held.find(syntax.open)
            end = self._held.find(close, at) if at >= 0 else -1
            if end < 0:
                break
            parsed = syntax.parse(self._held[at + len(syntax.open) : end], self._tools)
            end += len(close)
            texts.append(_before_call(self._held[:at], syntax) if parsed else self._held[:end])
            calls += parsed or ()
            self._held, self._after_call = self._held[end:], bool(parsed)
        decided = len(_before_call(self._held[:at], syntax)) if at >= 0 else len(_decided(self._held, syntax))
        texts.append(self._held[:decided])
        self._held = self._held[decided:]
        return self._release("".join(texts), calls)

    def _within_run(self, syntax: Syntax) -> bool:
        """Takes what belongs to the call before, and returns whether more of it may come."""
        self._held = self._held.lstrip()
        while syntax.after and self._held.startswith(syntax.after):  # once more, too: a later chunk may bring it
            self._held = self._held[len(syntax.after) :].lstrip()
        if not self._held or (len(self._held) < len(syntax.after) and syntax.after.startswith(self._held)):
            return True
        self._after_call = False
        return False

    def _feed_up_to_calls(self, syntax: Syntax) -> ToolDelta:
        """Holds everything from the opening mark on; of Llama also an answer that begins like JSON."""
        if self.form == "llama" and not self._begun and self._could_be_llama():
            return ToolDelta()
        at = self._held.find(syntax.open)
        decided = len(self._held[:at].rstrip()) if at >= 0 else len(_decided(self._held, syntax))
        text, self._held = self._held[:decided], self._held[decided:]
        return self._release(text, [])

    def _could_be_llama(self) -> bool:
        start = self._held.lstrip()
        return not start or start[0] == "{" or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)])

    def _release(self, text: str, calls: Sequence[Call]) -> ToolDelta:
        self.num_calls += len(calls)
        self._begun = self._begun or bool(text)
        return ToolDelta(text, tuple(ToolCall(name, arguments) for name, arguments in calls))

    def _take_all(self) -> str:
        held, self._held = self._held, ""
        return held


def _before_call(text: str, syntax: Syntax) -> str:
    """The text before an opening mark, without the white space and the mark that belong to the call."""
    return text.rstrip().removesuffix(syntax.before).rstrip()


def _decided(text: str, syntax: Syntax) -> str:
    """The text without its end that may belong to a call: white space, then the beginning of an opening mark."""
    without = _without_beginning(text, syntax.open)
    if not syntax.before:
        return without.rstrip()
    if without.rstrip().endswith(syntax.before):
        return _before_call(without, syntax)
    return without.rstrip() if without != text else _without_beginning(text, syntax.before).rstrip()


def _without_beginning(text: str, mark: str) -> str:
    """The text without the longest end of it that is a beginning of the mark."""
    length = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
    return text[: len(text) - length]
