"""Sessions: one rollout each, token-exact. Pure; the shell owns one `SessionState` per live session.

Invariants:
- turns form a tree (`gateway.core.tree`): they may run side by side (sub-agents, `n` > 1), and an edited history begins
  a branch; nothing that was sampled is lost;
- a turn enters the tree when it is complete; one that was aborted or lost leaves no trace;
- an ended session never comes back to life.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.core.endings import Unrewarded
from gateway.core.tree import PathRecord, Turn, TurnTree
from gateway.core.types import (
    NO_VERSION,
    EngineName,
    GroupId,
    History,
    SessionId,
    Split,
    TurnId,
    TurnRecord,
    TurnRequest,
    Version,
    VersionPolicy,
)
from protos.errors import Conflict, OutOfCapacity
from protos.telemetry.context import TraceContext
from protos.trajectories import Trajectory, VersionChange

Phase = Literal["live", "finished", "abandoned"]

RUNNING_MAX = 64
"""Turns of one session at once: more are a client that does not wait for its answers."""
TURNS_MAX = 4096
"""Turns of one session in total, so that an agent in an endless loop does not fill the memory."""


SESSION_NAME = re.compile(r"[^\s/]{1,256}")
SESSION_NAME_HINT = "1 to 256 printable characters without spaces and slashes, and not `.` or `..`"


def names_a_session(text: str) -> bool:
    """Whether a session may be named so: the name stands in URLs, headers and logs."""
    return SESSION_NAME.fullmatch(text) is not None and text.isprintable() and text not in (".", "..")


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The parameters with which a session was created."""

    session_id: SessionId
    group_id: GroupId
    sample_index: int = 0
    group_size: int = 1
    split: Split = "train"
    train: bool = True
    ephemeral: bool = False
    unnamed: bool = False  # of a call that named no session, and that others may continue: no engine is held for it
    tags: Mapping[str, str] = field(default_factory=dict)
    history: History = "record"
    version: Version | None = None  # the one it must begin under
    on_version_loss: VersionPolicy = "segment"
    parent_session_id: SessionId | None = None  # whose sub-agent or opponent it is; it ends with it, if not before
    blocks_parent: bool = False  # its parent waits for it, as for a tool
    min_version: Version = NO_VERSION  # the oldest it may be on
    max_version: Version | None = None  # the newest it may be on
    max_turns: int | None = None
    expected_output_tokens: int | None = None  # of one turn, as its client thinks: where guesses begin, never a limit
    max_context_tokens: int | None = None  # of a prompt and its answer together, if that is less than the engines'
    deadline_unix_s: float | None = None  # it is abandoned then
    priority: int = 0  # among turns that wait for an engine: the highest first
    owner: str = ""  # the name whose API key made it; empty: access control was off
    trace: TraceContext | None = None  # what its spans are below: a client's span, or the root of a trace of its own

    @property
    def trains(self) -> bool:
        """What it samples is trained on."""
        return self.train and self.split == "train"

    def allows(self, version: Version) -> bool:
        """Whether the session may be on `version`."""
        return self.min_version <= version and (self.max_version is None or version <= self.max_version)


@dataclass(slots=True)
class SessionState:
    """One session's record. `version` is the one it stays on, once its first turn was placed."""

    spec: SessionSpec
    created_unix_s: float
    touched_unix_s: float
    phase: Phase = "live"
    running: dict[TurnId, TurnRequest] = field(default_factory=dict)
    version: Version | None = None
    version_changes: list[VersionChange] = field(default_factory=list)
    engine: EngineName | None = None  # where a turn of it was last placed, which holds its prefix
    moves: int = 0
    unrewarded: Unrewarded | None = None
    last_dropped: str = ""  # the last turn that was aborted or lost, and why
    tree: TurnTree = field(default_factory=TurnTree)

    @property
    def session_id(self) -> SessionId:
        return self.spec.session_id

    @property
    def turns(self) -> int:
        return len(self.tree)

    @property
    def branches(self) -> int:
        """Leaves of the tree: 1 for a conversation that was never edited."""
        return len(self.tree.leaves())

    @property
    def tokens(self) -> int:
        """On the path of the newest turn, which is what an engine most likely still holds."""
        newest = self.tree.newest
        return 0 if newest is None else newest.end

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.tree.turns.values())

    @property
    def sampled_versions(self) -> tuple[int, ...]:
        return self.tree.sampled_versions()

    @property
    def contradicted(self) -> bool:
        """An engine contradicts a version on the record."""
        return any(s.evidence == "contradicted" for turn in self.tree.turns.values() for s in turn.segments)

    @property
    def newest(self) -> PathRecord:
        """The path to the turn that ended last."""
        return self.tree.sequence(self.tree.newest, set())

    @property
    def token_ids(self) -> list[int]:
        """The ids of the path to the turn that ended last."""
        return self.tree.ids(self.tree.newest)

    @property
    def awaits_its_version(self) -> bool:
        """The session begins under the version it names, or not at all."""
        return self.spec.version is not None and not self.turns and not self.version_changes

    @property
    def insists(self) -> bool:
        """The session goes on under its version, or waits for it."""
        return self.awaits_its_version or self.spec.on_version_loss == "strict"

    def check_open(self, turns: int = 1) -> None:
        """Raises Conflict or OutOfCapacity when so many turns cannot begin now."""
        if self.phase != "live":
            raise Conflict(f"session {self.session_id} is {self.phase}", hint="make a new one with POST /sessions")
        if len(self.running) + turns > RUNNING_MAX:
            raise OutOfCapacity(
                f"session {self.session_id} has {len(self.running)} running turns",
                hint="wait for an answer, or use another session",
                retry_after_s=1.0,
            )
        most = TURNS_MAX if self.spec.max_turns is None else min(TURNS_MAX, self.spec.max_turns)
        if self.turns + len(self.running) + turns > most:
            more = "" if turns == 1 else f", and {turns} are requested,"
            raise Conflict(
                f"session {self.session_id} has had {self.turns} turns, {len(self.running)} run{more}"
                f"{'' if more else ','} of {most} at most",
                hint="finish it, and make another",
            )

    def begin_turn(self, request: TurnRequest, now: float) -> None:
        """Raises Conflict, changing nothing, when it cannot begin or what it extends is not there."""
        self.check_open()
        if request.parent is not None and request.parent not in self.tree:
            raise Conflict(f"session {self.session_id} has no turn {request.parent} to go on from")
        self.running[request.turn_id] = request
        self.touched_unix_s = now

    def end_turn(self, record: TurnRecord, now: float) -> Turn:
        """Takes the turn into the tree; `record.segments` count its generated tokens."""
        del self.running[record.request.turn_id]
        self.touched_unix_s = now
        return self.tree.add(record)

    def restore_turn(self, record: TurnRecord) -> None:
        """An ended turn of an earlier life of the gateway."""
        self.tree.add(record)
        if record.segments:
            last = record.segments[-1]
            self.version, self.engine = Version(last.version), EngineName(last.engine)

    def seen(self, turn_id: TurnId, num_tokens: int | None) -> bool:
        """How much of an ended turn's answer a client was sent; None: all of it. Whether that is news."""
        turn = self.tree.turns.get(turn_id)
        if turn is None or turn.seen == num_tokens:
            return False
        turn.seen = num_tokens
        return True

    def note_messages(self, turn_id: TurnId, head: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
        """Records the messages of a turn, once its answer was sent."""
        turn = self.tree.turns[turn_id]
        turn.head, turn.messages = head, tuple(messages)

    def shorten_turn(self, turn_id: TurnId, num_tokens: int) -> bool:
        """A stop string matched in a turn that is in the tree already: only its first `num_tokens` tokens remain.

        Too late once a turn went on from it or the session ended: what was sampled then stays (False).
        """
        turn = self.tree.turns[turn_id]
        extended = any(request.parent == turn_id for request in self.running.values()) or self.tree.children(turn)
        if self.phase != "live" or extended:
            return False
        turn.shorten(num_tokens)
        return True

    def drop_turn(self, turn_id: TurnId, now: float) -> None:
        """The turn was aborted or lost: the session is as if it had never been requested."""
        del self.running[turn_id]
        self.touched_unix_s = now

    def end(self, phase: Literal["finished", "abandoned"]) -> None:
        """Raises Conflict when it has ended before, or while a turn runs and it is to be finished."""
        if self.phase != "live":
            raise Conflict(f"session {self.session_id} is already {self.phase}")
        if phase == "finished" and self.running:
            raise Conflict(
                f"session {self.session_id} has a running turn", hint="finish it after the answer, or abandon it"
            )
        self.phase = phase

    def trajectories(
        self, reward: float, status: str, metrics: Mapping[str, float], now: float
    ) -> Iterator[Trajectory]:
        """The record as a trainer reads it: one trajectory for each leaf, the session's own first. Each is made when it
        is taken: together they have `tree.path_tokens` tokens."""
        leaves, mixed = self.branches, len(self.sampled_versions) > 1
        for leaf, path in enumerate(self.tree.sequences()):
            yield self._trajectory(path, leaf, leaves, mixed, reward, status, metrics, now)

    def _trajectory(
        self,
        path: PathRecord,
        leaf: int,
        leaves: int,
        mixed: bool,
        reward: float,
        status: str,
        metrics: Mapping[str, float],
        now: float,
    ) -> Trajectory:
        own = path.turns[-1].leaf_reward
        turn_rewards = [turn.reward for turn in path.turns]
        return Trajectory(
            session_id=self.session_id,
            group_id=self.spec.group_id,
            sample_index=self.spec.sample_index,
            reward=reward if own is None else own,
            status=status,
            mixed=mixed,
            split=self.spec.split,
            token_ids=path.token_ids,
            logprobs=path.logprobs,
            loss_mask=path.loss_mask,
            versions=path.versions,
            turns=len(path.turns),
            segments=list(path.segments),
            started_unix_s=self.created_unix_s,
            finished_unix_s=now,
            tags=dict(self.spec.tags),
            metrics=dict(metrics),
            version_policy=self.spec.on_version_loss,
            version_changes=list(self.version_changes),
            turn_ids=[turn.turn_id for turn in path.turns],
            own_reward=own is not None,
            leaf=leaf,
            leaves=leaves,
            turn_rewards=[] if turn_rewards.count(None) == len(turn_rewards) else turn_rewards,
        )
