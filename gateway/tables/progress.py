"""The progress of an export or import, on a terminal; elsewhere nothing is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress(num_sessions: int) -> Iterator[Callable[[], None]]:
    """Yields the function to call for each session."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with click.progressbar(length=num_sessions, label="sessions", file=sys.stderr, show_pos=True) as bar:
        yield lambda: bar.update(1)
