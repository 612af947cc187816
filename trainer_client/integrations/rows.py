"""Trajectories as rows for trainers: ids, mask and logprobs over the whole sequence, reward, oldest version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import InvalidRequest, Unavailable
from protos.trajectories import Trajectory
from trainer_client.sessions import REWARDED_BY_TRAINER


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence; the lists per token have equal length.

    `begin`: where the first sampled token stands; what comes before it is the prompt. `reward`: None if the trainer is
    to compute it. `version`: the oldest that sampled one of its tokens.
    """

    session_id: str
    group_id: str
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    begin: int
    reward: float | None
    version: int


def row_of(trajectory: Trajectory) -> Row | None:
    """None for one without a token to train on."""
    if 1 not in trajectory.loss_mask:
        return None
    return Row(
        session_id=trajectory.session_id,
        group_id=trajectory.group_id,
        token_ids=trajectory.token_ids,
        mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        begin=trajectory.loss_mask.index(1),
        reward=None if trajectory.metrics.get(REWARDED_BY_TRAINER) else trajectory.reward,
        version=min(version for version in trajectory.versions if version >= 0),
    )


def advantages_of(rewards: Sequence[float]) -> list[float]:
    """GRPO's: each reward of a group less their mean, over their standard deviation."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (deviation + 1e-8) for reward in rewards]


def one_row_each(session_ids: Sequence[str], trajectories: Sequence[Trajectory]) -> list[Row]:
    """One row for each session, in the order of `session_ids`: for trainers that count rows.

    Raises InvalidRequest for a session with branches or without a sampled token, Unavailable for one that is missing.
    """
    rows: dict[str, Row] = {}
    for trajectory in trajectories:
        if trajectory.leaves > 1:
            raise InvalidRequest(
                f"session {trajectory.session_id} has {trajectory.leaves} branches; this trainer takes one row each",
                hint="do not edit the history within a session, or use a trainer that takes branches",
            )
        row = row_of(trajectory)
        if row is None:
            raise InvalidRequest(
                f"session {trajectory.session_id} has no sampled token",
                hint="an agent calls the model once at least",
            )
        rows[row.session_id] = row
    if missing := [name for name in session_ids if name not in rows]:
        raise Unavailable(
            f"{len(missing)} of {len(session_ids)} finished sessions did not come back, such as {missing[0]}",
            hint="another reader took them, or they were staler than the gateway's --staleness-max",
        )
    return [rows[name] for name in session_ids]
