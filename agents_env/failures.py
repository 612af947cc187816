"""Errors of rollouts. Each failure is attributed to one boundary, where it happens."""

from __future__ import annotations

from typing import Literal

Boundary = Literal["model", "session", "environment"]
"""`model`: the OpenAI API; `session`: opening or ending a session; `environment`: the task, the tool or the scorer."""


class RolloutFailed(Exception):
    """One rollout ended without a reward. `kind` is the HTTP status, the class of the cause, or
    "timeout"; `phase` is when it failed (`agents_env.runner.phases`), or "session". `again`: whether another attempt
    may end otherwise."""

    def __init__(
        self, boundary: Boundary, kind: str, message: str, phase: str = "session", *, again: bool = True
    ) -> None:
        super().__init__(f"{boundary} ({kind}): {message}")
        self.boundary = boundary
        self.kind = kind
        self.message = message
        self.phase = phase
        self.again = again


class RunFailed(Exception):
    """The run cannot continue; the message names the problem and its remedy."""
