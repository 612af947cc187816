"""The repack loop: every few seconds, and right after a version arrives, asks the planner and acts on its plan."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from gateway.config import GatewayConfig
from gateway.core.repack import EngineView, Plan, RepackConfig, TurnView, plan_repack
from gateway.core.types import EngineName, TurnId
from gateway.data import Timeline
from gateway.fleet import Fleet
from gateway.sessions import Sessions

log = logging.getLogger(__name__)


class Repacker:
    """Owns the history of plans. `last` is the newest plan of each version looked at."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, sessions: Sessions, timeline: Timeline) -> None:
        self.last: tuple[Plan, ...] = ()
        self._config, self._fleet, self._sessions, self._timeline = config, fleet, sessions, timeline
        self._round = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._config.repack_interval_s):
                    await self._fleet.version_available.wait()
            except TimeoutError:
                pass  # the periodic check
            self._fleet.version_available.clear()
            self.repack()

    def plan(self) -> tuple[Plan, ...]:
        """What would be done now; nothing is changed."""
        return plan_repack(
            self._views(), self._fleet.state.newest, self._limits(), seed=self._config.seed + self._round
        )

    def repack(self) -> None:
        self._round += 1
        self.last = self.plan()
        for plan in self.last:
            if plan.moves:
                self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        moved = [m for m in plan.moves if self._move(m.turn_id, m.destination)]
        self._sessions.counters.repacks += 1
        reason = "; ".join(plan.reasons)
        log.info("repack of version %d: %d of %d turns moved: %s", plan.version, len(moved), len(plan.moves), reason)
        self._timeline.add(
            "repack",
            version=plan.version,
            moves=[asdict(move) for move in moved],
            freed=list(plan.freed),
            price_s=plan.price_s,
            gain_s=plan.gain_s,
            reason=reason,
        )

    def _move(self, turn_id: TurnId, destination: EngineName) -> bool:
        run = self._sessions.runs.get(turn_id)
        return run is not None and run.move(destination) is not None

    def _limits(self) -> RepackConfig:
        fleet = self._config.fleet
        return RepackConfig(fleet.max_running, fleet.kv_max, prefill_tokens_per_s=self._config.prefill_tokens_per_s)

    def _views(self) -> list[EngineView]:
        serving = [e for e in self._fleet.state.sorted_engines() if e.status == "serving" and e.kv_capacity_tokens]
        return [
            EngineView(
                name=engine.name,
                version=engine.version,
                kv_capacity_tokens=engine.kv_capacity_tokens,
                intake_open=engine.intake_open,
                queued=engine.waiting_reported,
                turns=tuple(self._turn_views(engine.name)),
                idle_tokens=self._sessions.idle_tokens(engine.name, self._fleet.state),
            )
            for engine in serving
        ]

    def _turn_views(self, engine: EngineName) -> list[TurnView]:
        """Expected growth: half of what the turn may still generate. Remaining time: half a typical session's."""
        remaining_s = self._sessions.typical_duration_s / 2
        views = []
        for load in self._fleet.state.engines[engine].turns.values():
            run = self._sessions.runs.get(load.turn_id)
            if run is not None:
                growth = max(1, (load.tokens_max - load.tokens) // 2)
                views.append(
                    TurnView(load.turn_id, load.session_id, load.tokens, growth, run.session.moves, remaining_s)
                )
        return views
