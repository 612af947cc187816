"""A session's turns as a tree: each path from a root to a leaf is one training sequence. Pure.

Invariants:
- a turn holds only what it adds to the path before it: its prompt's new ids, then what the policy sampled;
- a turn's parent ended before the turn began, so its ids never change under a child;
- over all leaves every sampled token has a loss mask of 1 exactly once: in the first leaf (by end) whose path holds it;
  but for the tail of an answer whose client left before it was sent: no agent acted on that, so it has 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.core.types import FinishReason, TurnId, TurnRecord
from protos.trajectories import Segment

Message = Mapping[str, Any]


@dataclass(slots=True)
class Turn:
    """One ended turn. `start` is its first position on its path; segments count the tokens of the path.

    `head` (of a root) and `messages`: the chat that its ids encode; empty until recorded, and for ids without a chat.
    """

    turn_id: TurnId
    parent: TurnId | None
    depth: int
    start: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    segments: list[Segment]
    finish_reason: FinishReason | None
    head: Message | None = None
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    leaf_reward: float | None = None
    text_mark: tuple[int, bytes] | None = None  # of its path's text: bytes and digest, once it was compared
    seen: int | None = None  # so many of its sampled tokens were sent to a client; None: all of them

    @property
    def end(self) -> int:
        return self.start + len(self.prompt_ids) + len(self.token_ids)

    @property
    def versions(self) -> list[int]:
        """The version of each sampled token."""
        return [s.version for s in self.segments for _ in range(s.end - s.start)]

    def shorten(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` sampled tokens: a stop string ended the answer there."""
        keep = self.start + len(self.prompt_ids) + num_tokens
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.segments = [msgspec.structs.replace(s, end=min(s.end, keep)) for s in self.segments if s.start < keep]
        self.finish_reason, self.text_mark = "stop", None


@dataclass(frozen=True, slots=True)
class PathRecord:
    """One path: lists with an entry per token, equally long; `turns` from the root on."""

    turns: tuple[Turn, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


@dataclass(slots=True)
class TurnTree:
    """Turns in the order in which they ended."""

    turns: dict[TurnId, Turn] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.turns)

    def snapshot(self) -> TurnTree:
        """The same turns, to be read in another thread while more of them end."""
        return TurnTree(dict(self.turns))

    def __contains__(self, turn_id: TurnId) -> bool:
        return turn_id in self.turns

    @property
    def newest(self) -> Turn | None:
        return next(reversed(self.turns.values()), None)

    def path(self, turn: Turn | None) -> list[Turn]:
        """From the root to `turn`; nothing for None."""
        found: list[Turn] = []
        while turn is not None:
            found.append(turn)
            turn = None if turn.parent is None else self.turns[turn.parent]
        return found[::-1]

    def ids(self, turn: Turn | None) -> list[int]:
        """All ids up to the end of `turn`."""
        found: list[int] = []
        for one in self.path(turn):
            found += one.prompt_ids
            found += one.token_ids
        return found

    def children(self, turn: Turn | None) -> list[Turn]:
        parent = None if turn is None else turn.turn_id
        return [t for t in self.turns.values() if t.parent == parent]

    def leaves(self) -> list[Turn]:
        parents = {t.parent for t in self.turns.values()}
        return [t for t in self.turns.values() if t.turn_id not in parents]

    def add(self, record: TurnRecord) -> Turn:
        """An ended turn; `record.segments` count its sampled tokens. ValueError if it does not extend its parent."""
        request = record.request
        if request.parent is not None and request.parent not in self.turns:
            raise ValueError(f"turn {request.turn_id} goes on from turn {request.parent}, which is not there")
        before = self.ids(self.turns[request.parent]) if request.parent is not None else []
        if list(request.prompt_ids[: len(before)]) != before:
            raise ValueError(f"turn {request.turn_id} does not begin with the ids of turn {request.parent}")
        offset = len(request.prompt_ids)
        turn = self.turns[request.turn_id] = Turn(
            turn_id=request.turn_id,
            parent=request.parent,
            depth=0 if request.parent is None else self.turns[request.parent].depth + 1,
            start=len(before),
            prompt_ids=list(request.prompt_ids[len(before) :]),
            token_ids=list(record.token_ids),
            logprobs=list(record.logprobs),
            segments=[
                msgspec.structs.replace(s, start=s.start + offset, end=s.end + offset)
                for s in record.segments
                if s.end > s.start
            ],
            finish_reason=record.finish_reason,
        )
        return turn

    def sequence(self, leaf: Turn | None, counted: set[TurnId]) -> PathRecord:
        """The path to `leaf`. Turns of `counted` stand in it unmasked (0), since another leaf trains on them."""
        path = self.path(leaf)
        out = PathRecord(tuple(path), segments=[s for t in path for s in t.segments])
        for turn in path:
            prompt, sampled = len(turn.prompt_ids), len(turn.token_ids)
            used = 0 if turn.turn_id in counted else sampled
            if turn is leaf and turn.seen is not None:  # a turn that was gone on from was read
                used = min(used, turn.seen)
            rest = sampled - used
            out.token_ids.extend(turn.prompt_ids)
            out.token_ids.extend(turn.token_ids)
            out.logprobs.extend([0.0] * prompt)
            out.logprobs.extend(turn.logprobs[:used])
            out.logprobs.extend([0.0] * rest)
            out.loss_mask.extend([0] * prompt + [1] * used + [0] * rest)
            out.versions.extend([-1] * prompt)
            out.versions.extend(turn.versions[:used])
            out.versions.extend([-1] * rest)
        return out

    def sequences(self) -> Iterator[PathRecord]:
        """A record for each leaf, in the order in which the leaves ended. Together they have `path_tokens` tokens."""
        counted: set[TurnId] = set()
        for leaf in self.leaves():
            path = self.sequence(leaf, counted)
            yield path
            counted.update(t.turn_id for t in path.turns)

    @property
    def path_tokens(self) -> int:
        """The tokens of all leaves' paths: a beginning that they share counts in each."""
        return sum(leaf.end for leaf in self.leaves())

    def sampled_versions(self) -> tuple[int, ...]:
        return tuple(sorted({s.version for t in self.turns.values() for s in t.segments}))


def matched(tree: TurnTree, items: Sequence[Any], own: Callable[[Turn], Sequence[Any] | None]) -> Turn | None:
    """The turn whose path is the longest beginning of `items`; of equals the one that ended last.

    `own(turn)` are the items that one turn adds; None: it can never be matched.
    """
    by_parent: dict[TurnId | None, list[Turn]] = {}
    for turn in tree.turns.values():
        by_parent.setdefault(turn.parent, []).append(turn)
    best, longest = None, 0
    waiting: list[tuple[TurnId | None, int]] = [(None, 0)]
    while waiting:
        at, position = waiting.pop()
        for child in by_parent.get(at, ()):
            added = own(child)
            if added is None or list(items[position : position + len(added)]) != list(added):
                continue
            end = position + len(added)
            waiting.append((child.turn_id, end))
            if end >= longest:
                best, longest = child, end
    return best
