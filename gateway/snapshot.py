"""The shape of what the gateway tells of itself, as `/status` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from gateway.core.fleet import EngineStatus, Mode
from gateway.core.types import Version
from gateway.counters import Counters
from gateway.data.experience import BufferStatistics
from gateway.data.partial import PoolStatistics
from gateway.relaying import RelayStatistics
from gateway.trainer import Staleness


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`available`: the newest version that its host's relay holds. `running` and `kv_tokens` are the gateway's own
    count, `waiting` and `kv_usage` (0..1) the engine's word. `last_error`: what stands against it now."""

    name: str
    url: str
    kind: str
    version: int
    available: int
    state: EngineStatus | Literal["draining"]
    intake: Literal["open", "closed"]
    admitted: int
    running: int
    waiting: int
    kv_usage: float
    kv_tokens: int
    kv_capacity_tokens: int
    incarnation: str
    last_error: str


@dataclass(slots=True, kw_only=True)
class AllCounters(Counters):
    """`refreshes_unchanged`: of loads after which an engine computed exactly what it did before."""

    refreshes: int
    refresh_failures: int
    refreshes_unchanged: int


class SessionCounts(msgspec.Struct, frozen=True):
    live: int
    running_turns: int
    queued: int


class PlanSummary(msgspec.Struct, frozen=True):
    version: int
    moves: int
    freed: Sequence[str]
    reasons: Sequence[str]


class LastPlans(msgspec.Struct, frozen=True):
    plans: Sequence[PlanSummary]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`pinned_versions`: by version, the relay that has its pin. `sessions_behind`: sessions by how many versions."""

    model: str
    mode: Mode
    newest_version: int
    trainer_version: int
    pinned_versions: Mapping[Version, str]
    engines: Sequence[EngineSnapshot]
    sessions: SessionCounts
    buffer: BufferStatistics
    partial_response_pool: PoolStatistics
    counters: AllCounters
    relayed_text: RelayStatistics | None
    tokens_per_s: float
    repack: LastPlans
    staleness: Staleness
    sessions_behind: Mapping[int, int]
