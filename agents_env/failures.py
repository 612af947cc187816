"""What can go wrong in a rollout, each failure attributed once, where it happens, to one boundary."""

from __future__ import annotations

from typing import Literal

Boundary = Literal["model", "session", "environment"]
"""`model`: the OpenAI API; `session`: opening or ending a session; `environment`: the task, the tool or the scorer."""


class RolloutFailed(Exception):
    """One rollout came to no reward. `kind` is the HTTP status or the class of the error below."""

    def __init__(self, boundary: Boundary, kind: str, message: str) -> None:
        super().__init__(f"{boundary} ({kind}): {message}")
        self.boundary = boundary
        self.kind = kind
        self.message = message


class RunFailed(Exception):
    """The run cannot go on; the message says what is wrong and what would be right."""
