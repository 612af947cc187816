"""What a feed of tables sends: all of them once, then what differs from the tick before. Pure.

Invariants:
- a snapshot, and the deltas that follow it in order, give the tables as they are;
- a client's mailbox holds at most `FRAMES_MAX` frames and `BYTES_MAX` bytes. A client that is slower than that loses
  the frames, and is sent a snapshot in their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

FRAMES_MAX = 64
BYTES_MAX = 2 << 20
"""Of one client's mailbox: several seconds of a busy fleet."""

ROWS_AT_ONCE = 4096
"""Compared without a pause: some two milliseconds."""

Table = Mapping[str, Any]
Tables = Mapping[str, Table]
"""By name of a table and key of a row. Rows are JSON values that nobody changes any more."""


class TableDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """`set`: rows that are new or differ. `gone`: keys of rows that are not there any more."""

    set: Mapping[str, Any] = {}
    gone: Sequence[str] = ()


class Frame(msgspec.Struct, frozen=True):
    """One message of the feed. `life`: another one after a restart of the gateway. `tables`: those that changed; of a
    snapshot all of them, whole. `events`: of the fleet, since the frame before."""

    life: str
    t_unix_s: float
    tables: Mapping[str, TableDelta]
    events: Sequence[Mapping[str, Any]] = ()


def whole(tables: Tables) -> dict[str, TableDelta]:
    return {name: TableDelta(rows) for name, rows in tables.items()}


def compare(before: Tables, after: Tables, found: dict[str, TableDelta]) -> Iterator[None]:
    """Puts into `found` what makes `after` of `before`: the tables with a difference, with a pause after each
    `ROWS_AT_ONCE` rows. Both have the same tables."""
    for name, rows in after.items():
        then, changed, items = before[name], dict[str, Any](), iter(rows.items())
        while some := list(islice(items, ROWS_AT_ONCE)):
            changed |= {key: row for key, row in some if then.get(key) != row}
            yield
        gone = [key for key in then if key not in rows] if len(then) + len(changed) > len(rows) else []
        if changed or gone:
            found[name] = TableDelta(changed, gone)


def apply(tables: dict[str, dict[str, Any]], changes: Mapping[str, TableDelta], *, snapshot: bool) -> None:
    """What a reader of the feed does with a frame's tables."""
    if snapshot:
        tables.clear()
    for name, change in changes.items():
        rows = tables.setdefault(name, {})
        rows.update(change.set)
        for key in change.gone:
            rows.pop(key, None)


@dataclass(slots=True)
class Mailbox:
    """Frames that one client has not been sent yet. `behind`: it has to be sent a snapshot first; so it begins."""

    behind: bool = True
    _frames: deque[bytes] = field(default_factory=deque)
    _bytes: int = 0

    def put(self, frame: bytes) -> None:
        """Adds a frame; to one that is behind, the snapshot has it."""
        if self.behind:
            return
        self._frames.append(frame)
        self._bytes += len(frame)
        if len(self._frames) > FRAMES_MAX or self._bytes > BYTES_MAX:
            self._frames.clear()
            self._bytes, self.behind = 0, True

    def take(self) -> bytes | None:
        """The oldest frame; None when there is none."""
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._bytes -= len(frame)
        return frame
