"""Which of the experience buffer's entries a sample gets, and in which order: its strategy. Pure.

- `fifo`: as they finished, the earliest first;
- `newest`: the latest first;
- `priority`: the highest `metrics["priority"]` of the finish first (0 without one), then as they finished;
- `complete_groups`: whole groups only, the one with the earliest member first;
- `staleness_bounded`: as `fifo`; staleness is bounded by token: an entry is too stale when its newest token is, and the
  reader masks the tokens beyond the bound. Under every other strategy the oldest token decides.

Invariants:
- an entry that was used before stands behind all that were used less: each is used once before any is used again;
- groups stand in the order of the member that the strategy ranks first, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from protos.errors import InvalidRequest
from protos.packed import Facts

Strategy = Literal["fifo", "newest", "priority", "complete_groups", "staleness_bounded"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
PRIORITY = "priority"
"""The metric of a finish that ranks it under the strategy of that name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished session. `seq`: its number in the order of finishes. `oldest_version`: the oldest weight version that
    sampled one of its tokens. `uses`: how many readers have acknowledged it. `body`: the name of its row where a log
    is shared. `edits`: how often it was revised."""

    seq: int
    session_id: str
    group_id: str
    oldest_version: int
    facts: Facts = field(default_factory=Facts)
    uses: int = 0
    body: str = ""
    edits: int = 0

    @property
    def newest_version(self) -> int:
        return max(self.facts.versions, default=self.oldest_version)


@dataclass(frozen=True, slots=True)
class Bound:
    """How far behind `version` an entry may be: its oldest token, or its newest if `by_token`, at most `staleness_max`
    versions; None: any."""

    version: int
    staleness_max: int | None = None
    by_token: bool = False

    def allows(self, entry: Entry) -> bool:
        return self.allows_span(entry.oldest_version, entry.newest_version)

    def allows_span(self, oldest: int, newest: int) -> bool:
        """Whether an entry whose tokens are of these versions is within the bound."""
        return self.staleness_max is None or self.version - (newest if self.by_token else oldest) <= self.staleness_max


ANY = Bound(0)
"""Nothing is too stale."""


def _by_priority(entry: Entry) -> tuple[float, int]:
    return -entry.facts.metrics.get(PRIORITY, 0.0), entry.seq


def _earliest(entry: Entry) -> tuple[float, int]:
    return 0.0, entry.seq


def _latest(entry: Entry) -> tuple[float, int]:
    return 0.0, -entry.seq


_RANKS: Mapping[Strategy, Callable[[Entry], tuple[float, int]]] = {"newest": _latest, "priority": _by_priority}


def ordered(entries: Iterable[Entry], strategy: Strategy = "fifo", uses_max: int = 1) -> list[Entry]:
    """The entries that were used less than `uses_max` times, the first to be handed out first."""
    rank = _RANKS.get(strategy, _earliest)
    usable = (entry for entry in entries if entry.uses < uses_max)
    return sorted(usable, key=lambda entry: (entry.uses, rank(entry)))


def whole_groups(entries: Sequence[Entry], count: int, group_size: int, closed: Mapping[str, int]) -> list[Entry]:
    """Up to `count` groups of the `ordered` entries, of `group_size` members each, or of as many as `closed` says that
    they ended with."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group_id, []).append(entry)
    whole = (
        members[:group_size]
        for name, members in groups.items()
        if len(members) >= min(group_size, closed.get(name, group_size))
    )
    return [entry for _, members in zip(range(count), whole, strict=False) for entry in members]


def of_equal_rewards(entries: Sequence[Entry]) -> list[Entry]:
    """The members of groups whose rewards are all equal: no member is better than another, so a trainer learns nothing
    from them."""
    rewards: dict[str, set[float]] = {}
    for entry in entries:
        rewards.setdefault(entry.group_id, set()).update(entry.facts.rewards)
    return [entry for entry in entries if len(rewards[entry.group_id]) == 1]


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
