"""The order in which the experience buffer's entries are handed out: a sample's strategy. Pure.

- `fifo`: as they finished, the earliest first;
- `newest`: the latest first;
- `complete_groups`: whole groups only, the one with the earliest member first.

Groups stand in the order of the member that the strategy ranks first, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from protos.errors import InvalidRequest

Strategy = Literal["fifo", "newest", "complete_groups"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished session. `seq`: its number in the order of finishes. `oldest_version`: the oldest weight version that
    sampled one of its tokens."""

    seq: int
    session_id: str
    group_id: str
    oldest_version: int


def ordered(entries: Iterable[Entry], strategy: Strategy = "fifo") -> list[Entry]:
    """The entries, the first to be handed out first."""
    return sorted(entries, key=lambda entry: entry.seq, reverse=strategy == "newest")


def whole_groups(
    entries: Iterable[Entry], count: int, group_size: int, closed: Mapping[str, int], strategy: Strategy = "fifo"
) -> list[Entry]:
    """Up to `count` groups of `group_size` members each, or of as many as `closed` says that they ended with."""
    groups: dict[str, list[Entry]] = {}
    for entry in ordered(entries, strategy):
        groups.setdefault(entry.group_id, []).append(entry)
    whole = (
        members[:group_size]
        for name, members in groups.items()
        if len(members) >= min(group_size, closed.get(name, group_size))
    )
    return [entry for _, members in zip(range(count), whole, strict=False) for entry in members]


def check_wanted(
    trajectories: int | None,
    groups: int | None,
    group_size: int | None,
    strategy: Strategy = "fifo",
    session_ids: Sequence[str] | None = None,
) -> int:
    """The number of trajectories, groups or sessions that is requested. InvalidRequest unless it is one of them."""
    if sum(wanted is not None for wanted in (trajectories, groups, session_ids)) != 1:
        raise InvalidRequest(
            "request one of `trajectories`, `groups` and `session_ids`", hint='such as {"trajectories": 32}'
        )
    if groups is not None:
        if group_size is None or group_size < 1:
            raise InvalidRequest("`groups` needs `group_size`, a positive integer")
        return groups
    if strategy == "complete_groups":
        raise InvalidRequest("strategy `complete_groups` hands out groups", hint="pass `groups` and `group_size`")
    if session_ids is not None:
        return len(set(session_ids))
    assert trajectories is not None
    return trajectories
