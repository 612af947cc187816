"""What a trainer's checkpoint keeps of its publishing, so that a resumed trainer goes on with it.

Invariants: plain numbers and texts only, so that any format of checkpoints holds it; the newest STEPS_KEPT versions
keep their steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paramserver.client import TicketData
from protos.errors import InvalidRequest

STEPS_KEPT = 1024
FORMAT = 1


class RunState:
    """The versions that one trainer published, over all its runs."""

    def __init__(self, model: str, run: str) -> None:
        self.model, self.run = model, run
        self.earlier_run: str | None = None  # that a loaded checkpoint was of
        self.version = 0
        self.steps: dict[int, int] = {}

    def saw(self, version: int, step: int) -> None:
        """A version was published."""
        self.version = max(self.version, version)
        self.steps[version] = step
        for old in sorted(self.steps)[:-STEPS_KEPT]:
            del self.steps[old]

    def state_dict(self, in_doubt: TicketData | None = None) -> dict[str, Any]:
        """`in_doubt`: the version whose publish ended before its outcome was known."""
        return {
            "format": FORMAT,
            "model": self.model,
            "run": self.run,
            "version": self.version,
            "steps": [[version, step] for version, step in sorted(self.steps.items())],
            "in_doubt": None if in_doubt is None else msgspec.to_builtins(in_doubt),
        }

    def load(self, state: Mapping[str, Any]) -> TicketData | None:
        """Takes over what `state_dict` gave; returns the version in doubt.

        InvalidRequest for anything else, and for another model's.
        """
        try:
            known, model, run = state["format"], state["model"], state["run"]
            version, steps = int(state["version"]), {int(version): int(step) for version, step in state["steps"]}
            in_doubt = msgspec.convert(state.get("in_doubt"), TicketData | None)
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            raise InvalidRequest(f"this is no state of a publisher: {error!r}", hint="pass state_dict()") from error
        if known != FORMAT:
            raise InvalidRequest(f"a publisher's state of format {known!r}", hint=f"this version reads {FORMAT}")
        if model != self.model:
            raise InvalidRequest(f"a state of model {model!r} for a publisher of {self.model!r}", hint="load its own")
        if self.steps:
            raise InvalidRequest("this publisher has published already", hint="load the state before the first publish")
        self.earlier_run, self.version, self.steps = str(run), version, steps
        return in_doubt
