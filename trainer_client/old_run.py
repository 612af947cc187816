"""What a trainer that begins anew does about the versions and the experience of an earlier run.

A trainer that resumed nothing, where versions exist already, has either lost its checkpoint or is started over. Its
weights are behind those that engines serve, and the buffer holds what those sampled. So it is told once.
"""

from __future__ import annotations

import logging
from typing import Literal, get_args

from protos.errors import Conflict, InvalidRequest

log = logging.getLogger(__name__)

OnOldRun = Literal["continue", "refuse", "discard"]
"""`continue`: goes on above the old versions, and trains on the old run's experience as well. `refuse`: raises
Conflict. `discard`: goes on, and what old versions sampled is not trained on."""

THEN = {"continue": "the old run's experience is trained on as well", "discard": "the old run's experience is not used"}

_told: set[tuple[str, int]] = set()
"""The old runs that this process was told of: a publisher and a reader of one trainer meet the same one."""


def check_on_old_run(choice: str) -> None:
    if choice not in get_args(OnOldRun):
        raise InvalidRequest(f"on_old_run={choice!r}", hint=f"one of {', '.join(get_args(OnOldRun))}")


def meet(newest: int, run: str, choice: OnOldRun) -> None:
    """There are versions to `newest`, of `run`, and the trainer resumed nothing. Raises Conflict to refuse."""
    found = f"there are versions to {newest} of run {run or 'unknown'}, and this run begins from its own weights"
    if choice == "refuse":
        raise Conflict(
            f"{found}: on_old_run='refuse'",
            hint="load the checkpoint's state_dict to go on with that run; docs/experience.md has how to start over",
        )
    if (run, newest) not in _told:
        _told.add((run, newest))
        log.warning(
            "%s; %s. To go on with that run load the checkpoint's state_dict first; to choose, pass on_old_run= "
            "(%s) to Publisher and ExperienceReader",
            found,
            THEN[choice],
            ", ".join(map(repr, get_args(OnOldRun))),
        )
