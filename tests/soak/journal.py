"""Files of JSON lines that outlive the process that writes them: what a runner or a trainer did, for it and the judge.

An entry is one write to a file that is appended to: a process that is killed leaves it whole or not at all. What a
full disk cut short is skipped by readers, as it does not end its line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

Entry = dict[str, Any]


class Journal:
    """The writer."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def add(self, **entry: Any) -> None:
        """OSError when it is not written whole."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if os.write(self._fd, line) != len(line):
            raise OSError("a journal's entry was cut short")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Follower:
    """A reader that returns each entry once, or each line of a log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def entries(self) -> Iterator[Entry]:
        """Those that came since the last call."""
        return map(json.loads, self.lines())

    def lines(self) -> Iterator[bytes]:
        """Whole ones that came since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line
