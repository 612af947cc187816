"""Tasks as lines of JSON: files of a user, and those beside this module that come with the package.

Every line is an object; `id` names the task, and is its line's number where it lacks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

TaskT = TypeVar("TaskT")


class BadTaskFile(ValueError):
    """A line is no task of the environment; the message names it."""


def read_tasks(path: Path | None, own: str, task_of: Callable[[str, Mapping[str, Any]], TaskT]) -> list[TaskT]:
    """The tasks of a file; None: of the package's file `own`. Raises BadTaskFile, and OSError."""
    raw = (files(__name__) / own).read_bytes() if path is None else path.read_bytes()
    name = own if path is None else str(path)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadTaskFile(
            f"{name}, line {line}: not UTF-8 ({error.reason}); if it is Latin-1: iconv -f latin1 -t utf-8"
        ) from error
    tasks = [
        _task(f"{name}, line {number}", number, line, task_of)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not tasks:
        raise BadTaskFile(f"{name} has no tasks")
    return tasks


def _task(place: str, number: int, line: str, task_of: Callable[[str, Mapping[str, Any]], TaskT]) -> TaskT:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        return task_of(str(row.get("id", number)), row)
    except KeyError as error:
        raise BadTaskFile(f"{place}: the field {error} lacks") from error
    except (ValueError, TypeError) as error:
        raise BadTaskFile(f"{place}: {error}") from error


def endless(tasks: Sequence[TaskT], seed: int) -> Iterator[TaskT]:
    """All tasks in a random order, again and again, each time in another one."""
    rng = random.Random(f"tasks {seed}")
    while True:
        yield from rng.sample(tasks, len(tasks))
