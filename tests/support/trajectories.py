"""Trajectories as the gateway would hand them out, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_client import Segment, Trajectory


def make_trajectory(
    group: str,
    index: int,
    prompt: Sequence[int],
    *turns: tuple[Sequence[int], Sequence[int]],
    reward: float = 0.0,
    version: int = 1,
    logprob: float = -1.0,
) -> Trajectory:
    """`turns` are pairs (sampled ids, ids that the environment answered)."""
    token_ids, mask = list(prompt), [0] * len(prompt)
    segments: list[Segment] = []
    for number, (sampled, answered) in enumerate(turns):
        start = len(token_ids)
        token_ids += [*sampled, *answered]
        mask += [1] * len(sampled) + [0] * len(answered)
        segments.append(
            Segment(
                turn=number,
                engine="e0",
                incarnation="a",
                version=version,
                start=start,
                end=start + len(sampled),
                cause="start",
                started_unix_s=1.0,
                ended_unix_s=2.0,
            )
        )
    return Trajectory(
        session_id=f"{group}-{index}",
        group_id=group,
        sample_index=index,
        reward=reward,
        status="completed",
        mixed=False,
        split="train",
        token_ids=token_ids,
        logprobs=[logprob * bit for bit in mask],
        loss_mask=mask,
        versions=[version if bit else -1 for bit in mask],
        turns=len(turns),
        segments=segments,
        started_unix_s=1.0,
        finished_unix_s=2.0,
    )
