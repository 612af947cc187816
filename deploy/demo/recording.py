"""The observations of a run: events and status of the gateway, the trainer and the relays, and the demo's own notes.

A recording is a list of observations in the order in which they reached the demo. All times are unix seconds of
this one machine. Fields that a daemon adds later are ignored; a field that has another type than here is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway: a run of tokens of one turn made by one engine under one version."""

    session_id: str
    group_id: str = ""
    turn: int
    engine: str
    version: int
    started_unix_s: float
    ended_unix_s: float
    tokens: int
    dtype: str = ""  # what the engine computed in
    cause: str  # "start" | "move" | "cut": why this segment began
    end: str  # "finished" | "moved" | "cut" | "aborted"


class Refresh(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway: an engine loaded another version. `t_unix_s` is its end."""

    t_unix_s: float
    engine: str
    from_version: int
    to_version: int
    seconds: float
    pause_s: float = 0.0


class Move(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    source: str
    destination: str
    tokens: int = 0


class Repack(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway: a plan that emptied whole engines."""

    t_unix_s: float
    version: int
    moves: tuple[Move, ...] = ()
    freed: tuple[str, ...] = ()
    reason: str = ""


class EngineChange(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway: an engine's state changed."""

    t_unix_s: float
    engine: str
    state: str
    reason: str = ""


class SessionChange(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway: a session began or ended."""

    t_unix_s: float
    session_id: str
    group_id: str = ""
    state: str  # "started" | "finished" | "abandoned"
    reward: float | None = None
    environment: str = ""
    turns: int = 0
    train: bool = True


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer: one publish, reported at `t`, when all relays held the version. Durations since the call."""

    t: float
    version: int
    step: int
    stall_s: float
    sealed_s: float
    broadcast_s: float | None = None

    @property
    def began_unix_s(self) -> float:
        return self.t - (self.broadcast_s if self.broadcast_s is not None else self.sealed_s)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer: one optimiser step; `version` is what it published."""

    t: float
    step: int
    version: int
    reward_mean: float
    loss: float
    staleness_mean: float
    staleness_max: int
    tokens: int
    seconds: float
    wait_s: float
    trajectories: int = 0


class TrainerPace(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer: its plan for the next step. `groups` 0: there is none. `steps`: the expected number at the end, which is
    `left_s` away."""

    t: float
    done: int
    groups: int
    steps: int
    left_s: float
    reason: str = ""


class StepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer: the share of a step that is done."""

    t: float
    step: int
    share: float


class RelaySeen(msgspec.Struct, frozen=True, kw_only=True):
    """Demo: a relay's view of a version changed: on its way, held complete, sealed, retired, lost."""

    t: float
    relay: str
    version: int
    kind: str  # "transfer" | "sealed" | "available" | "retired" | "lost"
    bytes_done: int = 0
    bytes_total: int = 0
    sealed_unix_s: float | None = None


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as the gateway's /status has it."""

    name: str
    version: int | None = None
    dtype: str = ""
    state: str = "unknown"
    intake: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    last_error: str | None = None


class PlanSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway: the newest repack plan for the engines of one version."""

    version: int
    moves: int = 0
    reasons: tuple[str, ...] = ()


class LastPlans(msgspec.Struct, frozen=True, kw_only=True):
    plans: tuple[PlanSeen, ...] = ()


class SessionsSeen(msgspec.Struct, frozen=True, kw_only=True):
    live: int = 0
    running_turns: int = 0
    queued: int = 0


class BufferSeen(msgspec.Struct, frozen=True, kw_only=True):
    trajectories: int = 0


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's /status at `t`."""

    t: float = 0.0
    newest_version: int | None = None
    tokens_per_s: float = 0.0
    engines: tuple[EngineStatus, ...] = ()
    sessions: SessionsSeen = SessionsSeen()
    buffer: BufferSeen = BufferSeen()
    counters: dict[str, Any] = {}
    staleness: dict[str, dict[str, int]] = {}
    repack: LastPlans = LastPlans()

    def counter(self, name: str) -> int:
        """One of the gateway's counts; 0 while it has none of that name."""
        return int(self.counters.get(name, 0))


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Demo: an action or an observation of its own."""

    t: float
    kind: str  # "phase" | "kill" | "restart" | "warning"
    text: str
    engine: str = ""


Observation = (
    Segment
    | Refresh
    | Repack
    | EngineChange
    | SessionChange
    | Publish
    | TrainerPace
    | StepProgress
    | Step
    | RelaySeen
    | GatewayStatus
    | Note
)

TIMELINE_KINDS: dict[str, type[Segment | Refresh | Repack | EngineChange | SessionChange]] = {
    "segment": Segment,
    "refresh": Refresh,
    "repack": Repack,
    "engine": EngineChange,
    "session": SessionChange,
}
TRAINER_KINDS: dict[str, type[Publish | Step | TrainerPace | StepProgress]] = {
    "publish": Publish,
    "step": Step,
    "pace": TrainerPace,
    "progress": StepProgress,
}
ALL_KINDS: dict[str, type[Observation]] = {
    **TIMELINE_KINDS,
    **TRAINER_KINDS,
    "relay": RelaySeen,
    "status": GatewayStatus,
    "note": Note,
}


def timeline_event(raw: dict[str, Any]) -> Observation | None:
    """An event of the gateway's timeline; None for kinds that the demo does not show."""
    kind = TIMELINE_KINDS.get(raw["kind"])
    return None if kind is None else msgspec.convert(raw, kind, strict=False)


def trainer_event(raw: dict[str, Any]) -> Observation | None:
    """A line of the trainer's events; None for kinds that the demo does not show."""
    kind = TRAINER_KINDS.get(raw["event"])
    return None if kind is None else msgspec.convert(raw, kind, strict=False)


class Recording:
    """Observations in order of arrival, by kind. Bounded by the length of a run: minutes."""

    def __init__(self, observations: Iterable[Observation] = ()) -> None:
        self._observations: list[Observation] = list(observations)

    def __iter__(self) -> Iterator[Observation]:
        return iter(self._observations)

    def __len__(self) -> int:
        return len(self._observations)

    def add(self, observation: Observation) -> None:
        self._observations.append(observation)

    def extend(self, observations: Iterable[Observation]) -> None:
        self._observations.extend(observations)

    def of(self, kind: type[T]) -> list[T]:
        return [seen for seen in self._observations if isinstance(seen, kind)]

    def last(self, kind: type[T]) -> T | None:
        return next((seen for seen in reversed(self._observations) if isinstance(seen, kind)), None)

    def to_json(self) -> bytes:
        """One `[kind, observation]` a line: what `from_json` reads back."""
        names = {kind: name for name, kind in ALL_KINDS.items()}
        return b"\n".join(msgspec.json.encode((names[type(seen)], seen)) for seen in self._observations)

    @classmethod
    def from_json(cls, data: bytes) -> Recording:
        pairs = (msgspec.json.decode(line) for line in data.splitlines())
        return cls(msgspec.convert(seen, ALL_KINDS[name]) for name, seen in pairs)
