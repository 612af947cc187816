"""Damaged rows: each is named in the log, left where it is, and costs its own content alone.

A file may have rows that do not decode: disks return wrong bytes, and people edit files. Every load reads row by row
within `leaving_out` or `reading`, so that one such row does not keep the gateway from starting. A row is never deleted
for it: a repaired file, or a newer gateway, may still read it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from protos.errors import Corrupt, LaminarError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def reading(table: str, key: object) -> Iterator[None]:
    """Any error within the block is raised as Corrupt, with the row's name."""
    try:
        yield
    except LaminarError:
        raise
    except Exception as e:
        raise Corrupt(f"row {key!r} of table {table} is damaged: {type(e).__name__}: {e}") from e


@contextlib.contextmanager
def leaving_out(table: str, key: object) -> Iterator[None]:
    """As `reading`, but logs the damaged row and continues without it."""
    try:
        with reading(table, key):
            yield
    except Corrupt as e:
        log.error("%s; it is left out", e)
