"""A session's end: the request, and the answer that a repeated request gets again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

How = Literal["finished", "abandoned"]
Status = Literal["completed", "truncated"]


class Finish(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    reward: Annotated[
        float | None, msgspec.Meta(description="The session's. Without it the session ends, and waits for it.")
    ] = None
    turns: Annotated[dict[str, float], msgspec.Meta(description="Rewards of turns, by the id of the answer.")] = {}
    leaves: Annotated[
        dict[str, float], msgspec.Meta(description="Rewards of trajectories, by the id of the last answer of each.")
    ] = {}
    status: Annotated[Status, msgspec.Meta(description="truncated: a limit ended it, not the agent.")] = "completed"
    metrics: Annotated[dict[str, float], msgspec.Meta(description="Numbers by name, stored with each trajectory.")] = {}


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended with a reward. `stored`: it is in the experience buffer."""

    session_id: str
    reward: float
    status: str
    turns: int
    tokens: int
    sampled_tokens: int
    mixed: bool
    leaves: int
    stored: bool
    evidence: list[str]


class Ended(msgspec.Struct, frozen=True):
    """How a session ended. `asked`: the request; `told`: its answer. Both are None for a session that was abandoned, or
    whose end was interrupted by a crash. `owner`: the session's. `first`: the finish without a reward that came
    before `asked`. `revised`: rewards that were given after the end, in place of those of `asked`. Stored under these
    names."""

    how: How
    asked: Finish | None = None
    told: Finished | None = None
    owner: str = ""
    first: Finish | None = None
    revised: Finish | None = None

    @property
    def reward(self) -> float | None:
        """The session's, as it is recorded now."""
        found = None if self.revised is None else self.revised.reward
        return self.told.reward if found is None and self.told is not None else found

    def __str__(self) -> str:
        reward = "" if self.told is None else f" with reward {self.reward:g}, {self.told.status}"
        return f"{self.how}{reward}"


@dataclass(frozen=True, slots=True)
class Unrewarded:
    """A session that was finished without a reward waits for it until `until_unix_s`. `asked`: the request."""

    asked: Finish
    until_unix_s: float
