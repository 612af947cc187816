"""The order in which relays stand for master of a model.

Invariants:
- every relay computes the same ranking from the same view; the registry alone decides the election;
- publishing hosts come before others, holders of the newest sealed version before those without it.
"""

from __future__ import annotations

from collections.abc import Collection

from paramserver.core.records import Member

RANK_DELAY_S = 0.5  # a lower-ranked candidate gives each better one this long to win


def candidacy(me: str, members: Collection[Member], newest_holders: Collection[str]) -> tuple[float, str]:
    """How long to wait before campaigning, and why. Newest holders: empty when nothing is sealed yet."""
    ranked = sorted(
        members, key=lambda member: (not member.publish_host, member.name not in newest_holders, member.name)
    )
    names = [member.name for member in ranked]
    if me not in names:
        return RANK_DELAY_S * (len(names) + 1), "not a registered member"
    rank = names.index(me)
    return RANK_DELAY_S * rank, f"rank {rank} of {names}"
