"""Sessions: one rollout each, token-exact. Pure; the shell owns one `SessionState` per live session.

Invariants:
- the four lists per token have equal length; `loss_mask` is 1 exactly where the policy sampled the token;
- at most one turn runs at a time (sessions are linear in this release; concurrent turns and edited histories that
  should become branches are named as such: a second turn is refused, an edited history starts the record anew);
- an ended session never comes back to life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gateway.core.types import (
    EngineName,
    FinishReason,
    GroupId,
    Segment,
    SessionId,
    Split,
    Trajectory,
    TurnId,
    TurnRecord,
    TurnRequest,
    Version,
)
from protos.errors import Conflict

Phase = Literal["live", "finished", "abandoned"]


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What the caller said of a session when it was made."""

    session_id: SessionId
    group_id: GroupId
    sample_index: int = 0
    group_size: int = 1
    split: Split = "train"
    train: bool = True
    ephemeral: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Before:
    """The record before a turn began: its length, and the record itself where the turn started it anew."""

    num_tokens: int
    replaced: tuple[list[int], list[float], list[int], list[int], list[Segment]] | None = None


@dataclass(slots=True)
class SessionState:
    """One session's record. `version` is the one it stays on, once its first turn was placed."""

    spec: SessionSpec
    created_unix_s: float
    touched_unix_s: float
    phase: Phase = "live"
    running: TurnId | None = None
    version: Version | None = None
    engine: EngineName | None = None  # holds its prefix
    turns: int = 0
    moves: int = 0
    rebased: int = 0  # histories that did not extend the record
    last_finish_reason: FinishReason | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    _before: _Before | None = None  # the running turn

    @property
    def session_id(self) -> SessionId:
        return self.spec.session_id

    @property
    def sampled_versions(self) -> tuple[int, ...]:
        return tuple(sorted({v for v, m in zip(self.versions, self.loss_mask, strict=True) if m}))

    def check_open(self) -> None:
        """Raises Conflict when a turn cannot begin now."""
        if self.phase != "live":
            raise Conflict(f"session {self.session_id} is {self.phase}", hint="make a new one with POST /sessions")
        if self.running is not None:
            raise Conflict(
                f"session {self.session_id} has a turn under way",
                hint="sessions are linear: wait for its answer, or use another session",
            )

    def begin_turn(self, request: TurnRequest, now: float) -> None:
        """Takes the prompt's new ids into the record. Raises Conflict, changing nothing."""
        self.check_open()
        recorded = len(self.token_ids)
        self._before = _Before(recorded)
        if list(request.prompt_ids[:recorded]) != self.token_ids:
            self._before = self._rebase()
            recorded = 0
        self._extend(request.prompt_ids[recorded:], None, None)
        self.running = request.turn_id
        self.touched_unix_s = now

    def end_turn(self, record: TurnRecord, now: float) -> None:
        """Takes the answer's tokens in; `record.segments` count its generated tokens."""
        assert self.running == record.request.turn_id, (self.running, record.request.turn_id)
        offset = len(self.token_ids)
        versions = [v for s in record.segments for v in [s.version] * (s.end - s.start)]
        self._extend(record.token_ids, record.logprobs, versions)
        self.segments += [
            msgspec.structs.replace(segment, start=segment.start + offset, end=segment.end + offset)
            for segment in record.segments
            if segment.end > segment.start
        ]
        self.running = None
        self.turns += 1
        self.last_finish_reason = record.finish_reason
        self.touched_unix_s = now

    def shorten_turn(self, surplus: int) -> None:
        """A stop string matched in an answer that was already taken in: its last `surplus` tokens were never said.

        Too late once the next turn began or the session ended: what was sampled then stays.
        """
        if self.running is not None or self.phase != "live":
            return
        keep = len(self.token_ids) - surplus
        for per_token in (self.token_ids, self.logprobs, self.loss_mask, self.versions):
            del per_token[keep:]
        self.segments = [
            msgspec.structs.replace(segment, end=min(segment.end, keep))
            for segment in self.segments
            if segment.start < keep
        ]
        self.last_finish_reason = "stop"

    def drop_turn(self, now: float) -> None:
        """The running turn came to nothing (given up or lost): the record is again what it was before it."""
        assert self._before is not None
        self.running = None
        self.touched_unix_s = now
        if self._before.replaced is not None:
            self.token_ids, self.logprobs, self.loss_mask, self.versions, self.segments = self._before.replaced
            self.rebased -= 1
        else:
            for per_token in (self.token_ids, self.logprobs, self.loss_mask, self.versions):
                del per_token[self._before.num_tokens :]

    def end(self, phase: Literal["finished", "abandoned"]) -> None:
        """Raises Conflict when it has ended before, or while a turn runs and it is to be finished."""
        if self.phase != "live":
            raise Conflict(f"session {self.session_id} is already {self.phase}")
        if phase == "finished" and self.running is not None:
            raise Conflict(
                f"session {self.session_id} has a turn under way", hint="finish it after the answer, or abandon it"
            )
        self.phase = phase

    def trajectory(self, reward: float, status: str, metrics: Mapping[str, float], now: float) -> Trajectory:
        """The record as a trainer reads it."""
        return Trajectory(
            session_id=self.session_id,
            group_id=self.spec.group_id,
            sample_index=self.spec.sample_index,
            reward=reward,
            status=status,
            mixed=len(self.sampled_versions) > 1,
            split=self.spec.split,
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
            loss_mask=list(self.loss_mask),
            versions=list(self.versions),
            turns=self.turns,
            segments=list(self.segments),
            started_unix_s=self.created_unix_s,
            finished_unix_s=now,
            tags=dict(self.spec.tags),
            metrics={**metrics, **({"rebased": float(self.rebased)} if self.rebased else {})},
        )

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float] | None, versions: Sequence[int] | None) -> None:
        self.token_ids += ids
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)
        self.loss_mask += [0 if logprobs is None else 1] * len(ids)
        self.versions += versions if versions is not None else [-1] * len(ids)

    def _rebase(self) -> _Before:
        record = (self.token_ids, self.logprobs, self.loss_mask, self.versions, self.segments)
        self.rebased += 1
        self.token_ids, self.logprobs, self.loss_mask, self.versions, self.segments = [], [], [], [], []
        return _Before(len(record[0]), record)
