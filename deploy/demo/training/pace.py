"""How many prompts the next training step takes, so that the steps wanted fit a time budget. Pure: what earlier steps
took in, a decision with its reason out.

On a fast processor every step is whole. On a slow one steps take fewer prompts, and where even the smallest do not fit
there are fewer of them. The first step is always taken: a run without one shows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

RECENT = 3
"""Number of steps from which the next one's duration is estimated: only recent ones, since answers become shorter and
the machine busier during a run."""
FIRST_WAIT_S = 8.0
"""How long the first step waits for trajectories, by what was seen on two cores."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A finished step: its number of prompts, and how long it waited for their trajectories."""

    groups: int
    wait_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Next:
    """The next step; `groups` 0: there is none. `end_s` is the expected end of the last step, as `elapsed_s` counts,
    and `steps` the number of steps done by then."""

    groups: int
    steps: int
    end_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Pace:
    """The bounds of a run. `group_s`: a first guess of what one prompt's trajectories take."""

    steps: int
    budget_s: float
    groups_max: int
    groups_min: int
    group_s: float

    def next(self, taken: Sequence[Taken], elapsed_s: float) -> Next:
        """The plan for the step after `taken`."""
        done = len(taken)
        wait_s, group_s = self._recent(taken)
        left_s, missing = self.budget_s - elapsed_s, self.steps - done
        if missing <= 0:
            return Next(0, done, elapsed_s, f"all {self.steps} steps are done")
        smallest_s = wait_s + self.groups_min * group_s
        if done and smallest_s > left_s:
            why = f"another step would take some {smallest_s:.0f} s, and {max(left_s, 0):.0f} s of the budget are left"
            return Next(0, done, elapsed_s, why)
        share_s = left_s / missing
        affordable = (share_s - wait_s) / group_s if group_s > 0 else self.groups_max
        groups = int(max(self.groups_min, min(self.groups_max, affordable)))
        step_s = wait_s + groups * group_s
        more = int(max(1, min(missing, left_s / step_s)))
        reason = f"{groups} of {self.groups_max} prompts: some {step_s:.0f} s, where a step has {share_s:.0f} s"
        return Next(groups, done + more, elapsed_s + more * step_s, reason)

    def _recent(self, taken: Sequence[Taken]) -> tuple[float, float]:
        """(seconds of waiting in a step, seconds of work for one prompt), as it was of late."""
        recent = taken[-RECENT:]
        if not recent:
            return FIRST_WAIT_S, self.group_s
        return fmean(step.wait_s for step in recent), sum(s.seconds for s in recent) / sum(s.groups for s in recent)
