"""Rows that cannot be read: each is named, left where it is, and costs what it alone says. Bytes go bad on disks, and
hands edit files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from protos.errors import Corrupt, LaminarError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def reading(table: str, key: object) -> Iterator[None]:
    """Whatever is wrong with a row is Corrupt, with the row's name."""
    try:
        yield
    except LaminarError:
        raise
    except Exception as e:
        raise Corrupt(f"row {key!r} of table {table} is damaged: {type(e).__name__}: {e}") from e


@contextlib.contextmanager
def leaving_out(table: str, key: object) -> Iterator[None]:
    """The same, where the rest goes on without the row."""
    try:
        with reading(table, key):
            yield
    except Corrupt as e:
        log.error("%s; it is left out", e)
