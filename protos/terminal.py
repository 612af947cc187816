"""What commands print. Names, reasons and errors that others chose come through here, and through nothing else.

Invariants:
- a text is one line, as `foreign_text` makes it: it forges none, and moves no cursor;
- nothing of it is taken for markup, and no line is broken for a pipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from protos.foreign_text import LINE_CHARS_MAX, one_line

if TYPE_CHECKING:  # half of a command's start
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPE_COLUMNS = 10_000
"""Width of output that is not a terminal."""


class Failed(click.ClickException):
    """Ends the command with an error, whose text may be another's."""

    def format_message(self) -> str:
        return one_line(self.message)


def say(*lines: str, err: bool = False, chars_max: int = LINE_CHARS_MAX) -> None:
    for text in lines:
        click.echo(one_line(text, chars_max), err=err)


def line(text: object, style: str = "") -> Text:
    from rich.text import Text

    return Text(one_line(str(text)), style=style, overflow="fold")


def add_row(table: Table, *cells: object) -> None:
    from rich.text import Text

    table.add_row(*(Text(one_line(str(cell))) for cell in cells))


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    found = Console(markup=False, highlight=False, stderr=stderr)
    if not found.is_terminal:
        found.width = PIPE_COLUMNS
    return found
