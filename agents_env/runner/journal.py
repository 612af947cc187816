"""The journal of a run: what began and what ended, so that the same command goes on where it stopped.

Invariants:
- a line is written before what it announces (`began`) and after what it reports (`ended`); so after a kill at any
  point, each sample without an end has its last attempt named;
- a journal belongs to one run: other tasks or another environment are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from agents_env.failures import RunFailed

Place = tuple[str, int]
"""A group's id and a sample's index."""


@dataclass(slots=True)
class Past:
    """What earlier lives of the run left. `ended`: rewards, None for a sample that was given up. `attempts`: the last
    one that began. `leases`: those that have not ended."""

    ended: dict[Place, float | None] = field(default_factory=dict)
    attempts: dict[Place, int] = field(default_factory=dict)
    leases: dict[Place, str] = field(default_factory=dict)


class Journal:
    """`with Journal.open(path, run) as journal`: `run` has what must be the same in each life."""

    def __init__(self, path: Path, run_id: str, past: Past, file: TextIO) -> None:
        self.path, self.run_id, self.past = path, run_id, past
        self._file = file

    @classmethod
    def open(cls, path: Path, run_id: str, run: Mapping[str, Any]) -> Self:
        """Makes the file, or goes on with it, then under its own run id. RunFailed when it is another run's."""
        lines = _read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not lines:
            file = path.open("w", encoding="utf-8", buffering=1)
            file.write(json.dumps({"event": "run", "run_id": run_id, **run}) + "\n")
            return cls(path, run_id, Past(), file)
        first = lines[0]
        for name, value in run.items():
            if first.get(name) != value:
                raise RunFailed(
                    f"{path} is the journal of a run with {name}={first.get(name)!r}, not {value!r}; "
                    "give the same options, or another --journal"
                )
        past = Past()
        for line in lines[1:]:
            _replay(past, line)
        file = path.open("a", encoding="utf-8", buffering=1)
        if not path.read_bytes().endswith(b"\n"):
            file.write("\n")  # the last line was cut: it announced nothing
        return cls(path, first["run_id"], past, file)

    def began(self, place: Place, attempt: int, lease_id: str) -> None:
        self._write("began", place, attempt=attempt, lease_id=lease_id)

    def ended(self, place: Place, reward: float | None) -> None:
        self._write("ended", place, reward=reward)

    def returned(self, place: Place) -> None:
        """The lease of the sample was given back: it is any runner's again."""
        self._write("returned", place)

    def _write(self, event: str, place: Place, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, "group_id": place[0], "sample_index": place[1], **fields}) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_decoded(line, found))
        except ValueError as error:
            if number < len(lines):  # the last one may have been cut by a crash
                raise RunFailed(f"{path}, line {number} is no journal's: {error}") from error
    return found


def _decoded(line: str, before: list[dict[str, Any]]) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict) or (value.get("event") == "run") != (not before):
        raise ValueError("an event is expected, the first one of kind `run`")
    if before and not (isinstance(value.get("group_id"), str) and isinstance(value.get("sample_index"), int)):
        raise ValueError("it names no sample")
    return value


def _replay(past: Past, line: Mapping[str, Any]) -> None:
    place = (line["group_id"], line["sample_index"])
    match line["event"]:
        case "began":
            past.attempts[place] = line["attempt"]
            past.leases[place] = line["lease_id"]
        case "ended":
            past.ended[place] = line["reward"]
            past.leases.pop(place, None)
        case "returned":
            past.leases.pop(place, None)
