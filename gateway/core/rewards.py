"""Rewards of a session, of single turns, and of leaves: given at its finish, or later within a window. Pure.

Invariants:
- a name that is no turn (or no leaf) of the session is refused, and then nothing is changed;
- a leaf without a reward of its own has the session's;
- what is recorded of an ended session can be given again at any time, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.core.endings import Ended, Finish
from gateway.core.sessions import SessionState
from gateway.core.types import TurnId
from protos.errors import InvalidRequest
from protos.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Given:
    """`turns` and `leaves` by an answer's id; a leaf is named by its last turn's."""

    session: float | None = None
    turns: Mapping[str, float] = field(default_factory=dict)
    leaves: Mapping[str, float] = field(default_factory=dict)


def is_recorded(ended: Ended, given: Given) -> bool:
    """Whether the end of a session has these rewards already, as they were given with it or after it."""
    turns, leaves = _recorded(ended)
    return (
        given.session in (None, ended.reward)
        and all(turns.get(turn_of(name)) == reward for name, reward in given.turns.items())
        and all(leaves.get(turn_of(name)) == reward for name, reward in given.leaves.items())
    )


def with_given(ended: Ended, given: Given) -> Ended:
    """The end with these rewards in place of those before."""
    turns, leaves = _recorded(ended)
    reward = ended.reward if given.session is None else given.session
    turns |= {turn_of(name): reward for name, reward in given.turns.items()}
    leaves |= {turn_of(name): reward for name, reward in given.leaves.items()}
    return msgspec.structs.replace(ended, revised=Finish(reward, turns, leaves))


def _recorded(ended: Ended) -> tuple[dict[str, float], dict[str, float]]:
    """Rewards of turns and of leaves, by turn."""
    ends = [end for end in (ended.asked, ended.revised) if end is not None]
    turns: dict[str, float] = {turn_of(name): reward for end in ends for name, reward in end.turns.items()}
    leaves: dict[str, float] = {turn_of(name): reward for end in ends for name, reward in end.leaves.items()}
    return turns, leaves


ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "generate-")
"""Of the ids of answers, by the API they came by; the rest is the turn's."""


def turn_of(answer_id: str) -> TurnId:
    prefix = next((prefix for prefix in ANSWER_PREFIXES if answer_id.startswith(prefix)), "")
    return TurnId(answer_id.removeprefix(prefix))


def note(state: SessionState, given: Given) -> None:
    """Puts rewards into the tree of a session that is not in the buffer yet. InvalidRequest changes nothing."""
    leaves = {turn.turn_id for turn in state.tree.leaves()}
    _check(given, set(state.tree.turns), leaves)
    for name, reward in given.turns.items():
        state.tree.turns[turn_of(name)].reward = reward
    for name, reward in given.leaves.items():
        state.tree.turns[turn_of(name)].leaf_reward = reward


def revised(leaves: Sequence[Trajectory], given: Given) -> list[Trajectory]:
    """A finished session's trajectories with the rewards changed."""
    _check(given, {TurnId(t) for leaf in leaves for t in leaf.turn_ids}, {TurnId(leaf.turn_ids[-1]) for leaf in leaves})
    turns = {turn_of(name): reward for name, reward in given.turns.items()}
    own = {turn_of(name): reward for name, reward in given.leaves.items()}
    return [_revised(leaf, given.session, turns, own) for leaf in leaves]


def _revised(
    leaf: Trajectory, session: float | None, turns: Mapping[TurnId, float], own: Mapping[TurnId, float]
) -> Trajectory:
    before = leaf.turn_rewards or [None] * len(leaf.turn_ids)
    by_turn = [turns.get(TurnId(t), old) for t, old in zip(leaf.turn_ids, before, strict=True)]
    reward = own.get(TurnId(leaf.turn_ids[-1]), leaf.reward if session is None or leaf.own_reward else session)
    return msgspec.structs.replace(
        leaf,
        reward=reward,
        own_reward=leaf.own_reward or TurnId(leaf.turn_ids[-1]) in own,
        turn_rewards=[] if by_turn.count(None) == len(by_turn) else by_turn,
    )


def _check(given: Given, turns: set[TurnId], leaves: set[TurnId]) -> None:
    for names, known, what in ((given.turns, turns, "turn"), (given.leaves, leaves, "leaf")):
        for name in names:
            if turn_of(name) not in known:
                raise InvalidRequest(f"the session has no {what} {name!r}", hint="name it by its answer's id")
