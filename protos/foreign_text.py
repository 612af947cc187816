"""Text that others chose (names, paths, reasons, answers of other servers), made fit for a log line or a terminal.

Invariants:
- it forges no line, moves no cursor and changes no colour: control characters, separators of lines, marks that turn the
  direction of text, invisible characters and halves of surrogate pairs are shown escaped;
- it has a bounded length, and says what it was before;
- a name between other words of a line ends where it ends: `quoted` shows it bare only if nothing else is like it.
"""

from __future__ import annotations

import logging
import re
from typing import Any

LINE_CHARS_MAX = 8192
NAME_CHARS_MAX = 120
TRACEBACK_CHARS_MAX = 32_768
_UNFIT = r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
_CONTROL = re.compile(f"[{_UNFIT}]")
_CONTROL_IN_LINES = re.compile(f"(?!\n)[{_UNFIT}]")
_PLAIN = re.compile(r"[\w.:/@+*~#%=-]+")
"""Of names that are shown without quotes."""


def one_line(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """`text` in one line of `chars_max` characters, and some more for its escapes and its length."""
    if len(text) > chars_max:
        text = f"{text[:chars_max]} ... ({len(text)} characters)"
    return _CONTROL.sub(_escaped, text)


def quoted(name: object, chars_max: int = NAME_CHARS_MAX) -> str:
    """A name as a word of a sentence: in quotes unless it is a plain word, escaped, and shortened."""
    text = str(name)
    if len(text) <= chars_max and _PLAIN.fullmatch(text):
        return text
    more = f"... ({len(text)} characters)" if len(text) > chars_max else ""
    return one_line(repr(text[:chars_max])) + more


def continued(text: str) -> str:
    """The lines of a traceback: indented, so that none of them begins as a line of the log does. Of a long one the end
    is kept, which names the error."""
    if len(text) > TRACEBACK_CHARS_MAX:
        text = f"({len(text)} characters) ... {text[-TRACEBACK_CHARS_MAX:]}"
    return "\n".join(f"  {line}" for line in _CONTROL_IN_LINES.sub(_escaped, text).split("\n"))


class OneLine(logging.Formatter):
    """Formats each message as one line of bounded length, so that text from other processes cannot forge lines or fill
    the log. A traceback follows its message, indented: the error in it may have such text as well.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is the base class's
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return continued(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return continued(super().formatStack(stack_info))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
