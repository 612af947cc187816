"""Tool calls in a streamed text: found as it comes, and released whole once they are complete.

The formats stand in `gateway.tokens.toolformats`; a model's chat template shows which one it writes.

Invariants:
- text outside calls is released as soon as it cannot be the beginning of a call; calls are released whole;
- text that began like a call and is none is released unchanged: nothing that a model wrote vanishes;
- the white space around calls, and the marks around a run of calls, belong to the calls;
- calls and text do not depend on how the text is cut into chunks;
- the work grows with the text, not with its square: what was read is not read again.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.tokens.arguments import Tool
from gateway.tokens.toolformats import SPACE_MAX, SYNTAX, Call, Found, Scan, Syntax, ToolFormat

MISTRAL_ID_CHARS = 9
"""Mistral's templates refuse ids of any other length, and characters besides letters and digits."""
UNFINISHED_MAX = 8
"""Openings that the answer's end leaves unfinished, each of which is read to that end; behind them all is text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as in the API. The id is made once, here."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolDelta(msgspec.Struct, frozen=True, gc=False):
    """`ends`: of each call, where in the text it stood."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    ends: tuple[int, ...] = ()


class ToolCallParser:
    """One answer. `feed` its text as it comes, `finish` at its end. `tools` are the request's: calls of others are
    text. Without any, as in tests, calls of any name are taken. `one`: the first call ends what is read."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool] = (), *, one: bool = False) -> None:
        self.form, self.one, self._syntax = form, one, SYNTAX.get(form)
        named = [(str((tool.get("function") or {}).get("name")), tool) for tool in tools]
        self._tools = dict(named) if tools else None
        self._held = ""
        self._num_before_call = 0
        self._scan: Scan | None = None  # of the call that may have begun in what is held, and where it opened
        self._opened = 0
        self._after_call = False  # white space that follows belongs to the call before it
        self.in_call = False
        """Whether what comes next may be part of a call."""
        self.num_calls = 0

    @property
    def num_held(self) -> int:
        """Characters that were read and are neither text nor a call yet."""
        return len(self._held)

    @property
    def before_call(self) -> str:
        """What of these no call has: white space, and the beginning of a mark."""
        return self._held[: self._num_before_call]

    def call_id(self, digest: str) -> str:
        """An id as the model's template takes it, from hexadecimal digits."""
        return digest[:MISTRAL_ID_CHARS] if self.form == "mistral" else f"call_{digest}"

    def feed(self, text: str) -> ToolDelta:
        return ToolDelta(text) if self._syntax is None else self._read(self._syntax, text, last=False)

    def finish(self) -> ToolDelta:
        return ToolDelta() if self._syntax is None else self._read(self._syntax, "", last=True)

    def _read(self, syntax: Syntax, text: str, *, last: bool) -> ToolDelta:
        held, self._held = self._held, ""
        held += text  # in place, since nobody else refers to it
        texts: list[str] = []
        calls: list[Call] = []
        ends: list[int] = []
        at, look, unfinished = 0, 0, 0  # up to where it is released, and from where openings are looked for
        num_text = 0
        while not (self.one and (calls or self.num_calls)):
            if self._after_call:
                at = look = self._end_of_run(syntax, held, at)
                if self._after_call and not last:
                    break
            if self._scan is None:
                opened = None if unfinished == UNFINISHED_MAX else syntax.opener.search(held, look)
                if opened is None:
                    end = len(held) if last else _decided(held, at, syntax)
                    texts.append(held[at:end])
                    at = end
                    break
                begin = _before_call(held, at, opened.start(), syntax)
                texts.append(held[at:begin])
                num_text += begin - at
                at, self._opened = begin, opened.start()
                self._scan = syntax.opens[opened[0]](opened.end(), self._tools)
            found = self._scan.read(held, last)
            if found is None and not last:
                break
            if found is None:
                unfinished += 1
                found = Found(self._opened)
            self._scan = None
            calls += found.calls
            ends += [num_text] * len(found.calls)
            self._after_call = bool(found.calls)
            look = max(found.end, self._opened + 1)  # a call of one character's mark is read from that on
            at = look if found.calls else at
        self._held = held[at:] if at else held
        self.in_call = self._scan is not None
        self._num_before_call = (self._opened if self.in_call else len(held)) - at
        if at:
            self._scan = None  # it has positions in what was held: it begins again, once
        del calls[1 if self.one else len(calls) :]
        self.num_calls += len(calls)
        made = tuple(ToolCall(name, arguments) for name, arguments in calls)
        return ToolDelta("".join(texts), made, tuple(ends[: len(made)]))

    def _end_of_run(self, syntax: Syntax, held: str, at: int) -> int:
        """Behind what belongs to the call before; `_after_call` stays set while more of that may come."""
        while True:
            rest = held[at : at + SPACE_MAX].lstrip()
            at = min(at + SPACE_MAX, len(held)) - len(rest)
            if syntax.after and held.startswith(syntax.after, at):  # once more, too
                at += len(syntax.after)
            elif rest or at == len(held):
                self._after_call = not rest or (
                    bool(syntax.after) and syntax.after.startswith(held[at : at + len(syntax.after)])
                )
                return at


def _decided(text: str, floor: int, syntax: Syntax) -> int:
    """Where the end of the text begins that may belong to a call: white space, and the beginning of a mark."""
    begun = len(text)
    for mark in (*syntax.opens, *syntax.before):
        if len(mark) > 1:
            at = text.rfind(mark[0], max(floor, len(text) - len(mark) + 1))
            begun = min(begun, at) if at >= 0 and mark.startswith(text[at:]) else begun
    return _before_call(text, floor, begun, syntax)


def _before_call(text: str, floor: int, end: int, syntax: Syntax) -> int:
    """Where the white space and the marks begin that belong to a call which opens at `end`: each mark once."""
    end = _without_space(text, floor, end)
    for mark in reversed(syntax.before):
        if text.endswith(mark, floor, end):
            end = _without_space(text, floor, end - len(mark))
    return end


def _without_space(text: str, floor: int, end: int) -> int:
    if end == floor or not text[end - 1].isspace():
        return end
    start = max(floor, end - SPACE_MAX)
    return start + len(text[start:end].rstrip())
