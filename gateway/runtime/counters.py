"""What happened to turns and sessions since the gateway started."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Each only grows."""

    turns_started: int = 0
    turns_completed: int = 0
    turns_cut: int = 0
    turns_resumed: int = 0
    turns_lost: int = 0
    turns_aborted: int = 0
    turns_orphaned: int = 0
    turns_joined: int = 0
    turns_recovered: int = 0
    turns_mixed_version: int = 0
    turns_mixed_dtype: int = (
        0  # by engines that compute in different dtypes: a greedy turn may then differ from an unmoved one
    )
    moves: int = 0
    repacks: int = 0
    tokens_generated: int = 0
    version_mismatches: int = 0
    trajectories_finished: int = 0
    sessions_abandoned: int = 0
    cuts_by_reason: dict[str, int] = field(default_factory=dict)
