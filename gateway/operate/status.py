"""The gateway's status and health as reports, from every part's statistics; it serves the metrics too."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import asdict
from typing import Any, Literal

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest

from gateway.config import GatewayConfig
from gateway.core.connections import Connections
from gateway.core.fleet.hold import hold
from gateway.core.fleet.state import EngineState, EngineStatus
from gateway.core.packing.plans import Plan
from gateway.core.placing.reasons import closed_reason, closed_reasons
from gateway.core.types import SessionId
from gateway.experience import ExperienceBuffer
from gateway.fleet.fleet import Fleet
from gateway.fleet.text_proxy import TextProxy
from gateway.operate.metrics import Sources, add_metrics
from gateway.operate.report import (
    AccessReport,
    AllCounters,
    BoundsReport,
    EngineReport,
    Health,
    HeldBy,
    HolderReport,
    LastPlans,
    PlanSummary,
    SessionCounts,
    StatusReport,
)
from gateway.repack.loop import Repacker
from gateway.runtime.clock import unix_s
from gateway.sessions.trainer import Trainer
from gateway.sessions.turn_service import TurnService
from gateway.store import Database, PartialResponsePool
from gateway.tasks import PromptPool
from protos.access.key_file import KeyFile
from protos.telemetry.metrics import on_loop

RATE_WINDOW_S = 10.0
HELD_BY_MAX = 16
"""Sessions named of those that hold one engine."""


class GatewayStatus:
    """Owner of the metrics and of the token rate's window; everything else is read when a report is made."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        fleet: Fleet,
        sessions: TurnService,
        trainer: Trainer,
        repacker: Repacker,
        buffer: ExperienceBuffer,
        pool: PartialResponsePool,
        tasks: PromptPool,
        text_proxy: TextProxy | None = None,
        database: Database,
        keys: KeyFile | None = None,
        meter: Meter | None = None,
        connections: Connections[Any],
    ) -> None:
        self._config, self._fleet, self._sessions, self._repacker = config, fleet, sessions, repacker
        self._trainer, self._buffer, self._pool, self._text_proxy = trainer, buffer, pool, text_proxy
        self._database, self._tasks, self._keys = database, tasks, keys
        self._connections = connections
        self.admin_url = ""
        """Where the admin listener is, once it is there; empty: there is none."""
        self._started = time.monotonic()
        self._rate: deque[tuple[float, int]] = deque(maxlen=256)
        self._provider = MeterProvider(metric_readers=[PrometheusMetricReader(disable_target_info=True)])
        sources = Sources(fleet, sessions, buffer, database, tasks, trainer, text_proxy)
        add_metrics(self._provider.get_meter("laminar.gateway"), sources)
        if meter is not None:  # it collects in a thread of its own
            add_metrics(meter, sources, on_loop(asyncio.get_running_loop()))

    def close(self) -> None:
        self._provider.shutdown()

    def health(self) -> Health:
        """Healthy while an engine serves and the store can be written."""
        serving = [e.name for e in self._fleet.state.sorted_engines() if e.takes_turns]
        why = closed_reasons(self._fleet.state, time.monotonic())
        reasons = [] if serving else [f"no engine serves: {why}" if why else "no engine serves"]
        if failure := self._database.failure:
            reasons.append(f"the store cannot be written: {failure}")
        warnings = [f"engine {e.name} {e.failing}" for e in self._fleet.state.sorted_engines() if e.failing]
        return Health(serving, time.monotonic() - self._started, reasons, warnings)

    def metrics(self) -> bytes:
        """All metrics, in the Prometheus text format."""
        return generate_latest(REGISTRY)

    def report(self) -> StatusReport:
        fleet, sessions, statistics = self._fleet, self._sessions, self._fleet.statistics()
        return StatusReport(
            access=AccessReport(
                keys=None if self._keys is None else self._keys.by_role(),
                insecure=self._config.insecure,
                agents_may_reward=self._config.agents_may_reward,
                failure="" if self._keys is None else self._keys.failure,
                admin_listen=self.admin_url,
            ),
            bounds=self._bounds(),
            model=self._config.model,
            mode=self._config.fleet.mode,
            newest_version=fleet.state.newest,
            trainer_version=self._trainer.version,
            pinned_versions=fleet.pins.pinned,
            fallback_versions=fleet.pins.fallbacks,
            engines=[self._engine(engine, time.monotonic()) for engine in fleet.state.sorted_engines()],
            sessions=SessionCounts(
                len(sessions.live), len(sessions.running), statistics.queued, statistics.waiting_for
            ),
            buffer=self._buffer.statistics(),
            shared_experience=self._buffer.delivery(),
            admission=self._trainer.status(),
            partial_response_pool=self._pool.statistics(),
            prompt_pool=self._tasks.statistics(),
            store_failure=self._database.failure,
            refused_relays=fleet.relays.refused(),
            unreachable_relays=fleet.relays.unreachable(),
            engines_elsewhere=fleet.elsewhere,
            unclaimed=fleet.claims.failure,
            counters=AllCounters(
                **asdict(sessions.counters),
                refreshes=statistics.refreshes,
                refresh_failures=statistics.refresh_failures,
                last_refresh_failure_unix_s=statistics.last_refresh_failure_unix_s,
                refreshes_unchanged=statistics.refreshes_unchanged,
            ),
            relayed_text=None if self._text_proxy is None else self._text_proxy.statistics(),
            tokens_per_s=self._tokens_per_s(),
            repack=LastPlans([_summary(plan) for plan in self._repacker.last]),
            staleness=self._trainer.staleness,
            sessions_behind=sessions.version_histogram(),
        )

    def _bounds(self) -> BoundsReport:
        counts, bounds = self._connections.counts(), self._sessions.live.bounds
        return BoundsReport(
            connections=counts.open,
            strangers=counts.strangers,
            refused_connections=counts.refused,
            made_way=counts.made_way,
            holders={name: HolderReport(*has) for name, has in bounds.by_holder().items()},
            refused_by_key=bounds.refused,
        )

    def _tokens_per_s(self) -> float:
        now, total = time.monotonic(), self._sessions.counters.tokens_generated
        self._rate.append((now, total))
        while len(self._rate) > 2 and now - self._rate[0][0] > RATE_WINDOW_S:
            self._rate.popleft()
        then, before = self._rate[0]
        return (total - before) / (now - then) if now > then else 0.0

    def _engine(self, engine: EngineState, now: float) -> EngineReport:
        held = hold(self._fleet.state, engine, now)
        return EngineReport(
            name=engine.name,
            url=engine.url,
            kind=engine.kind,
            version=engine.version,
            available=engine.available,
            loads=engine.loads,
            state=_state(engine),
            intake="open" if engine.intake_open else "closed",
            admitted=engine.admitted,
            running=len(engine.turns),
            waiting=engine.waiting_reported,
            kv_usage=engine.kv_usage,
            kv_tokens=engine.tokens,
            kv_capacity_tokens=engine.kv_capacity_tokens,
            incarnation=engine.incarnation,
            dtype=engine.dtype,
            started_with=engine.started_with,
            seeds=engine.seeds,
            last_error=engine.last_error,
            failing=engine.failing,
            reason=closed_reason(self._fleet.state, engine, now),
            held_by=[] if held is None else [self._held_by(s) for s in held.sessions[:HELD_BY_MAX]],
        )

    def _held_by(self, session_id: SessionId) -> HeldBy:
        session = self._sessions.live.find(session_id)
        policy = self._fleet.state.policies.get(session_id, "segment")
        return HeldBy(session_id, policy, None if session is None else max(0.0, unix_s() - session.touched_unix_s))


def _summary(plan: Plan) -> PlanSummary:
    return PlanSummary(plan.version, plan.num_moves, [freed.engine for freed in plan.freed], plan.reasons)


def _state(engine: EngineState) -> EngineStatus | Literal["draining", "suspected"]:
    """`draining`: it serves what it has, takes no new sessions, and a newer version waits for it. `suspected`: it gets
    no turns for the reason that it has."""
    if engine.suspicion:
        return "suspected"
    if engine.status == "serving" and not engine.intake_open and engine.newer:
        return "draining"
    return engine.status
