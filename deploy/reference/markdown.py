"""Markdown as GitHub shows it: tables, escaped prose, links to headings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MADE = "Made from the code by `make reference`: change the code, not this page."
_SPAN = re.compile(r"(`[^`]*`)")


def page(title: str, *parts: str) -> str:
    """A whole page, with one empty line between its parts."""
    return "\n\n".join([f"# {title}", MADE, *(part.strip("\n") for part in parts if part)]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells in Markdown; columns that are empty in every row are left out. "" for one without rows."""
    cells = [[_cell(text) for text in row] for row in rows]
    kept = [column for column in range(len(head)) if any(row[column] for row in cells)]
    if not cells:
        return ""
    lines = [[head[column] for column in kept], ["---"] * len(kept), *([row[c] for c in kept] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def prose(text: str) -> str:
    """A text of the code in one line, of which only spans in backticks are Markdown."""
    spans = _SPAN.split(" ".join(text.split()))
    return "".join(span if i % 2 else re.sub(r"([<*\\])", r"\\\1", span) for i, span in enumerate(spans))


def number(value: float) -> str:
    """A number for people: 86,400 and 0.2."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def code(text: str) -> str:
    return f"`{text}`"


def sentence(text: str) -> str:
    """`text` from a comment, with a capital letter and a full stop."""
    text = prose(text)
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith((".", "!", "?", ":")) else ".")


def first_sentence(docstring: str | None) -> str:
    text = " ".join((docstring or "").split())
    return prose(re.split(r"(?<=\.) (?=[A-Z`])", text)[0])


def link(text: str, heading: str) -> str:
    """A link to a heading of the same page."""
    return f"[{text}](#{anchor(heading)})"


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
