"""The ends of values in a text that grows: JSON, and Python's brackets. Pure.

Invariants:
- each character is looked at once, however the text is cut into pieces;
- what is found does not depend on how the text is cut.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.tokens.values import DEPTH_MAX

NOWHERE: Final = -1
"""No more text can end the value: it is none."""

_SPACE = re.compile(r"[ \t\r\n]+")
_ATOM = re.compile(r"[-+.\w]+")
_IN_STRING = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END, _ATOM_OR_END = range(7)
_ENDS = {"{": "}", "[": "]"}
_MAY_END = {"}": (_KEY_OR_END, _COMMA_OR_END, _ATOM_OR_END), "]": (_VALUE_OR_END, _COMMA_OR_END, _ATOM_OR_END)}


class JsonEnd:
    """The end of the object or list that begins at `at`. What is no JSON by its shape is noticed where it breaks."""

    __slots__ = ("_at", "_in_string", "_open", "_want")

    def __init__(self, at: int) -> None:
        self._at, self._want, self._in_string = at, _VALUE, False
        self._open: list[str] = []  # the closing brackets that are due, the innermost last

    def find(self, text: str) -> int | None:
        """The index behind the value, None while more of it must come, or NOWHERE."""
        while self._at < len(text):
            if self._in_string:
                self._at = _run(_IN_STRING, text, self._at)
                if not text.startswith('"', self._at):
                    return None  # the text ends here, perhaps between a backslash and what it escapes
                self._in_string, self._at = False, self._at + 1
            elif not self._step(text, text[self._at]):
                return NOWHERE
            elif not self._open:
                return self._at
        return None

    def _step(self, text: str, char: str) -> bool:
        """Past one token outside of strings; False where JSON has no such token."""
        want, end = self._want, self._at + 1
        if char in " \t\r\n":
            end = _run(_SPACE, text, self._at)
            self._want = _COMMA_OR_END if want == _ATOM_OR_END else want
        elif char == '"' and want in (_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END):
            self._in_string, self._want = True, _COLON if want in (_KEY, _KEY_OR_END) else _COMMA_OR_END
        elif char in "{[" and want in (_VALUE, _VALUE_OR_END) and len(self._open) < DEPTH_MAX:
            self._open.append(_ENDS[char])
            self._want = _KEY_OR_END if char == "{" else _VALUE_OR_END
        elif char in "}]" and self._open[-1:] == [char] and want in _MAY_END[char]:
            self._open.pop()
            self._want = _COMMA_OR_END
        elif char == ":" and want == _COLON:
            self._want = _VALUE
        elif char == "," and want in (_COMMA_OR_END, _ATOM_OR_END):
            self._want = _KEY if self._open[-1] == "}" else _VALUE
        elif want in (_VALUE, _VALUE_OR_END, _ATOM_OR_END) and self._open and _ATOM.match(char):
            end, self._want = _run(_ATOM, text, self._at), _ATOM_OR_END
        else:
            return False
        self._at = end
        return True


_PLAIN = re.compile(r"[^\[\](){}'\"]*")
_IN_QUOTES = {quote: re.compile(rf"(?:[^{quote}\\]++|\\.)*+", re.DOTALL) for quote in "'\""}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class BracketEnd:
    """The end of the Python expression in brackets that begins at `at`: strings are skipped, brackets are paired."""

    __slots__ = ("_at", "_open", "_quote")

    def __init__(self, at: int) -> None:
        self._at, self._quote = at, ""
        self._open: list[str] = []

    def find(self, text: str) -> int | None:
        """As `JsonEnd.find`."""
        while self._at < len(text):
            if self._quote:
                self._at = _run(_IN_QUOTES[self._quote], text, self._at)
                if not text.startswith(self._quote, self._at):
                    return None
                self._quote, self._at = "", self._at + 1
                continue
            self._at = _run(_PLAIN, text, self._at)
            if self._at == len(text):
                break
            char, self._at = text[self._at], self._at + 1
            if char in "'\"":
                self._quote = char
            elif char in _CLOSING and len(self._open) < DEPTH_MAX:
                self._open.append(_CLOSING[char])
            elif self._open[-1:] != [char]:
                return NOWHERE
            else:
                self._open.pop()
                if not self._open:
                    return self._at
        return None


def _run(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
