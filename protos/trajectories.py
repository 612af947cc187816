"""Trajectories as the gateway records them and trainers read them: the structs that both share.

The two sides may be of different releases: unknown fields are ignored, and `cause`, `evidence`, `logprobs` and `status`
are plain strings, so that a later gateway may add values.

`gc=False`: they hold numbers, strings, and lists of such, so they are in no cycle, and a batch of a thousand costs no
walks of the garbage collector.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class SampledWith(msgspec.Struct, frozen=True, gc=False):
    """How a segment was sampled.

    `logprobs` is the distribution that the recorded logprobs belong to: "policy" (the one sampled from), "raw" (the
    model's, before temperature, truncation and penalties), "untruncated" (before `top_p`, `top_k` and `min_p`), or
    "greedy" (the likeliest token was taken). `min_tokens`: how many of the segment's first tokens could not be end
    tokens; in a turn's later segments, what was left of the turn's own.
    """

    temperature: float
    top_p: float
    top_k: int
    presence_penalty: float
    frequency_penalty: float
    constrained: bool
    logprobs: str
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}  # by token id
    min_tokens: int = 0


class VersionChange(msgspec.Struct, frozen=True, gc=False):
    """A session's version was lost, and the session continued under another one."""

    turn: int
    turn_id: str
    from_version: int
    to_version: int
    reason: str


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run of tokens of one turn, made by one engine under one version. `start` and `end` index the trajectory's token
    ids (in a turn's record those of the turn), end exclusive.

    `evidence` for the version: "told" (the engine reported it with the tokens), "looked" (a check of the engine
    afterwards found the same incarnation and version), "contradicted" (the check found another version), or "none".
    `seed` is the one that the engine sampled by; None: the turn has none, or the engine ignores it.
    `dtype` is the number format that the engine computes in; empty if it does not report one. A greedy turn whose
    segments differ in it can differ from the turn that one engine alone would have generated.
    """

    turn: int
    engine: str
    incarnation: str
    version: int
    start: int
    end: int
    cause: str  # "start" | "move" | "cut"
    started_unix_s: float
    ended_unix_s: float
    seed: int | None = None
    sampled_with: SampledWith | None = None
    evidence: str = "none"
    dtype: str = ""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One path through a finished session; the lists per token have equal length.

    A session with an edited history or concurrent turns has one trajectory for each leaf. Their shared beginning is
    masked in all but the first, so that every sampled token is trained on once.
    """

    session_id: str
    group_id: str
    sample_index: int
    reward: float
    status: str  # "completed" | "truncated"
    mixed: bool  # more than one version sampled its tokens
    split: Literal["train", "eval"]
    token_ids: list[int]
    logprobs: list[float]  # of the behaviour policy; 0.0 where loss_mask is 0
    loss_mask: list[int]  # 1: sampled by the policy, and not trained on in an earlier leaf
    versions: list[int]  # -1 where loss_mask is 0
    turns: int
    segments: list[Segment]
    started_unix_s: float
    finished_unix_s: float
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    leaf: int = 0  # which path of the session, in the order in which they ended
    leaves: int = 1
    version_policy: Literal["segment", "strict", "fail"] = "segment"
    version_changes: list[VersionChange] = msgspec.field(default_factory=list)
    turn_ids: list[str] = msgspec.field(default_factory=list)  # of the path; the id of a response without its prefix
    own_reward: bool = False  # the leaf's, not the session's
    turn_rewards: list[float | None] = msgspec.field(default_factory=list)  # by turn of the path; empty: none given
