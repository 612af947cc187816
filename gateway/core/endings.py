"""A session's end: the request, and the answer that a repeated request gets again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from protos.errors import Conflict
from protos.trajectories import Trajectory

How = Literal["finished", "abandoned"]
Status = Literal["completed", "truncated"]
NAME_CHARS_MAX = 256
METRICS_MAX, TAGS_MAX = 256, 64
RATED_MAX = 8192
"""Turns or leaves that one request rates: twice as many as a session may have, so that an agent may name one twice."""
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Ratings = Annotated[dict[Name, float], msgspec.Meta(max_length=RATED_MAX)]
"""Rewards by the id of an answer. They stay with how the session ended."""
Metrics = Annotated[dict[Name, float], msgspec.Meta(max_length=METRICS_MAX)]
Tags = Annotated[dict[Name, Annotated[str, msgspec.Meta(max_length=4096)]], msgspec.Meta(max_length=TAGS_MAX)]
"""Metrics and tags are stored with each trajectory, and returned with it."""


class Finish(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    reward: Annotated[
        float | None, msgspec.Meta(description="The session's. Without it the session ends, and waits for it.")
    ] = None
    turns: Annotated[Ratings, msgspec.Meta(description="Rewards of turns, by the id of the answer.")] = {}
    leaves: Annotated[
        Ratings, msgspec.Meta(description="Rewards of trajectories, by the id of the last answer of each.")
    ] = {}
    status: Annotated[Status, msgspec.Meta(description="truncated: a limit ended it, not the agent.")] = "completed"
    metrics: Annotated[Metrics, msgspec.Meta(description="Numbers by name, stored with each trajectory.")] = {}
    group_id: Annotated[
        Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None,
        msgspec.Meta(
            description="Of a session that its first call made: the group of its trajectories, if not its own."
        ),
    ] = None
    sample_index: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)] | None,
        msgspec.Meta(description="Its number in that group, from 0."),
    ] = None
    tags: Annotated[Tags, msgspec.Meta(description="Texts by name, beside those that the session was made with.")] = {}


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended with a reward. `stored`: it is in the experience buffer. `tokens`: all of the path to
    the turn that ended last, prompts included; `sampled_tokens`: what was sampled in all turns, in every branch."""

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


def check_place(session_id: str, group_id: str, request: Finish, *, made: bool) -> None:
    """Raises Conflict for a finish that names another group than the session, made in `group_id`, may be in. `made`:
    the group that it names was made by `POST /groups`, with members of its own."""
    if request.group_id in (None, group_id):
        return
    if made or group_id != session_id:
        why = f"is in group {group_id}" if group_id != session_id else "is none of its members"
        raise Conflict(
            f"session {session_id} cannot join group {request.group_id}: it {why}",
            hint="a finish names the group of a session that was made without one",
        )


def placed(leaves: Iterable[Trajectory], *requests: Finish) -> Iterator[Trajectory]:
    """The trajectories with the group and the tags that their finish names; the last request decides."""
    place: dict[str, Any] = {}
    tags: dict[str, str] = {}
    for request in requests:
        named = {"group_id": request.group_id, "sample_index": request.sample_index}
        place |= {name: value for name, value in named.items() if value is not None}
        tags |= request.tags
    return (msgspec.structs.replace(leaf, tags={**leaf.tags, **tags}, **place) for leaf in leaves)
