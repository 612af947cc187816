"""The gateway's status and health, as reports and as metrics, from every part's statistics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Literal

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest

from gateway.config import GatewayConfig
from gateway.core.fleet import EngineState, EngineStatus
from gateway.core.hold import hold
from gateway.core.reasons import closed_reason
from gateway.core.repack import Plan
from gateway.core.types import SessionId
from gateway.experience import ExperienceBuffer
from gateway.experience.buffer import DeliveryStatistics
from gateway.fleet.fleet import Fleet
from gateway.fleet.text_proxy import TextProxy
from gateway.operate.report import (
    AccessReport,
    AllCounters,
    EngineReport,
    Health,
    HeldBy,
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
    ) -> None:
        self._config, self._fleet, self._sessions, self._repacker = config, fleet, sessions, repacker
        self._trainer, self._buffer, self._pool, self._text_proxy = trainer, buffer, pool, text_proxy
        self._database, self._tasks, self._keys = database, tasks, keys
        self._started = time.monotonic()
        self._rate: deque[tuple[float, int]] = deque(maxlen=256)
        self._provider = MeterProvider(metric_readers=[PrometheusMetricReader(disable_target_info=True)])
        self._instruments()

    def close(self) -> None:
        self._provider.shutdown()

    def health(self) -> Health:
        """Healthy while an engine serves and the store can be written."""
        serving = [e.name for e in self._fleet.state.sorted_engines() if e.status == "serving"]
        reasons = [] if serving else ["no engine serves"]
        if failure := self._database.failure:
            reasons.append(f"the store cannot be written: {failure}")
        return Health(serving, time.monotonic() - self._started, reasons)

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
            ),
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
            counters=AllCounters(
                **asdict(sessions.counters),
                refreshes=statistics.refreshes,
                refresh_failures=statistics.refresh_failures,
                refreshes_unchanged=statistics.refreshes_unchanged,
            ),
            relayed_text=None if self._text_proxy is None else self._text_proxy.statistics(),
            tokens_per_s=self._tokens_per_s(),
            repack=LastPlans([_summary(plan) for plan in self._repacker.last]),
            staleness=self._trainer.staleness,
            sessions_behind=sessions.version_histogram(),
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
            last_error=engine.last_error,
            reason=closed_reason(self._fleet.state, engine, now),
            held_by=[] if held is None else [self._held_by(s) for s in held.sessions[:HELD_BY_MAX]],
        )

    def _held_by(self, session_id: SessionId) -> HeldBy:
        session = self._sessions.live.find(session_id)
        policy = self._fleet.state.policies.get(session_id, "segment")
        return HeldBy(session_id, policy, None if session is None else max(0.0, unix_s() - session.touched_unix_s))

    # -- metrics

    def _instruments(self) -> None:
        meter = self._provider.get_meter("laminar.gateway")
        for name, value in self._sessions.counters.__dataclass_fields__.items():
            if value.type == "int":
                meter.create_observable_counter(f"laminar_gateway_{name}", [self._counter(name)])
        if self._text_proxy is not None:
            statistics = self._text_proxy.statistics
            meter.create_observable_gauge("laminar_gateway_text_running", [_observe(lambda: statistics().running)])
            for name, read in (
                ("relayed", lambda: statistics().relayed),
                ("retried", lambda: statistics().retried),
                ("failed", lambda: statistics().failed),
            ):
                meter.create_observable_counter(f"laminar_gateway_text_{name}", [_observe(read)])
        meter.create_observable_counter("laminar_gateway_cuts", [self._cuts], description="Cut streams by reason.")
        fleet = self._fleet
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
        meter.create_observable_gauge("laminar_gateway_store_failed", [_observe(lambda: bool(self._database.failure))])
        meter.create_observable_gauge("laminar_gateway_newest_version", [_observe(lambda: self._fleet.state.newest)])
        meter.create_observable_gauge(
            "laminar_gateway_queued_turns", [_observe(lambda: self._fleet.statistics().queued)]
        )
        meter.create_observable_gauge(
            "laminar_gateway_buffered_trajectories", [_observe(lambda: self._buffer.statistics().trajectories)]
        )

        self._task_instruments()
        self._delivery_instruments()

    def _delivery_instruments(self) -> None:
        """Of the store that gateways share, where there is one."""
        if self._buffer.delivery() is None:
            return
        meter = self._provider.get_meter("laminar.gateway")
        gauges: Mapping[str, Callable[[DeliveryStatistics], float]] = {
            "failed": lambda found: bool(found.failure),
            "waiting": lambda found: found.waiting,
            "waiting_bytes": lambda found: found.waiting_bytes,
        }
        counters: Mapping[str, Callable[[DeliveryStatistics], float]] = {
            "delivered": lambda found: found.delivered,
            "failed_calls": lambda found: found.failed_calls,
        }
        for name, read in gauges.items():
            meter.create_observable_gauge(f"laminar_gateway_shared_experience_{name}", [self._delivery(read)])
        for name, read in counters.items():
            meter.create_observable_counter(f"laminar_gateway_shared_experience_{name}", [self._delivery(read)])

    def _delivery(
        self, read: Callable[[DeliveryStatistics], float]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            found = self._buffer.delivery()
            return [] if found is None else [Observation(read(found))]

        return observe

    def _task_instruments(self) -> None:
        meter, statistics = self._provider.get_meter("laminar.gateway"), self._tasks.statistics
        meter.create_observable_gauge("laminar_gateway_tasks", [_observe(lambda: statistics().tasks)])
        meter.create_observable_gauge("laminar_gateway_task_leases", [_observe(lambda: statistics().leases)])
        for name, read in (
            ("leased", lambda: statistics().leased),
            ("finished", lambda: statistics().finished),
            ("failed", lambda: statistics().failed),
            ("released", lambda: statistics().released),
            ("expired", lambda: statistics().expired),
            ("given_up", lambda: statistics().given_up),
        ):
            meter.create_observable_counter(f"laminar_gateway_tasks_{name}", [_observe(read)])

    def _cuts(self, _: CallbackOptions) -> Iterable[Observation]:
        reasons = self._sessions.counters.cuts_by_reason
        return [Observation(count, {"reason": reason}) for reason, count in sorted(reasons.items())]

    def _counter(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return _observe(lambda: getattr(self._sessions.counters, name))

    def _per_engine(self, read: Callable[[EngineState], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(read(e), {"engine": e.name}) for e in self._fleet.state.sorted_engines()]

        return observe


def _summary(plan: Plan) -> PlanSummary:
    return PlanSummary(plan.version, plan.num_moves, [freed.engine for freed in plan.freed], plan.reasons)


def _observe(read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [Observation(read())]


def _state(engine: EngineState) -> EngineStatus | Literal["draining"]:
    """`draining`: it serves what it has, takes no new sessions, and a newer version waits for it."""
    if engine.status == "serving" and not engine.intake_open and engine.newer:
        return "draining"
    return engine.status
