"""What people should know of a relay's life so far, for its status: copies lost or damaged, versions offered again.

Invariants:
- the newest NOTICES_MAX are kept, in the order in which they came; the log has all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

NOTICES_MAX = 32


@dataclass(frozen=True, slots=True)
class Notice:
    """One line, and when it was written."""

    unix_s: float
    text: str


class Notices:
    """Any thread may add one or read them."""

    def __init__(self) -> None:
        self._kept: deque[Notice] = deque(maxlen=NOTICES_MAX)

    def add(self, text: str, unix_s: float) -> None:
        self._kept.append(Notice(unix_s, text))

    def all(self) -> list[Notice]:
        return list(self._kept)
