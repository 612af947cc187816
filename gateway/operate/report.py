"""The status report: the structs that `/status` answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from gateway.core.fleet.config import Mode
from gateway.core.fleet.state import EngineStatus
from gateway.core.types import Version, VersionPolicy
from gateway.experience.buffer import BufferStatistics
from gateway.experience.stores import DeliveryStatistics
from gateway.fleet.text_proxy import TextProxyStatistics
from gateway.runtime.counters import Counters
from gateway.sessions.trainer import AdmissionStatus, Staleness
from gateway.store.partial import PoolStatistics
from gateway.tasks import PromptPoolStatistics
from protos.access.roles import Role


class Health(msgspec.Struct):
    """`reasons`: why the gateway is not healthy; empty while it is. `warnings`: serving engines on which turn after
    turn failed, and none has ended well since: only another turn can show whether that is over."""

    serving_engines: Sequence[str]
    uptime_s: float
    reasons: Sequence[str] = ()
    warnings: Sequence[str] = ()


class AccessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Who may use the gateway. `keys`: how many keys each role has; null while access control is off, and everybody may
    do everything. `insecure`: off loopback, too, because --insecure was given. `failure`: why the key file as it is now
    is not used, and the keys before it still are; empty while it is used. `admin_listen`: where the admin listener is,
    which alone answers what changes the fleet; empty: one port answers everything."""

    keys: Mapping[Role, int] | None
    insecure: bool
    agents_may_reward: bool
    failure: str
    admin_listen: str


class HolderReport(msgspec.Struct, frozen=True):
    """What the keys of one name have: live sessions, and turns that run or wait in them."""

    sessions: int
    turns: int


class BoundsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What clients hold open, and what was refused since the start because of a bound. `strangers`: connections of
    which no request was let through yet; `made_way`: of those, closed for others. `holders`: by the names of API keys,
    those that have the most. `refused_by_key`: sessions and turns beyond --sessions-per-key and --turns-per-key."""

    connections: int
    strangers: int
    refused_connections: int
    made_way: int
    holders: Mapping[str, HolderReport]
    refused_by_key: int


class HeldBy(msgspec.Struct, frozen=True):
    """A session that keeps an engine on its version. `idle_s`: since its last turn; null if it is not known here."""

    session_id: str
    on_version_loss: VersionPolicy
    idle_s: float | None


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """`available`: the newest version that its host's relay holds. `loads`: whether its kind takes published versions
    at all. `running` and `kv_tokens` are the gateway's own count, `waiting` and `kv_usage` (0..1) the engine's word.
    `started_with`: what it calls the weights that it was started with, where it names them: they count as version 0.
    `seeds`: whether it samples by a request's `seed`, which it ignores otherwise. `last_error`: what stands against it
    now. `failing`: that turn after turn failed on it, and none has ended well since. `reason`: why it takes no new
    sessions. `held_by`: sessions for which it stays on its version though a newer
    one is there."""

    name: str
    url: str
    kind: str
    version: int
    available: int
    loads: bool
    state: EngineStatus | Literal["draining", "suspected"]
    intake: Literal["open", "closed"]
    admitted: int
    running: int
    waiting: int
    kv_usage: float
    kv_tokens: int
    kv_capacity_tokens: int
    incarnation: str
    dtype: str
    started_with: str
    seeds: bool
    last_error: str
    failing: str
    reason: str
    held_by: Sequence[HeldBy]


@dataclass(slots=True, kw_only=True)
class AllCounters(Counters):
    """`last_refresh_failure_unix_s`: 0 where none failed. `refreshes_unchanged`: of loads after which an engine
    computed exactly what it did before."""

    refreshes: int
    refresh_failures: int
    last_refresh_failure_unix_s: float
    refreshes_unchanged: int


class SessionCounts(msgspec.Struct, frozen=True):
    """`running_turns`: turns in flight; those that are `queued`, for want of an engine, are among them. `waiting_for`:
    why turns are queued, and how many for each reason."""

    live: int
    running_turns: int
    queued: int
    waiting_for: Mapping[str, int]


class PlanSummary(msgspec.Struct, frozen=True):
    version: int
    moves: int
    freed: Sequence[str]
    reasons: Sequence[str]


class LastPlans(msgspec.Struct, frozen=True):
    plans: Sequence[PlanSummary]


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """`trainer_version`: `newest_version`, or what the reader that bounds admission says, if that is more.
    `pinned_versions`: by version, the relay that has its pin. `fallback_versions`: by relay, the version that is
    pinned there for its engines to go back to. `sessions_behind`: sessions by how many versions. `store_failure`: why
    what is kept cannot be written now; empty while it can. `refused_relays`: by address, why nothing of a relay whose
    registry replaced the one that versions came from is believed. `unreachable_relays`: addresses of relays that do
    not answer now; engines beside them keep the version that they hold. `engines_elsewhere`: by name, engines that are
    not in the fleet, since another gateway has them or the relay that registered them is gone, and why. `unclaimed`:
    why claims on engines are not renewed now; empty while they are, or where no store is shared. `shared_experience`:
    the shared store of `--experience-store`; null without one."""

    access: AccessReport
    bounds: BoundsReport
    model: str
    mode: Mode
    newest_version: int
    trainer_version: int
    pinned_versions: Mapping[Version, str]
    fallback_versions: Mapping[str, Version]
    engines: Sequence[EngineReport]
    sessions: SessionCounts
    buffer: BufferStatistics
    shared_experience: DeliveryStatistics | None
    admission: AdmissionStatus
    partial_response_pool: PoolStatistics
    prompt_pool: PromptPoolStatistics
    store_failure: str
    refused_relays: Mapping[str, str]
    unreachable_relays: Sequence[str]
    engines_elsewhere: Mapping[str, str]
    unclaimed: str
    counters: AllCounters
    relayed_text: TextProxyStatistics | None
    tokens_per_s: float
    repack: LastPlans
    staleness: Staleness
    sessions_behind: Mapping[int, int]
