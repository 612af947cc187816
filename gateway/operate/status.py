"""The gateway's status: one report that the status page, metrics, demo and tests read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Literal

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, CollectorRegistry

from gateway.config import GatewayConfig
from gateway.core.fleet import EngineState, EngineStatus
from gateway.core.hold import hold
from gateway.core.reasons import closed_reason
from gateway.core.repack import Plan
from gateway.core.types import SessionId
from gateway.experience import ExperienceBuffer
from gateway.fleet.fleet import Fleet
from gateway.fleet.text_proxy import TextProxy
from gateway.operate.report import (
    AllCounters,
    EngineReport,
    HeldBy,
    LastPlans,
    PlanSummary,
    SessionCounts,
    StatusReport,
)
from gateway.repack.loop import Repacker
from gateway.runtime.clock import unix_s
from gateway.sessions.service import TurnService
from gateway.sessions.trainer import Trainer
from gateway.store import Database, PartialResponsePool, Timeline

RATE_WINDOW_S = 10.0
HELD_BY_MAX = 16
"""Sessions that are named where they hold an engine."""


class GatewayStatus:
    """Reads every part's statistics; owns nothing but the token rate's window."""

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
        timeline: Timeline,
        relay: TextProxy | None = None,
        database: Database,
    ) -> None:
        self.config, self.fleet, self.sessions, self.repacker = config, fleet, sessions, repacker
        self.trainer = trainer
        self.buffer, self.pool, self.timeline = buffer, pool, timeline
        self.relay = relay
        self.database = database
        self.started = time.monotonic()
        self.registry: CollectorRegistry = REGISTRY
        self._rate: deque[tuple[float, int]] = deque(maxlen=256)
        self._provider = MeterProvider(metric_readers=[PrometheusMetricReader(disable_target_info=True)])
        self._instruments()

    def close(self) -> None:
        self._provider.shutdown()

    def snapshot(self) -> StatusReport:
        fleet, sessions, told = self.fleet, self.sessions, self.fleet.statistics()
        return StatusReport(
            model=self.config.model,
            mode=self.config.fleet.mode,
            newest_version=fleet.state.newest,
            trainer_version=self.trainer.version,
            pinned_versions=fleet.pinning.pinned,
            fallback_versions=fleet.pinning.fallbacks,
            engines=[self._engine(engine, time.monotonic()) for engine in fleet.state.sorted_engines()],
            sessions=SessionCounts(len(sessions.live), len(sessions.runs), told.queued, told.waiting_for),
            buffer=self.buffer.statistics(),
            admission=self.trainer.status(),
            partial_response_pool=self.pool.statistics(),
            store_failure=self.database.failure,
            refused_relays=fleet.relays.refused(),
            unreachable_relays=fleet.relays.unreachable(),
            counters=AllCounters(
                **asdict(sessions.counters),
                refreshes=told.refreshes,
                refresh_failures=told.refresh_failures,
                refreshes_unchanged=told.refreshes_unchanged,
            ),
            relayed_text=None if self.relay is None else self.relay.statistics(),
            tokens_per_s=self._tokens_per_s(),
            repack=LastPlans([_summary(plan) for plan in self.repacker.last]),
            staleness=self.trainer.staleness,
            sessions_behind=sessions.version_histogram(),
        )

    def _tokens_per_s(self) -> float:
        now, total = time.monotonic(), self.sessions.counters.tokens_generated
        self._rate.append((now, total))
        while len(self._rate) > 2 and now - self._rate[0][0] > RATE_WINDOW_S:
            self._rate.popleft()
        then, before = self._rate[0]
        return (total - before) / (now - then) if now > then else 0.0

    def _engine(self, engine: EngineState, now: float) -> EngineReport:
        held = hold(self.fleet.state, engine, now)
        return EngineReport(
            name=engine.name,
            url=engine.url,
            kind=engine.kind,
            version=engine.version,
            available=engine.available,
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
            last_error=engine.last_error,
            reason=closed_reason(self.fleet.state, engine, now),
            held_by=[] if held is None else [self._held_by(s) for s in held.sessions[:HELD_BY_MAX]],
        )

    def _held_by(self, session_id: SessionId) -> HeldBy:
        session = self.sessions.live.find(session_id)
        policy = self.fleet.state.policies.get(session_id, "segment")
        return HeldBy(session_id, policy, None if session is None else max(0.0, unix_s() - session.touched_unix_s))

    # -- metrics

    def _instruments(self) -> None:
        meter = self._provider.get_meter("laminar.gateway")
        for name, value in self.sessions.counters.__dataclass_fields__.items():
            if value.type == "int":
                meter.create_observable_counter(f"laminar_gateway_{name}", [self._counter(name)])
        if self.relay is not None:
            statistics = self.relay.statistics
            meter.create_observable_gauge("laminar_gateway_text_running", [_observe(lambda: statistics().running)])
            for name, read in (
                ("relayed", lambda: statistics().relayed),
                ("retried", lambda: statistics().retried),
                ("failed", lambda: statistics().failed),
            ):
                meter.create_observable_counter(f"laminar_gateway_text_{name}", [_observe(read)])
        meter.create_observable_counter("laminar_gateway_cuts", [self._cuts], description="Cut streams by reason.")
        fleet = self.fleet
        meter.create_observable_counter("laminar_gateway_refreshes", [_observe(lambda: fleet.statistics().refreshes)])
        meter.create_observable_counter(
            "laminar_gateway_refresh_failures", [_observe(lambda: fleet.statistics().refresh_failures)]
        )
        meter.create_observable_counter(
            "laminar_gateway_refreshes_unchanged", [_observe(lambda: fleet.statistics().refreshes_unchanged)]
        )
        meter.create_observable_gauge("laminar_gateway_engine_version", [self._per_engine(lambda e: e.version)])
        meter.create_observable_gauge("laminar_gateway_engine_running", [self._per_engine(lambda e: len(e.turns))])
        meter.create_observable_gauge("laminar_gateway_engine_kv_usage", [self._per_engine(lambda e: e.kv_usage)])
        meter.create_observable_gauge(
            "laminar_gateway_engine_serving", [self._per_engine(lambda e: int(e.status == "serving"))]
        )
        meter.create_observable_gauge("laminar_gateway_store_failed", [_observe(lambda: bool(self.database.failure))])
        meter.create_observable_gauge("laminar_gateway_newest_version", [_observe(lambda: self.fleet.state.newest)])
        meter.create_observable_gauge(
            "laminar_gateway_queued_turns", [_observe(lambda: self.fleet.statistics().queued)]
        )
        meter.create_observable_gauge(
            "laminar_gateway_buffered_trajectories", [_observe(lambda: self.buffer.statistics().trajectories)]
        )

    def _cuts(self, _: CallbackOptions) -> Iterable[Observation]:
        reasons = self.sessions.counters.cuts_by_reason
        return [Observation(count, {"reason": reason}) for reason, count in sorted(reasons.items())]

    def _counter(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return _observe(lambda: getattr(self.sessions.counters, name))

    def _per_engine(self, read: Callable[[EngineState], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(read(e), {"engine": e.name}) for e in self.fleet.state.sorted_engines()]

        return observe


def _summary(plan: Plan) -> PlanSummary:
    return PlanSummary(plan.version, len(plan.moves), [freed.engine for freed in plan.freed], plan.reasons)


def _observe(read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [Observation(read())]


def _state(engine: EngineState) -> EngineStatus | Literal["draining"]:
    """`draining`: it serves what it has, takes no new sessions, and a newer version waits for it."""
    if engine.status == "serving" and not engine.intake_open and engine.newer:
        return "draining"
    return engine.status
